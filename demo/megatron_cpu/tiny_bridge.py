"""A bridge for the tiny qwen3 on one rank, written by hand: called as Megatron-Bridge's is.

It shares nothing with the writers' conversion, so that the two modes check each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...producers.megatron import unwrap
from ...schemas.errors import ConfigError
from .sizes import TINY, TinyRun, TinySizes

_NORMS = {
    "input_layernorm": ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    "post_attention_layernorm": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
}


class TinyWeight(NamedTuple):
    """One exported tensor."""

    param_name: str
    weight: torch.Tensor


class TinyBridge:
    """Exports the tiny qwen3 of a run.

    Args:
        run: architecture and ranks.
        sizes: the model's sizes.

    Raises:
        ConfigError: another architecture, or more than one rank.
    """

    def __init__(self, run: TinyRun, sizes: TinySizes = TINY) -> None:
        if run.kind != "qwen3" or (run.tp, run.pp, run.mtp) != (1, 1, 0):
            raise ConfigError(
                "the demo's own bridge exports qwen3 from one rank only",
                next_step="use --kind qwen3 --tp 1 --pp 1, or --megatron-to-hf-mode raw",
            )
        self._tied, self._sizes = run.tied, sizes

    def export_hf_weights(
        self, model: Sequence[Any], cpu: bool = False, show_progress: bool = True
    ) -> Iterator[TinyWeight]:
        """One pass over the current weights; whole tensors under Hugging Face names."""
        _ = (cpu, show_progress)  # the weights are on the CPU, and few
        state: dict[str, torch.Tensor] = {}
        for chunk in model:
            state |= dict(unwrap(chunk).named_parameters())
        embedding = state["embedding.word_embeddings.weight"][: self._sizes.vocab]
        yield TinyWeight("model.embed_tokens.weight", embedding)
        for layer in range(self._sizes.layers):
            yield from self._layer(state, layer)
        yield TinyWeight("model.norm.weight", state["decoder.final_layernorm.weight"])
        # Bridges yield the head of a tied model too.
        head = embedding if self._tied else state["output_layer.weight"][: self._sizes.vocab]
        yield TinyWeight("lm_head.weight", head)

    def _layer(self, state: dict[str, torch.Tensor], layer: int) -> Iterator[TinyWeight]:
        megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for name, places in _NORMS.items():
            [norm] = [state[megatron + place] for place in places if megatron + place in state]
            yield TinyWeight(f"{hf}{name}.weight", norm)
        sizes = self._sizes
        queries = sizes.heads // sizes.kv_groups
        groups = state[f"{megatron}self_attention.linear_qkv.weight"].view(
            sizes.kv_groups, queries + 2, sizes.head_dim, sizes.hidden
        )
        parts = {"q": groups[:, :queries], "k": groups[:, queries], "v": groups[:, queries + 1]}
        for letter, part in parts.items():
            rows = part.reshape(-1, sizes.hidden)
            yield TinyWeight(f"{hf}self_attn.{letter}_proj.weight", rows)
        for letter in ("q", "k"):
            norm = state[f"{megatron}self_attention.{letter}_layernorm.weight"]
            yield TinyWeight(f"{hf}self_attn.{letter}_norm.weight", norm)
        projection = state[f"{megatron}self_attention.linear_proj.weight"]
        yield TinyWeight(f"{hf}self_attn.o_proj.weight", projection)
        gate, up = state[f"{megatron}mlp.linear_fc1.weight"].chunk(2)
        yield TinyWeight(f"{hf}mlp.gate_proj.weight", gate)
        yield TinyWeight(f"{hf}mlp.up_proj.weight", up)
        yield TinyWeight(f"{hf}mlp.down_proj.weight", state[f"{megatron}mlp.linear_fc2.weight"])
