"""The parts of which families' tables are made.

Each function gives rules for one part of a layer, under the prefixes `m` (Megatron) and `h`
(Hugging Face), for both Megatron namings: modules of Megatron's own (local), and TransformerEngine,
where a norm is a parameter of the linear layer behind it.
"""

from __future__ import annotations

from collections.abc import Callable

from .family import Rule
from .kinds import QkvSplit, Rename, Stacked, UnlessTied, VocabCut

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


def mtp(*parts: Part) -> tuple[Rule, ...]:
    """MTP layers as DeepSeek and GLM store them: HF layers behind the decoder's."""
    m, h = "mtp.layers.{i}.", "model.layers.{m}."
    own = (
        _same(m, h, "eh_proj.weight", "eh_proj.weight"),
        _same(m, h, "enorm.weight", "enorm.weight"),
        _same(m, h, "hnorm.weight", "hnorm.weight"),
        _same(m, h, "final_layernorm.weight", "shared_head.norm.weight"),
    )
    inner = tuple(
        rule for child in MTP_CHILDREN for part in parts for rule in part(f"{m}{child}.", h)
    )
    return own + inner


def pre_norms(m: str, h: str) -> tuple[Rule, ...]:
    """The norms before attention and before the MLP, as modules of their own."""
    return (
        _same(m, h, "input_layernorm.weight", "input_layernorm.weight"),
        _same(m, h, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    )


def grouped_attention(m: str, h: str) -> tuple[Rule, ...]:
    """Attention with query groups; biases where a model has them."""
    fused, out = f"{m}self_attention.linear_qkv", f"{h}self_attn."
    split = tuple(
        Rule(f"{fused}.{p}", QkvSplit(f"{out}q_proj.{p}", f"{out}k_proj.{p}", f"{out}v_proj.{p}"))
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


def experts(m: str, h: str) -> tuple[Rule, ...]:
    """Router and experts, grouped (`weight{e}`) or sequential (`local_experts.{e}`)."""
    own, out = f"{m}mlp.experts.", f"{h}mlp.experts.{{e}}."
    up = Stacked((f"{out}gate_proj.weight", f"{out}up_proj.weight"))
    down = Rename(f"{out}down_proj.weight")
    return (
        _same(m, h, "mlp.router.weight", "mlp.gate.weight"),
        Rule(f"{own}linear_fc1.weight{{e}}", up),
        Rule(f"{own}linear_fc2.weight{{e}}", down),
        Rule(f"{own}local_experts.{{e}}.linear_fc1.weight", up),
        Rule(f"{own}local_experts.{{e}}.linear_fc2.weight", down),
    )


def router_bias(m: str, h: str) -> tuple[Rule, ...]:
    """The bias that balances experts, fp32 and nothing else: bf16 picks others (sglang#31213)."""
    bias = Rename(f"{h}mlp.gate.e_score_correction_bias", dtype="F32")
    return (Rule(f"{m}mlp.router.expert_bias", bias),)


def shared_experts(m: str, h: str) -> tuple[Rule, ...]:
    """Experts that see every token, under DeepSeek's plural name."""
    own, out = f"{m}mlp.shared_experts.", f"{h}mlp.shared_experts."
    fused = Stacked((f"{out}gate_proj.weight", f"{out}up_proj.weight"))
    return (
        Rule(f"{own}linear_fc1.weight", fused),
        _same(m, h, "mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight"),
    )


def _same(m: str, h: str, source: str, target: str) -> Rule:
    return Rule(m + source, Rename(h + target))
