"""Which part of the whole a Megatron tensor is: by its name, its shape and the model's sizes.

The attributes that Megatron leaves on parameters are no help: `tensor_model_parallel` is set on
MLA down projections that TransformerEngine replicates and is missing on some grouped experts,
`partition_dim` of grouped fc2 may be wrong, `partition_stride` of a gated fc1 is 2 or 1 depending
on the module. So a table says along which dimension a name may be cut and how long that dimension
is in the whole tensor, and the local shape says whether it is. A name that is not in the table, or
a shape that is neither the whole nor one part of it, is an error and not a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..schemas.layout import Part
from .megatron_names import is_expert


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the shapes of whole tensors follow from; TransformerConfig's numbers.

    `ffn`, `moe_ffn` and `shared_ffn` are the widths of one of gate and up. `padded_vocab` is None
    where nobody knows it: then embeddings are taken to be cut over tensor-parallel ranks, as
    Megatron always does.
    """

    hidden: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn: int
    gated: bool = True
    attention_gate: bool = False
    moe_ffn: int | None = None
    shared_ffn: int | None = None
    q_lora: int | None = None
    kv_lora: int | None = None
    qk_nope: int | None = None
    qk_rope: int | None = None
    v_head: int | None = None
    padded_vocab: int | None = None

    @property
    def qkv_rows(self) -> int:
        """Rows of the whole fused query-key-value projection (per group: its query heads, k, v)."""
        queries = self.heads * (2 if self.attention_gate else 1)
        return (queries + 2 * self.kv_groups) * self.head_dim

    @property
    def mla_query_rows(self) -> int | None:
        """Rows of the whole MLA query (up) projection."""
        if self.qk_nope is None or self.qk_rope is None:
            return None
        return self.heads * (self.qk_nope + self.qk_rope)

    @property
    def mla_kv_rows(self) -> int | None:
        """Rows of the whole MLA key-value up projection."""
        if self.qk_nope is None or self.v_head is None:
            return None
        return self.heads * (self.qk_nope + self.v_head)

    @property
    def mla_kv_down_rows(self) -> int | None:
        """Rows of the whole MLA key-value down projection."""
        if self.kv_lora is None or self.qk_rope is None:
            return None
        return self.kv_lora + self.qk_rope

    @property
    def proj_cols(self) -> int:
        """Columns of the whole output projection of attention."""
        return self.heads * (self.head_dim if self.v_head is None else self.v_head)


WholeSize = Callable[[ModelSizes], int | None]


@dataclass(frozen=True, slots=True)
class PartitionRule:
    """How a tensor whose global name ends like `pattern` may be cut.

    `dim` None: replicated. Otherwise `size` gives the whole length of `dim` (None: unknown, then it
    is cut whenever there is more than one rank to cut it for). `halves`: gate and up rows follow
    each other along `dim` when the model is gated, and `size` is the length of both together.
    """

    pattern: str
    dim: int | None = None
    size: WholeSize | None = None
    halves: bool = False

    def matches(self, name: str) -> bool:
        """Whether the rule speaks about this name."""
        return re.search(self.pattern, name) is not None


def _width(sizes: ModelSizes, width: int | None, factor_gated: int) -> int | None:
    return None if width is None else width * (factor_gated if sizes.gated else 1)


def _mlp_rules(prefix: str, width: Callable[[ModelSizes], int | None]) -> list[PartitionRule]:
    # Sequential experts and dense MLPs end in `.weight`, grouped experts in `.weight7`.
    return [
        PartitionRule(
            prefix + r"linear_fc1\.(weight|bias)\d*$",
            0,
            lambda sizes: _width(sizes, width(sizes), 2),
            halves=True,
        ),
        PartitionRule(prefix + r"linear_fc2\.weight\d*$", 1, width),
        PartitionRule(prefix + r"linear_fc2\.bias\d*$"),
    ]


