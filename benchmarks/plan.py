"""How long a plan takes: a MoE of 60 layers and 256 experts on several hundred ranks.

    python benchmarks/plan.py [--layers 60] [--experts 256] [--ranks 512]

Prints seconds and peak memory of: making the layouts, the certificate, the plan.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from weightbus.schemas.dtypes import DType
from weightbus.schemas.layout import Layout, LocalTensor, ParallelRank, Part
from weightbus.writers.certificate import certify
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.expectation import Expectation
from weightbus.writers.plan import build_plan
from weightbus.writers.plan_survey import survey

HIDDEN, FFN, HEADS, NOPE, ROPE, V_HEAD, Q_LORA, KV_LORA, VOCAB = (
    7168, 2048, 128, 128, 64, 128, 1536, 512, 129280,
)  # fmt: skip
TP, STAGES = 8, 4


def config_of(layers: int, experts: int) -> dict[str, object]:
    return {
        "model_type": "deepseek_v3", "num_hidden_layers": layers, "n_routed_experts": experts,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
    }  # fmt: skip


def rank_layout(rank: int, ranks: int, layers: int, experts: int) -> Layout:
    """Ranks in stages; TP inside a stage, experts over all of its ranks, the rest is data."""
    per_stage = ranks // STAGES
    stage, place = divmod(rank, per_stage)
    tp, dp = place % TP, place // TP
    mine = range(stage * layers // STAGES, (stage + 1) * layers // STAGES)
    tensors: list[LocalTensor] = []

    def add(name: str, shape: tuple[int, ...], dim: int | None = None, glu: int = 0) -> None:
        part = Part()
        if dim is not None:
            part = Part(dim=dim, index=tp, count=TP, blocks=(glu, glu) if glu else ())
            shape = tuple(n // TP if d == dim else n for d, n in enumerate(shape))
        owned = dp == 0 if dim is not None else place == 0
        tensors.append(LocalTensor(name=name, dtype=dtype, shape=shape, part=part, owned=owned))

    dtype: DType = "BF16"
    if stage == 0:
        add("embedding.word_embeddings.weight", (VOCAB, HIDDEN), 0)
    for layer in mine:
        to, attention = f"decoder.layers.{layer}.", f"decoder.layers.{layer}.self_attention."
        add(f"{to}input_layernorm.weight", (HIDDEN,))
        add(f"{attention}linear_q_down_proj.weight", (Q_LORA, HIDDEN))
        add(f"{attention}linear_q_up_proj.layer_norm_weight", (Q_LORA,))
        add(f"{attention}linear_q_up_proj.weight", (HEADS * (NOPE + ROPE), Q_LORA), 0)
        add(f"{attention}linear_kv_down_proj.weight", (KV_LORA + ROPE, HIDDEN))
        add(f"{attention}linear_kv_up_proj.layer_norm_weight", (KV_LORA,))
        add(f"{attention}linear_kv_up_proj.weight", (HEADS * (NOPE + V_HEAD), KV_LORA), 0)
        add(f"{attention}linear_proj.weight", (HIDDEN, HEADS * V_HEAD), 1)
        add(f"{to}pre_mlp_layernorm.weight", (HIDDEN,))
        add(f"{to}mlp.router.weight", (experts, HIDDEN))
        add(f"{to}mlp.shared_experts.linear_fc1.weight", (2 * FFN, HIDDEN), 0, FFN)
        add(f"{to}mlp.shared_experts.linear_fc2.weight", (HIDDEN, FFN), 1)
        each = max(1, experts // per_stage)
        replica, first = divmod(place * each, experts)
        for expert in range(first, first + each):
            for name, shape in (("1", (2 * FFN, HIDDEN)), ("2", (HIDDEN, FFN))):
                full = f"{to}mlp.experts.linear_fc{name}.weight{expert}"
                tensors.append(LocalTensor(name=full, dtype=dtype, shape=shape, owned=replica == 0))
    if stage == STAGES - 1:
        add("decoder.final_layernorm.weight", (HIDDEN,))
        add("output_layer.weight", (VOCAB, HIDDEN), 0)
    return Layout(naming="megatron", producer=ParallelRank(rank=rank), tensors=tuple(tensors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for option, default in (("layers", 60), ("experts", 256), ("ranks", 512), ("writers", 8)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    config = config_of(options.layers, options.experts)
    times: dict[str, float] = {}
    started = time.perf_counter()
    layouts = [
        rank_layout(rank, options.ranks, options.layers, options.experts)
        for rank in range(options.ranks)
    ]
    times["layouts_s"] = time.perf_counter() - started
    expected = Expectation.of(
        {
            name: (target.dtype, target.shape)
            for name, target in survey(
                layouts, Expectation.of({}), family_of(config)
            ).targets.items()
        }
    )
    started = time.perf_counter()
    certificate = certify(layouts, expected, family_of(config))
    times["certificate_s"] = time.perf_counter() - started
    started = time.perf_counter()
    plan = build_plan(layouts, expected, family_of(config), writers=options.writers)
    times["plan_s"] = time.perf_counter() - started
    print(
        json.dumps(
            {
                **{key: round(value, 2) for key, value in times.items()},
                "ok": certificate.ok,
                "ranks": options.ranks,
                "held_tensors": sum(len(layout.tensors) for layout in layouts),
                "sources": len(plan.sources),
                "pieces": sum(len(source.pieces) for source in plan.sources.values()),
                "targets": len(plan.targets),
                "shards": len(plan.shards),
                "total_gib": round(plan.total_size / 2**30, 1),
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
