"""The parts of which families' tables are made.

Each function gives rules for one part of a layer, under the prefixes `m` (Megatron) and `h`
(Hugging Face), for both Megatron namings: modules of Megatron's own (local), and TransformerEngine,
where a norm is a parameter of the linear layer behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .family import Rule
from .kinds import Kind, QkvSplit, Rename, Stacked, UnlessTied, VocabCut
from .kinds_attention import ColumnHalvesSwapped, GatedQkvSplit

Part = Callable[[str, str], tuple[Rule, ...]]

DECODER = ("decoder.layers.{l}.", "model.layers.{l}.")
MTP_CHILDREN = ("transformer_layer", "mtp_model_layer")
"""Megatron-core called the layer inside an MTP layer the first until 0.16, the second later."""


def outer(*, mtp_copies: bool = False) -> tuple[Rule, ...]:
    """Embedding, final norm, head.

    Args:
        mtp_copies: checkpoints of the family repeat embedding and head in their MTP layers.
    """
    embedding = "model.layers.{m}.embed_tokens.weight" if mtp_copies else ""
    head = "model.layers.{m}.shared_head.head.weight" if mtp_copies else ""
    return (
        Rule("embedding.word_embeddings.weight", VocabCut("model.embed_tokens.weight", embedding)),
        Rule("decoder.final_layernorm.weight", Rename("model.norm.weight")),
        Rule("output_layer.weight", UnlessTied(VocabCut("lm_head.weight", head))),
    )


def decoder(*parts: Part) -> tuple[Rule, ...]:
    """Decoder layers made of these parts."""
    return tuple(rule for part in parts for rule in part(*DECODER))


class MtpNames(NamedTuple):
    """What a checkpoint calls the tensors of an MTP layer; `inner` is its layer's prefix."""

    inner: str
    eh_proj: Kind
    enorm: str
    hnorm: str
    final: str


DEEPSEEK_MTP = MtpNames(
    "model.layers.{m}.",
    Rename("model.layers.{m}.eh_proj.weight"),
    "model.layers.{m}.enorm.weight",
    "model.layers.{m}.hnorm.weight",
    "model.layers.{m}.shared_head.norm.weight",
)
"""DeepSeek and GLM: HF layers behind the decoder's."""


def qwen_mtp(fc: Kind) -> MtpNames:
    """Qwen3-Next and Qwen3.5: a module of its own, whose outer tensors exist once."""
    return MtpNames(
        "mtp.layers.{i}.",
        fc,
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.norm.weight",
    )


MIMO_MTP = MtpNames(
    "model.mtp_layers.{i}.",
    ColumnHalvesSwapped("model.mtp_layers.{i}.input_proj.weight"),
    "model.mtp_layers.{i}.token_layernorm.weight",
    "model.mtp_layers.{i}.hidden_layernorm.weight",
    "model.mtp_layers.{i}.final_layernorm.weight",
)
"""MiMo joins the hidden state before the embedding, Megatron behind it."""


def mtp(*parts: Part, names: MtpNames = DEEPSEEK_MTP) -> tuple[Rule, ...]:
    """MTP layers made of these parts, under both names of the layer inside."""
    m = "mtp.layers.{i}."
    own = (
        Rule(f"{m}eh_proj.weight", names.eh_proj),
        Rule(f"{m}enorm.weight", Rename(names.enorm)),
        Rule(f"{m}hnorm.weight", Rename(names.hnorm)),
        Rule(f"{m}final_layernorm.weight", Rename(names.final)),
    )
    inner = tuple(
        rule
        for child in MTP_CHILDREN
        for part in parts
        for rule in part(f"{m}{child}.", names.inner)
    )
    return own + inner


