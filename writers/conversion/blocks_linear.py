"""The parts of families' tables for linear attention and for DSA's indexer (see blocks.py)."""

from __future__ import annotations

from .family import Rule
from .kinds import Refused, Rename
from .kinds_attention import IndexerTurned, LinearConvolution, LinearInput

_LINEAR = ("A_log", "conv1d.weight", "dt_bias", "norm.weight", "out_proj.weight")
_PLAIN_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
_ZERO_CENTRED = (
    "Megatron's output norm of linear attention is centred on zero, the checkpoint's on one: this "
    "needs arithmetic, and plans only move bytes; train with Hugging Face's own linear attention"
)
_ORDER_UNKNOWN = (
    "Megatron-core keeps the rotated part of an indexer's heads last in 0.16 and first in later "
    "releases, and a layout does not say which"
)


def native_linear_attention(*inputs: str) -> tuple[Rule, ...]:
    """Layers whose attention is Hugging Face's own module: names and tensors pass as they are.

    Args:
        inputs: the names of linear attention's input projections.
    """
    m, h = "decoder.layers.{l}.", "model.layers.{l}."
    names = [f"linear_attn.{name}" for name in (*_LINEAR, *(f"{i}.weight" for i in inputs))]
    names += [f"self_attn.{name}.weight" for name in _PLAIN_ATTENTION]
    names.append("input_layernorm.weight")
    return tuple(Rule(f"{m}self_attention.{name}", Rename(h + name)) for name in names)


def megatron_linear_attention(*inputs: str, separate: bool) -> tuple[Rule, ...]:
    """Megatron-core's own linear attention (GDN)."""
    m, h = "decoder.layers.{l}.self_attention.", "model.layers.{l}."
    own = f"{h}linear_attn."
    fused = LinearInput(tuple(f"{own}{name}.weight" for name in inputs), separate)
    return (
        Rule(f"{m}in_proj.weight", fused),
        Rule(f"{m}in_proj.layer_norm_weight", Rename(f"{h}input_layernorm.weight")),
        Rule(f"{m}conv1d.weight", LinearConvolution(f"{own}conv1d.weight")),
        Rule(f"{m}A_log", Rename(f"{own}A_log")),
        Rule(f"{m}dt_bias", Rename(f"{own}dt_bias")),
        Rule(f"{m}out_norm.weight", Refused(_ZERO_CENTRED)),
        Rule(f"{m}out_proj.weight", Rename(f"{own}out_proj.weight")),
    )


def indexer(m: str, h: str) -> tuple[Rule, ...]:
    """DSA's indexer: rotated parts first, rest behind; Megatron-core's own module is refused."""
    own, out = f"{m}self_attention.", f"{h}self_attn.indexer."
    turned = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
    core = f"{own}core_attention.indexer."
    return (
        *(Rule(own + name, IndexerTurned(out + name)) for name in turned),
        Rule(f"{own}weights_proj.weight", Rename(f"{out}weights_proj.weight")),
        *(
            Rule(core + name, Refused(_ORDER_UNKNOWN))
            for name in (
                "linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias",
                "linear_weights_proj.weight",
            )
        ),
    )  # fmt: skip
