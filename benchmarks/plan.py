"""How long a plan takes: DeepSeek-V3's shapes, on several hundred ranks.

    python benchmarks/plan.py [--layout tp=8,pp=4,ep=32] [--layers 60] [--experts 256] [--writers 8]

Prints seconds and peak memory of: describing the layouts, the certificate, the plan.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from weightbus.writers.certificate import certify
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.described import Parallel, described_layouts
from weightbus.writers.expectation import Expectation
from weightbus.writers.plan import build_plan
from weightbus.writers.plan_survey import survey


def config_of(layers: int, experts: int) -> dict[str, object]:
    """DeepSeek-V3 with another depth and number of experts."""
    return {
        "model_type": "deepseek_v3", "num_hidden_layers": layers, "n_routed_experts": experts,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "first_k_dense_replace": 0, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layout", default="tp=8,pp=4,ep=64,dp=16")
    for option, default in (("layers", 60), ("experts", 256), ("writers", 8)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    config = config_of(options.layers, options.experts)
    parallel = Parallel.parse(options.layout)
    times: dict[str, float] = {}
    started = time.perf_counter()
    layouts = described_layouts(parallel, config, "deepseek_v3")
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
                "ranks": parallel.ranks,
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