def pre_norms(m: str, h: str) -> tuple[Rule, ...]:
    """The norms before attention and before the MLP, as modules of their own."""
    return (
        _same(m, h, "input_layernorm.weight", "input_layernorm.weight"),
        _same(m, h, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    )


def sandwich_norms(m: str, h: str) -> tuple[Rule, ...]:
    """GLM-4's norms behind attention and behind the MLP."""
    names = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
    return tuple(_same(m, h, name, name) for name in names)


def grouped_attention(m: str, h: str) -> tuple[Rule, ...]:
    """Attention with query groups; biases where a model has them."""
    return _attention(m, h, QkvSplit)


def gated_attention(m: str, h: str) -> tuple[Rule, ...]:
    """Attention with query groups whose output a second half of the queries gates."""
    return _attention(m, h, GatedQkvSplit)


def _attention(m: str, h: str, split_by: Callable[[str, str, str], Kind]) -> tuple[Rule, ...]:
    fused, out = f"{m}self_attention.linear_qkv", f"{h}self_attn."
    split = tuple(
        Rule(f"{fused}.{p}", split_by(f"{out}q_proj.{p}", f"{out}k_proj.{p}", f"{out}v_proj.{p}"))
        for p in ("weight", "bias")
    )
    return (
        *split,
        Rule(f"{fused}.layer_norm_weight", Rename(f"{h}input_layernorm.weight")),
        _same(m, h, "self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
        _same(m, h, "self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
    )


def qk_norms(m: str, h: str) -> tuple[Rule, ...]:
    """Norms of each query and key head."""
    return (
        _same(m, h, "self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        _same(m, h, "self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    )


def full_norms(m: str, h: str) -> tuple[Rule, ...]:
    """MiniMax's norms over all heads, under the names of its own attention module too."""
    names = ("q_norm.weight", "k_norm.weight")
    return tuple(_same(m, h, f"self_attention.{name}", f"self_attn.{name}") for name in names)


def sinks(m: str, h: str) -> tuple[Rule, ...]:
    """One learned logit per query head, which takes attention from the tokens."""
    return (_same(m, h, "self_attention.core_attention.softmax_offset", "self_attn.sinks"),)


def latent_attention(m: str, h: str) -> tuple[Rule, ...]:
    """MLA: identity maps. `linear_q_proj` replaces three q names where q_lora_rank is null."""
    names = (
        ("linear_q_proj.weight", "q_proj.weight"),
        ("linear_q_down_proj.weight", "q_a_proj.weight"),
        ("q_layernorm.weight", "q_a_layernorm.weight"),
        ("linear_q_up_proj.layer_norm_weight", "q_a_layernorm.weight"),
        ("linear_q_up_proj.weight", "q_b_proj.weight"),
        ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight"),
        ("kv_layernorm.weight", "kv_a_layernorm.weight"),
        ("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm.weight"),
        ("linear_kv_up_proj.weight", "kv_b_proj.weight"),
        ("linear_proj.weight", "o_proj.weight"),
    )
    return tuple(_same(m, h, f"self_attention.{a}", f"self_attn.{b}") for a, b in names)


LATENT_PAIRS = (("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),)
"""SGLang fuses both into one parameter in one load call (sglang#14178): they travel together."""


def dense_mlp(m: str, h: str) -> tuple[Rule, ...]:
    """The gated MLP of a dense layer; biases where a model has them."""
    fc1, fc2, out = f"{m}mlp.linear_fc1", f"{m}mlp.linear_fc2", f"{h}mlp."
    return (
        *(
            rule
            for p in ("weight", "bias")
            for rule in (
                Rule(f"{fc1}.{p}", Stacked((f"{out}gate_proj.{p}", f"{out}up_proj.{p}"))),
                Rule(f"{fc2}.{p}", Rename(f"{out}down_proj.{p}")),
            )
        ),
        Rule(f"{fc1}.layer_norm_weight", Rename(f"{h}post_attention_layernorm.weight")),
    )


def fused_mlp(m: str, h: str) -> tuple[Rule, ...]:
    """GLM-4's dense MLP: gate and up stay one tensor."""
    return (
        Rule(f"{m}mlp.linear_fc1.weight", Rename(f"{h}mlp.gate_up_proj.weight", blocks=2)),
        _same(m, h, "mlp.linear_fc2.weight", "mlp.down_proj.weight"),
        _same(m, h, "mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    )


def _same(m: str, h: str, source: str, target: str) -> Rule:
    return Rule(m + source, Rename(h + target))
