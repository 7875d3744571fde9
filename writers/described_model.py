"""The whole Megatron tensors of a described model: names, shapes, and how ranks cut them.

Written from Megatron-core's modules, in both namings (`te`: norms are parameters of the linear
layers behind them; `local`: modules of their own), independently of the conversion rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ..schemas.dtypes import DType
from .described_config import ModelConfig

Spec: TypeAlias = Literal["te", "local"]
MTP_CHILD = "transformer_layer"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One whole Megatron tensor.

    Attributes:
        name: global name.
        shape: of the whole.
        dim: the dim along which tensor-parallel ranks cut it; None: every rank has all of it.
        halves: gate rows stand before up rows, each half is cut by itself.
        expert: number of the routed expert to which it belongs, or None.
        dtype: None for the model's dtype.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    halves: bool = False
    expert: int | None = None
    dtype: DType | None = None


class DescribedModel:
    """Tensors of one model.

    Args:
        config: the model's numbers.
        spec: which of Megatron's namings.
        grouped: experts are grouped (`weight{e}`), or sequential (`local_experts.{e}`).
        vocab_multiple: the vocabulary is padded to a multiple of this.
    """

    def __init__(
        self, config: ModelConfig, *, spec: Spec, grouped: bool, vocab_multiple: int
    ) -> None:
        self._c = config
        self._te = spec == "te"
        self._grouped = grouped
        self._hidden = config.number("hidden_size")
        vocab = config.dims.vocab
        self._vocab = -(-vocab // vocab_multiple) * vocab_multiple

    def embedding(self) -> Tensor:
        """The embedding; a tied model's copy of it on the last stage has this name too."""
        return Tensor("embedding.word_embeddings.weight", (self._vocab, self._hidden), 0)

    def last(self) -> Iterator[Tensor]:
        """What lies behind the last layer."""
        yield Tensor("decoder.final_layernorm.weight", (self._hidden,))
        if not self._c.dims.tied:
            yield Tensor("output_layer.weight", (self._vocab, self._hidden), 0)

    def layer(self, layer: int) -> list[Tensor]:
        """One decoder layer."""
        c = self._c
        return list(
            self._layer(
                f"decoder.layers.{layer}.",
                linear=c.is_linear(layer),
                sparse=c.is_sparse(layer),
                indexer=c.has_indexer(layer),
            )
        )

    def mtp(self, layer: int) -> list[Tensor]:
        """One MTP layer: full attention, experts wherever the model has any."""
        to, h = f"mtp.layers.{layer}.", self._hidden
        own = [Tensor(f"{to}{n}.weight", (h,)) for n in ("enorm", "hnorm", "final_layernorm")]
        own.append(Tensor(f"{to}eh_proj.weight", (h, 2 * h), 0))
        inner = self._layer(
            f"{to}{MTP_CHILD}.",
            linear=False,
            sparse=self._c.structure.moe,
            indexer=self._c.structure.indexer,
        )
        return own + list(inner)

    def _layer(self, to: str, *, linear: bool, sparse: bool, indexer: bool) -> Iterator[Tensor]:
        structure, norm = self._c.structure, (self._hidden,)
        if linear:
            yield from self._linear(f"{to}self_attention.")
        else:
            fused = self._te and structure.attention != "latent"
            name = "self_attention.linear_qkv.layer_norm_" if fused else "input_layernorm."
            yield Tensor(f"{to}{name}weight", norm)
            if structure.attention == "latent":
                yield from self._latent(f"{to}self_attention.")
            else:
                yield from self._groups(f"{to}self_attention.")
            if indexer:
                yield from self._indexer(f"{to}self_attention.")
        fused = self._te and not sparse
        name = "mlp.linear_fc1.layer_norm_" if fused else "pre_mlp_layernorm."
        yield Tensor(f"{to}{name}weight", norm)
        if structure.sandwich:
            yield Tensor(f"{to}post_self_attn_layernorm.weight", norm)
            yield Tensor(f"{to}post_mlp_layernorm.weight", norm)
        if sparse:
            yield from self._experts(f"{to}mlp.")
        else:
            bias = structure.mlp_bias and self._c.flag("mlp_bias")
            yield from self._mlp(f"{to}mlp.", self._c.number("intermediate_size"), bias=bias)

    def _groups(self, to: str) -> Iterator[Tensor]:
        c, d = self._c, self._c.dims
        queries = d.heads * (2 if c.structure.attention == "gated" else 1)
        rows = (queries + 2 * d.groups) * d.head_dim
        yield Tensor(f"{to}linear_qkv.weight", (rows, self._hidden), 0)
        yield Tensor(f"{to}linear_proj.weight", (self._hidden, d.heads * d.head_dim), 1)
        if c.qkv_bias:
            yield Tensor(f"{to}linear_qkv.bias", (rows,), 0)
            if c.structure.out_bias:
                yield Tensor(f"{to}linear_proj.bias", (self._hidden,))
        if c.head_norms:
            everywhere = c.structure.norms == "head"
            for name, heads in (("q_layernorm", d.heads), ("k_layernorm", d.groups)):
                size = d.head_dim if everywhere else heads * d.head_dim
                yield Tensor(f"{to}{name}.weight", (size,), None if everywhere else 0)
        if c.structure.sinks:
            yield Tensor(f"{to}core_attention.softmax_offset", (d.heads,), 0)

    def _latent(self, to: str) -> Iterator[Tensor]:
        c, h, heads = self._c, self._hidden, self._c.dims.heads
        nope, rope, value = (
            c.number(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        kv, queries = c.number("kv_lora_rank"), heads * (nope + rope)
        q_norm = "linear_q_up_proj.layer_norm_weight" if self._te else "q_layernorm.weight"
        kv_norm = "linear_kv_up_proj.layer_norm_weight" if self._te else "kv_layernorm.weight"
        down = None if self._te else 0
        if c.q_lora is None:
            yield Tensor(f"{to}linear_q_proj.weight", (queries, h), 0)
        else:
            yield Tensor(f"{to}linear_q_down_proj.weight", (c.q_lora, h), down)
            yield Tensor(f"{to}{q_norm}", (c.q_lora,))
            yield Tensor(f"{to}linear_q_up_proj.weight", (queries, c.q_lora), 0)
        yield Tensor(f"{to}linear_kv_down_proj.weight", (kv + rope, h), down)
        yield Tensor(f"{to}{kv_norm}", (kv,))
        yield Tensor(f"{to}linear_kv_up_proj.weight", (heads * (nope + value), kv), 0)
        yield Tensor(f"{to}linear_proj.weight", (h, heads * value), 1)

    def _indexer(self, to: str) -> Iterator[Tensor]:
        c = self._c
        heads, size = c.number("index_n_heads"), c.number("index_head_dim")
        yield Tensor(f"{to}wq_b.weight", (heads * size, c.number("q_lora_rank")))
        yield Tensor(f"{to}wk.weight", (size, self._hidden))
        yield Tensor(f"{to}k_norm.weight", (size,))
        yield Tensor(f"{to}k_norm.bias", (size,))
        yield Tensor(f"{to}weights_proj.weight", (heads, self._hidden))

    def _linear(self, to: str) -> Iterator[Tensor]:
        # Hugging Face's own module inside a Megatron layer, the same on every rank.
        c, d, h = self._c, self._c.dims, self._hidden
        keys = d.linear_key_heads * d.linear_key_dim
        values = d.linear_value_heads * d.linear_value_dim
        heads, own = d.linear_value_heads, f"{to}linear_attn."
        yield Tensor(f"{to}input_layernorm.weight", (h,))
        yield Tensor(f"{own}A_log", (heads,))
        yield Tensor(f"{own}dt_bias", (heads,))
        kernel = c.number("linear_conv_kernel_dim")
        yield Tensor(f"{own}conv1d.weight", (2 * keys + values, 1, kernel))
        yield Tensor(f"{own}norm.weight", (d.linear_value_dim,))
        yield Tensor(f"{own}out_proj.weight", (h, values))
        if c.structure.joined_linear_input:
            inputs = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
        else:
            inputs = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
        for name, rows in inputs.items():
            yield Tensor(f"{own}in_proj_{name}.weight", (rows, h))

    def _mlp(self, to: str, ffn: int, *, bias: bool = False) -> Iterator[Tensor]:
        yield Tensor(f"{to}linear_fc1.weight", (2 * ffn, self._hidden), 0, halves=True)
        yield Tensor(f"{to}linear_fc2.weight", (self._hidden, ffn), 1)
        if bias:
            yield Tensor(f"{to}linear_fc1.bias", (2 * ffn,), 0, halves=True)
            yield Tensor(f"{to}linear_fc2.bias", (self._hidden,))

    def _experts(self, to: str) -> Iterator[Tensor]:
        structure, count = self._c.structure, self._c.dims.experts
        yield Tensor(f"{to}router.weight", (count, self._hidden))
        if structure.router == "balanced":
            yield Tensor(f"{to}router.expert_bias", (count,), dtype="F32")
        elif structure.router == "biased":
            yield Tensor(f"{to}router.bias", (count,))
        if structure.shared != "none":
            yield from self._mlp(f"{to}shared_experts.", self._c.shared_ffn)
        if structure.shared == "qwen":
            yield Tensor(f"{to}shared_experts.gate_weight", (1, self._hidden))
        ffn = self._c.number(structure.experts_ffn)
        one = tuple(self._mlp("", ffn, bias=structure.expert_bias))
        for expert in range(count):
            for tensor in one:
                name = (
                    f"{to}experts.{tensor.name}{expert}"
                    if self._grouped
                    else f"{to}experts.local_experts.{expert}.{tensor.name}"
                )
                yield replace(tensor, name=name, expert=expert)
