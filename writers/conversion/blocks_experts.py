"""The parts of families' tables that speak of experts: routed, shared, and their router.

See blocks.py: each function gives rules for one part of a layer, for grouped experts (`weight{e}`)
and sequential ones (`local_experts.{e}`).
"""

from __future__ import annotations

from .family import Rule
from .kinds import Either, Kind, Rename, Stacked
from .kinds_experts import InterleavedExperts, IntoExperts, TransposedExperts


def experts(m: str, h: str) -> tuple[Rule, ...]:
    """Router and experts, one by one in both formats."""
    up, down = _separate(f"{h}mlp.experts.{{e}}.", ("gate_proj", "up_proj", "down_proj"))
    return (_router(m, f"{h}mlp.gate.weight"), *_both_forms(m, up, down))


def experts_in_either_form(m: str, h: str) -> tuple[Rule, ...]:
    """Router and experts of Qwen3.5: fused tensors, or one by one, as the origin has them."""
    marker = f"{h}mlp.experts.gate_up_proj"
    up, down = _separate(f"{h}mlp.experts.{{e}}.", ("gate_proj", "up_proj", "down_proj"))
    fused_up, fused_down = IntoExperts(marker, blocks=2), IntoExperts(f"{h}mlp.experts.down_proj")
    return (
        _router(m, f"{h}mlp.gate.weight"),
        *_both_forms(m, Either(marker, fused_up, up), Either(marker, fused_down, down)),
    )


def block_sparse_experts(m: str, h: str) -> tuple[Rule, ...]:
    """MiniMax: `block_sparse_moe`, with w1, w3, w2 for gate, up, down; router bias in fp32."""
    own = f"{h}block_sparse_moe."
    up, down = _separate(f"{own}experts.{{e}}.", ("w1", "w3", "w2"))
    bias = Rename(f"{own}e_score_correction_bias", dtype="F32")
    return (
        _router(m, f"{own}gate.weight"),
        Rule(f"{m}mlp.router.expert_bias", bias),
        *_both_forms(m, up, down),
    )


def interleaved_experts(m: str, h: str) -> tuple[Rule, ...]:
    """gpt_oss: router with bias; fused, transposed experts with biases, gate and up alternating."""
    own, weights = f"{m}mlp.experts.", f"{h}mlp.experts."
    rules = [
        _router(m, f"{h}mlp.router.weight"),
        Rule(f"{m}mlp.router.bias", Rename(f"{h}mlp.router.bias")),
    ]
    kinds: tuple[tuple[str, str, Kind], ...] = (
        ("1", "weight", InterleavedExperts(f"{weights}gate_up_proj")),
        ("1", "bias", InterleavedExperts(f"{weights}gate_up_proj_bias")),
        ("2", "weight", TransposedExperts(f"{weights}down_proj")),
        ("2", "bias", IntoExperts(f"{weights}down_proj_bias")),
    )
    for number, part, kind in kinds:
        rules.append(Rule(f"{own}linear_fc{number}.{part}{{e}}", kind))
        rules.append(Rule(f"{own}local_experts.{{e}}.linear_fc{number}.{part}", kind))
    return tuple(rules)


def router_bias(m: str, h: str) -> tuple[Rule, ...]:
    """The bias that balances experts, fp32 and nothing else: bf16 picks others (sglang#31213)."""
    bias = Rename(f"{h}mlp.gate.e_score_correction_bias", dtype="F32")
    return (Rule(f"{m}mlp.router.expert_bias", bias),)


def shared_experts(m: str, h: str) -> tuple[Rule, ...]:
    """Experts that see every token, under DeepSeek's plural name."""
    return _shared(m, f"{h}mlp.shared_experts.")


def gated_shared_expert(m: str, h: str) -> tuple[Rule, ...]:
    """The one expert that sees every token, under Qwen's singular name, and its gate."""
    gate = Rename(f"{h}mlp.shared_expert_gate.weight")
    return (
        *_shared(m, f"{h}mlp.shared_expert."),
        Rule(f"{m}mlp.shared_experts.gate_weight", gate),
    )


def _shared(m: str, out: str) -> tuple[Rule, ...]:
    own = f"{m}mlp.shared_experts."
    fused = Stacked((f"{out}gate_proj.weight", f"{out}up_proj.weight"))
    return (
        Rule(f"{own}linear_fc1.weight", fused),
        Rule(f"{own}linear_fc2.weight", Rename(f"{out}down_proj.weight")),
    )


def _separate(out: str, names: tuple[str, str, str]) -> tuple[Kind, Kind]:
    gate, up, down = names
    return Stacked((f"{out}{gate}.weight", f"{out}{up}.weight")), Rename(f"{out}{down}.weight")


def _router(m: str, to: str) -> Rule:
    return Rule(f"{m}mlp.router.weight", Rename(to))


def _both_forms(m: str, up: Kind, down: Kind) -> tuple[Rule, ...]:
    own = f"{m}mlp.experts."
    return (
        Rule(f"{own}linear_fc1.weight{{e}}", up),
        Rule(f"{own}linear_fc2.weight{{e}}", down),
        Rule(f"{own}local_experts.{{e}}.linear_fc1.weight", up),
        Rule(f"{own}local_experts.{{e}}.linear_fc2.weight", down),
    )