RULES: tuple[PartitionRule, ...] = (
    # Norms first: `linear_qkv.layer_norm_weight` also begins like a projection.
    PartitionRule(r"(layer_?norm|norm)(\.|_)(weight|bias)$"),
    PartitionRule(r"\b(word_embeddings|output_layer)\.(weight|bias)$", 0, lambda s: s.padded_vocab),
    PartitionRule(r"\b(position_embeddings|tokentype_embeddings)\.weight$"),
    PartitionRule(r"\.linear_qkv\.(weight|bias)$", 0, lambda s: s.qkv_rows),
    PartitionRule(r"\.linear_(q_proj|q_up_proj)\.weight$", 0, lambda s: s.mla_query_rows),
    PartitionRule(r"\.linear_kv_up_proj\.weight$", 0, lambda s: s.mla_kv_rows),
    PartitionRule(r"\.linear_q_down_proj\.weight$", 0, lambda s: s.q_lora),
    PartitionRule(r"\.linear_kv_down_proj\.weight$", 0, lambda s: s.mla_kv_down_rows),
    PartitionRule(r"\.self_attention\.linear_proj\.weight$", 1, lambda s: s.proj_cols),
    PartitionRule(r"\.self_attention\.linear_proj\.bias$"),
    PartitionRule(r"\.core_attention\.softmax_offset$", 0, lambda s: s.heads),
    *_mlp_rules(r"\.experts\.(local_experts\.\d+\.)?", lambda s: s.moe_ffn),
    *_mlp_rules(r"\.shared_experts\.", lambda s: s.shared_ffn),
    *_mlp_rules(r"\.mlp\.", lambda s: s.ffn),
    PartitionRule(r"\.router\.(weight|bias|expert_bias)$"),
    PartitionRule(r"\.shared_experts\.gate_weight$"),
    PartitionRule(r"\.(enorm|hnorm)\.(weight|bias)$"),
    PartitionRule(r"\.eh_proj\.weight$", 0, lambda s: s.hidden),
)
"""The first rule that matches decides."""


@dataclass(frozen=True, slots=True)
class Place:
    """One rank among those that a tensor may be cut over."""

    world: int
    index: int


class NoPartitionError(ValueError):
    """One tensor whose part nobody can say; collected into one UnknownPartitionError."""


def part_of(
    name: str,
    shape: Sequence[int],
    sizes: ModelSizes,
    place: Place,
    extra_rules: Sequence[PartitionRule] = (),
) -> Part:
    """The part that a local tensor is.

    Args:
        name: global name.
        shape: local shape.
        sizes: sizes of the whole model.
        place: this rank among those that the tensor may be cut over: the tensor-parallel ranks, or
            the expert-tensor-parallel ones for routed experts.
        extra_rules: rules that come before the table, for models of the user's own.

    Raises:
        NoPartitionError: an unknown name, or a shape that is neither the whole nor one part.
    """
    rule = next((rule for rule in (*extra_rules, *RULES) if rule.matches(name)), None)
    if rule is None:
        if place.world == 1:
            return Part()
        kind = "expert-tensor-parallel" if is_expert(name) else "tensor-parallel"
        raise NoPartitionError(f"no rule knows this name, and there are {place.world} {kind} ranks")
    if rule.dim is None:
        return Part()
    if rule.dim >= len(shape):
        raise NoPartitionError(f"cut along dim {rule.dim}, but the shape is {tuple(shape)}")
    whole = None if rule.size is None else rule.size(sizes)
    return _part_by_size(rule, shape[rule.dim], whole, sizes.gated, place)


def _part_by_size(
    rule: PartitionRule, local: int, whole: int | None, gated: bool, place: Place
) -> Part:
    if whole is None:
        whole = local * place.world
    if local == whole:
        count = 1
    elif local * place.world == whole:
        count = place.world
    else:
        raise NoPartitionError(
            f"dim {rule.dim} has {local} elements, neither {whole} nor one of {place.world} parts"
        )
    blocks = (whole // 2, whole // 2) if rule.halves and gated else ()
    if any(size % count for size in blocks):
        raise NoPartitionError(f"{whole // 2} gate rows cannot be cut into {count}")
    if count == 1 or rule.dim is None:
        return Part(blocks=blocks)
    return Part(dim=rule.dim, index=place.index, count=count, blocks=blocks)
