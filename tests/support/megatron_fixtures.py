"""What 40 real Megatron layouts hold, rank by rank (tests/fixtures/README.md), and their bytes."""

from __future__ import annotations

import functools
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from weightbus.demo.megatron_cpu.values import cut_whole, value_of
from weightbus.producers.megatron_layout import (
    ChunkRecord,
    RankRecord,
    TensorRecord,
    build_layout,
)
from weightbus.producers.megatron_partition import ModelSizes
from weightbus.producers.ownership import ParallelSizes
from weightbus.schemas.dtypes import DType
from weightbus.schemas.layout import Layout, LocalTensor, ParallelRank

FIXTURES = Path(__file__).parents[1] / "fixtures"
LAYOUTS_FILE = FIXTURES / "megatron_layouts.json.xz"

__all__ = [
    "FixtureGroup", "cut_whole", "fixture_groups", "group_named", "layouts_of", "local_bytes",
    "local_value", "value_of",
]  # fmt: skip
RawDump = dict[str, Any]
DTYPES: dict[str, DType] = {"torch.float32": "F32", "torch.bfloat16": "BF16"}
TORCH_DTYPES: dict[DType, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class FixtureGroup:
    """One layout: a model (`kind`) on some ranks. `ranks` are the raw dumps, by rank."""

    name: str
    kind: str
    megatron: str
    ranks: list[RawDump]

    @property
    def tied(self) -> bool:
        return bool(self.ranks[0]["layout"]["tied"])

    @property
    def mtp(self) -> bool:
        return bool(self.ranks[0]["layout"]["mtp"])


@functools.cache
def fixture_groups() -> list[FixtureGroup]:
    """All 40, in order of their names."""
    raw = cast("dict[str, list[RawDump]]", json.loads(lzma.decompress(LAYOUTS_FILE.read_bytes())))
    return [
        FixtureGroup(name, ranks[0]["kind"], ranks[0]["megatron_core"], ranks)
        for name, ranks in sorted(raw.items())
    ]


def group_named(name: str) -> FixtureGroup:
    """One of them."""
    return next(group for group in fixture_groups() if group.name == name)


def layouts_of(group: FixtureGroup) -> list[Layout]:
    """The layout that each rank publishes, by rank."""
    return [layout_of(dump, len(group.ranks)) for dump in group.ranks]


def layout_of(dump: RawDump, world: int) -> Layout:
    """The layout of one rank out of its dump."""
    return build_layout(chunk_records(dump), rank_record(dump, world), sizes_of(dump))


def sizes_of(dump: RawDump) -> ModelSizes:
    """The sizes of the whole model."""
    dims = dump["dims"]
    mla = dump["kind"].startswith("mla")
    return ModelSizes(
        hidden=dims["hidden"],
        heads=dims["heads"],
        kv_groups=dims["kv_groups"],
        head_dim=dims["head_dim"],
        ffn=dims["ffn"],
        moe_ffn=dims["moe_ffn"],
        shared_ffn=dims["shared_ffn"],
        q_lora=dims["q_lora"] if mla else None,
        kv_lora=dims["kv_lora"] if mla else None,
        qk_nope=dims["qk_nope"] if mla else None,
        qk_rope=dims["qk_rope"] if mla else None,
        v_head=dims["v_head"] if mla else None,
        padded_vocab=dims["padded_vocab"],
    )


def rank_record(dump: RawDump, world: int) -> RankRecord:
    """Where the rank stands. Megatron's default order: tp, ep, dp, pp, the fastest first."""
    sizes = dump["layout"]
    stage = world // sizes["pp"]
    # Without routed experts the recorded expert grid may not fill the stage (etp defaults to tp).
    edp = stage // (sizes["etp"] * sizes["ep"])
    return RankRecord(
        coordinates=ParallelRank(
            **{
                key: dump[key]
                for key in ("rank", "tp_rank", "pp_rank", "ep_rank", "etp_rank", "dp_rank")
            }
        ),
        sizes=ParallelSizes(
            tp=sizes["tp"], dp=sizes["dp"], ep=sizes["ep"], etp=sizes["etp"], edp=edp
        ),
        edp_rank=(dump["rank"] % stage) // (sizes["etp"] * sizes["ep"]),
        first_expert=dump["ep_rank"] * (dump["dims"]["experts"] // sizes["ep"]),
    )


def chunk_records(dump: RawDump) -> list[ChunkRecord]:
    """The rank's chunks as the adapter would record them."""
    return [_chunk(chunk, tied=bool(dump["layout"]["tied"])) for chunk in dump["chunks"]]


def _chunk(chunk: RawDump, *, tied: bool) -> ChunkRecord:
    tensors = [
        TensorRecord(
            param["name"],
            DTYPES[param["dtype"]],
            tuple(param["shape"]),
            bool(param["attrs"].get("shared", False)),
        )
        for param in chunk["params"]
    ]
    tensors += [
        TensorRecord(buffer["name"], DTYPES[buffer["dtype"]], tuple(buffer["shape"]))
        for buffer in chunk["buffers"]
        if buffer["persistent"]
    ]
    numbers = {
        f"decoder.layers.{local}": number for local, number in enumerate(chunk["layer_numbers"])
    }
    return ChunkRecord(tuple(tensors), numbers, bool(chunk["pre_process"]), tied)


def local_value(tensor: LocalTensor) -> torch.Tensor:
    """The value of one local tensor."""
    whole = value_of(tensor.name, tensor.whole_shape, TORCH_DTYPES[tensor.dtype])
    return cut_whole(whole, tensor.part).contiguous()


def local_bytes(tensor: LocalTensor) -> bytes:
    """Its bytes, row-major."""
    return local_value(tensor).view(torch.uint8).numpy().tobytes()
