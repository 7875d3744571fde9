"""Hugging Face tensors -> whole Megatron tensors, in numpy, by the formulas of the two formats.

Written by hand for every family and apart from the rules: reshapes of whole tensors here, boxes of
rows there. Used by tests only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Wholes = dict[str, Array]

LATENT = ("deepseek_v3", "kimi_k2", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")
GATED = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
SWAPPED_MTP = ("mimo", "qwen3_next")
GARBAGE = 1e6
"""What stands in vocabulary padding: it must never be seen again."""


def fused_qkv(q: Array, k: Array, v: Array, groups: int) -> Array:
    """[G, r, d], [G, 1, d], [G, 1, d] side by side."""
    tail = q.shape[1:]
    size = k.shape[0] // groups
    parts = [part.reshape(groups, -1, size, *tail) for part in (q, k, v)]
    return np.concatenate(parts, 1).reshape(-1, *tail)


def fused_gated_qkv(q: Array, k: Array, v: Array, groups: int) -> Array:
    """Query and gate of a head lie side by side in HF; Megatron has r queries, then r gates."""
    tail = q.shape[1:]
    size = k.shape[0] // groups
    pairs = q.reshape(groups, -1, 2, size, *tail)
    heads = np.swapaxes(pairs, 1, 2).reshape(groups, -1, size, *tail)
    others = [part.reshape(groups, 1, size, *tail) for part in (k, v)]
    return np.concatenate([heads, *others], 1).reshape(-1, *tail)


def turned(value: Array, head: int, rope: int) -> Array:
    """Heads with the rotated rows first -> heads with them last."""
    heads = value.reshape(-1, head, *value.shape[1:])
    return np.concatenate([heads[:, rope:], heads[:, :rope]], 1).reshape(value.shape)


def halves_swapped(value: Array) -> Array:
    """[A | B] -> [B | A]."""
    return np.concatenate(np.split(value, 2, 1)[::-1], 1)


@dataclass
class Inverse:
    """One checkpoint's way back. `hf` are its tensors, `prefix` that of its language model."""

    hf: Mapping[str, Array]
    config: Mapping[str, Any]
    family: str
    te: bool
    grouped: bool
    padded_vocab: int
    prefix: str = "model."

    def wholes(self, mtp: int = 0) -> Wholes:
        """Every whole Megatron tensor."""
        out: Wholes = {}
        p = self.prefix
        out["embedding.word_embeddings.weight"] = self._padded(self.hf[f"{p}embed_tokens.weight"])
        out["decoder.final_layernorm.weight"] = self.hf[f"{p}norm.weight"]
        if "lm_head.weight" in self.hf:
            out["output_layer.weight"] = self._padded(self.hf["lm_head.weight"])
        for layer in range(self.config["num_hidden_layers"]):
            self._layer(out, f"decoder.layers.{layer}.", f"{p}layers.{layer}.")
        for layer in range(mtp):
            self._mtp(out, layer)
        return out

    def _padded(self, rows: Array) -> Array:
        more = np.full((self.padded_vocab - rows.shape[0], rows.shape[1]), GARBAGE, rows.dtype)
        return np.concatenate([rows, more])

    def _mtp(self, out: Wholes, layer: int) -> None:
        to = f"mtp.layers.{layer}."
        if self.family == "mimo":
            own = f"model.mtp_layers.{layer}."
            names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
            found = [f"{own}{name}.weight" for name in names]
        elif self.family in GATED:
            own = f"mtp.layers.{layer}."
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
            found = [f"mtp.{name}.weight" for name in names]
        else:
            own = f"model.layers.{self.config['num_hidden_layers'] + layer}."
            names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
            found = [f"{own}{name}.weight" for name in names]
        enorm, hnorm, final, joined = (self.hf[name] for name in found)
        out[f"{to}enorm.weight"], out[f"{to}hnorm.weight"] = enorm, hnorm
        out[f"{to}final_layernorm.weight"] = final
        swapped = self.family in SWAPPED_MTP
        out[f"{to}eh_proj.weight"] = halves_swapped(joined) if swapped else joined
        self._layer(out, f"{to}transformer_layer.", own)

    def _layer(self, out: Wholes, m: str, h: str) -> None:
        attention = f"{m}self_attention."
        if f"{h}linear_attn.A_log" in self.hf:
            out[f"{attention}input_layernorm.weight"] = self.hf[f"{h}input_layernorm.weight"]
            own = f"{h}linear_attn."
            for name in self.hf:
                if name.startswith(own):
                    out[f"{attention}linear_attn.{name.removeprefix(own)}"] = self.hf[name]
        else:
            fused = self.te and self.family not in LATENT
            norm = (f"{attention}linear_qkv.layer_norm_weight" if fused
                    else f"{m}input_layernorm.weight")  # fmt: skip
            out[norm] = self.hf[f"{h}input_layernorm.weight"]
            if self.family in LATENT:
                self._latent(out, attention, f"{h}self_attn.")
            else:
                self._groups(out, attention, f"{h}self_attn.")
        dense = self._mlp(out, m, h)
        norm = (f"{m}mlp.linear_fc1.layer_norm_weight" if self.te and dense
                else f"{m}pre_mlp_layernorm.weight")  # fmt: skip
        out[norm] = self.hf[f"{h}post_attention_layernorm.weight"]
        for name in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"):
            if h + name in self.hf:
                out[m + name] = self.hf[h + name]

    def _groups(self, out: Wholes, m: str, h: str) -> None:
        fuse = fused_gated_qkv if self.family in GATED else fused_qkv
        for part in ("weight", "bias"):
            if f"{h}q_proj.{part}" in self.hf:
                q, k, v = (self.hf[f"{h}{name}_proj.{part}"] for name in "qkv")
                groups = self.config["num_key_value_heads"]
                out[f"{m}linear_qkv.{part}"] = fuse(q, k, v, groups)
            if f"{h}o_proj.{part}" in self.hf:
                out[f"{m}linear_proj.{part}"] = self.hf[f"{h}o_proj.{part}"]
        for name in "qk":
            if f"{h}{name}_norm.weight" in self.hf:
                out[f"{m}{name}_layernorm.weight"] = self.hf[f"{h}{name}_norm.weight"]
        if f"{h}sinks" in self.hf:
            out[f"{m}core_attention.softmax_offset"] = self.hf[f"{h}sinks"]

    def _latent(self, out: Wholes, m: str, h: str) -> None:
        q_norm = "linear_q_up_proj.layer_norm_weight" if self.te else "q_layernorm.weight"
        kv_norm = "linear_kv_up_proj.layer_norm_weight" if self.te else "kv_layernorm.weight"
        for name, source in (
            ("linear_q_proj.weight", "q_proj"), ("linear_q_down_proj.weight", "q_a_proj"),
            (q_norm, "q_a_layernorm"), ("linear_q_up_proj.weight", "q_b_proj"),
            ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa"), (kv_norm, "kv_a_layernorm"),
            ("linear_kv_up_proj.weight", "kv_b_proj"), ("linear_proj.weight", "o_proj"),
        ):  # fmt: skip
            if f"{h}{source}.weight" in self.hf:
                out[m + name] = self.hf[f"{h}{source}.weight"]
        if f"{h}indexer.wk.weight" in self.hf:
            head, rope = self.config["index_head_dim"], self.config["qk_rope_head_dim"]
            for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias"):
                out[m + name] = turned(self.hf[f"{h}indexer.{name}"], head, rope)
            out[f"{m}weights_proj.weight"] = self.hf[f"{h}indexer.weights_proj.weight"]

    def _mlp(self, out: Wholes, m: str, h: str) -> bool:
        """Returns whether the layer is dense."""
        hf = self.hf
        if self.family == "glm4":
            out[f"{m}mlp.linear_fc1.weight"] = hf[f"{h}mlp.gate_up_proj.weight"]
            out[f"{m}mlp.linear_fc2.weight"] = hf[f"{h}mlp.down_proj.weight"]
            return True
        if f"{h}mlp.gate_proj.weight" in hf:
            self._gated_mlp(out, f"{m}mlp.", f"{h}mlp.", ("gate_proj", "up_proj", "down_proj"))
            return True
        moe = f"{h}block_sparse_moe." if self.family == "minimax_m2" else f"{h}mlp."
        router = "router" if self.family == "gpt_oss" else "gate"
        out[f"{m}mlp.router.weight"] = hf[f"{moe}{router}.weight"]
        for name, source in (
            ("expert_bias", f"{h}mlp.gate.e_score_correction_bias"),
            ("expert_bias", f"{h}block_sparse_moe.e_score_correction_bias"),
            ("bias", f"{h}mlp.router.bias"),
        ):
            if source in hf:
                out[f"{m}mlp.router.{name}"] = hf[source]
        for shared in ("shared_expert", "shared_experts"):
            if f"{h}mlp.{shared}.down_proj.weight" in hf:
                to = f"{m}mlp.shared_experts."
                self._gated_mlp(out, to, f"{h}mlp.{shared}.", ("gate_proj", "up_proj", "down_proj"))
        if f"{h}mlp.shared_expert_gate.weight" in hf:
            out[f"{m}mlp.shared_experts.gate_weight"] = hf[f"{h}mlp.shared_expert_gate.weight"]
        for expert in range(hf[f"{moe}{router}.weight"].shape[0]):
            self._expert(out, f"{m}mlp.experts.", f"{moe}experts.", expert)
        return False

    def _expert(self, out: Wholes, m: str, h: str, expert: int) -> None:
        one: Wholes = {}
        if self.family == "gpt_oss":
            for part, suffix in (("weight", ""), ("bias", "_bias")):
                up = self.hf[f"{h}gate_up_proj{suffix}"][expert]
                one[f"linear_fc1.{part}"] = np.concatenate([up[..., 0::2].T, up[..., 1::2].T])
                one[f"linear_fc2.{part}"] = self.hf[f"{h}down_proj{suffix}"][expert].T
        elif f"{h}gate_up_proj" in self.hf:
            one["linear_fc1.weight"] = self.hf[f"{h}gate_up_proj"][expert]
            one["linear_fc2.weight"] = self.hf[f"{h}down_proj"][expert]
        else:
            minimax = self.family == "minimax_m2"
            names = ("w1", "w3", "w2") if minimax else ("gate_proj", "up_proj", "down_proj")
            self._gated_mlp(one, "", f"{h}{expert}.", names)
        for name, value in one.items():
            grouped = f"{m}{name}{expert}"
            out[grouped if self.grouped else f"{m}local_experts.{expert}.{name}"] = value

    def _gated_mlp(self, out: Wholes, m: str, h: str, names: tuple[str, str, str]) -> None:
        gate, up, down = names
        for part in ("weight", "bias"):
            if f"{h}{gate}.{part}" in self.hf:
                both = [self.hf[f"{h}{name}.{part}"] for name in (gate, up)]
                out[f"{m}linear_fc1.{part}"] = np.concatenate(both)
                out[f"{m}linear_fc2.{part}"] = self.hf[f"{h}{down}.{part}"]
