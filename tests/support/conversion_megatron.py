"""Whole Megatron models of any dims, as names and shapes, and ranks that hold parts of them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from support.conversion_executor import Raw
from support.conversion_oracle import convert
from weightbus.schemas.layout import Layout, LocalTensor, ParallelRank, Part
from weightbus.writers.expectation import Expectation
from weightbus.writers.plan_types import Source

Shapes = dict[str, tuple[int, ...]]
Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Model:
    """Sizes of a model. `experts` 0: dense. `latent`: MLA instead of query groups."""

    hidden: int = 40
    layers: int = 2
    heads: int = 6
    groups: int = 3
    head_dim: int = 10
    ffn: int = 24
    vocab: int = 37
    padded_vocab: int = 48
    experts: int = 0
    expert_ffn: int = 12
    dense_layers: int = 0
    bias: bool = False
    norms: bool = False
    tied: bool = False
    latent: bool = False
    q_lora: bool = True
    te: bool = False
    grouped: bool = False
    mtp: str = ""

    @property
    def config(self) -> dict[str, object]:
        """What config.json says about it."""
        return {
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups, "head_dim": self.head_dim,
            "hidden_size": self.hidden, "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied, "num_nextn_predict_layers": 1 if self.mtp else 0,
        }  # fmt: skip

    def shapes(self) -> Shapes:
        """Every whole Megatron tensor."""
        vocabulary = (self.padded_vocab, self.hidden)
        out: Shapes = {
            "embedding.word_embeddings.weight": vocabulary,
            "decoder.final_layernorm.weight": (self.hidden,),
            "output_layer.weight": vocabulary,
        }
        for layer in range(self.layers):
            self._layer(out, f"decoder.layers.{layer}.", dense=layer < self.dense_layers)
        if self.mtp:
            for norm in ("enorm", "hnorm", "final_layernorm"):
                out[f"mtp.layers.0.{norm}.weight"] = (self.hidden,)
            out["mtp.layers.0.eh_proj.weight"] = (self.hidden, 2 * self.hidden)
            self._layer(out, f"mtp.layers.0.{self.mtp}.", dense=False)
        return out

    def _layer(self, out: Shapes, to: str, *, dense: bool) -> None:
        attention = f"{to}self_attention."
        dense = dense or not self.experts
        fused_norm = self.te and not self.latent
        out[f"{attention}linear_qkv.layer_norm_weight" if fused_norm
            else f"{to}input_layernorm.weight"] = (self.hidden,)  # fmt: skip
        out[f"{to}mlp.linear_fc1.layer_norm_weight" if self.te and dense
            else f"{to}pre_mlp_layernorm.weight"] = (self.hidden,)  # fmt: skip
        if self.latent:
            self._latent(out, attention)
        else:
            rows = (self.heads + 2 * self.groups) * self.head_dim
            out[f"{attention}linear_qkv.weight"] = (rows, self.hidden)
            out[f"{attention}linear_proj.weight"] = (self.hidden, self.heads * self.head_dim)
            if self.bias:
                out[f"{attention}linear_qkv.bias"] = (rows,)
            if self.norms:
                out[f"{attention}q_layernorm.weight"] = (self.head_dim,)
                out[f"{attention}k_layernorm.weight"] = (self.head_dim,)
        if dense:
            out[f"{to}mlp.linear_fc1.weight"] = (2 * self.ffn, self.hidden)
            out[f"{to}mlp.linear_fc2.weight"] = (self.hidden, self.ffn)
            return
        out[f"{to}mlp.router.weight"] = (self.experts, self.hidden)
        if self.latent:
            out[f"{to}mlp.router.expert_bias"] = (self.experts,)
            out[f"{to}mlp.shared_experts.linear_fc1.weight"] = (2 * self.ffn, self.hidden)
            out[f"{to}mlp.shared_experts.linear_fc2.weight"] = (self.hidden, self.ffn)
        for expert in range(self.experts):
            for fc, shape in (
                (1, (2 * self.expert_ffn, self.hidden)),
                (2, (self.hidden, self.expert_ffn)),
            ):
                name = (f"linear_fc{fc}.weight{expert}" if self.grouped
                        else f"local_experts.{expert}.linear_fc{fc}.weight")  # fmt: skip
                out[f"{to}mlp.experts.{name}"] = shape

    def _latent(self, out: Shapes, to: str) -> None:
        q_lora, kv_lora, rope = 8, 14, 4
        rows = self.heads * self.head_dim
        q_norm = "linear_q_up_proj.layer_norm_weight" if self.te else "q_layernorm.weight"
        kv_norm = "linear_kv_up_proj.layer_norm_weight" if self.te else "kv_layernorm.weight"
        if self.q_lora:
            out[f"{to}linear_q_down_proj.weight"] = (q_lora, self.hidden)
            out[f"{to}{q_norm}"] = (q_lora,)
            out[f"{to}linear_q_up_proj.weight"] = (rows, q_lora)
        else:
            out[f"{to}linear_q_proj.weight"] = (rows, self.hidden)
        out[f"{to}linear_kv_down_proj.weight"] = (kv_lora + rope, self.hidden)
        out[f"{to}{kv_norm}"] = (kv_lora,)
        out[f"{to}linear_kv_up_proj.weight"] = (2 * rows, kv_lora)
        out[f"{to}linear_proj.weight"] = (self.hidden, rows)


@dataclass(frozen=True)
class Grid:
    """A parallel layout: `dp` replicas of `tp` ranks per stage, experts over `ep` of them."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def stage(self) -> int:
        """Ranks of one stage."""
        return self.tp * self.dp


class Holding(NamedTuple):
    """What one rank holds of one whole: its part, and whether it publishes it."""

    part: Part
    owned: bool


def layouts_of(model: Model, grid: Grid, shapes: Shapes | None = None) -> list[Layout]:
    """The layouts of all ranks; `shapes` of whole tensors if they are not the model's own."""
    shapes = model.shapes() if shapes is None else shapes
    return [
        Layout(
            naming="megatron",
            producer=ParallelRank(
                rank=rank, tp_rank=rank % grid.tp, pp_rank=rank // grid.stage,
                dp_rank=rank % grid.stage // grid.tp,
            ),
            tensors=tuple(
                LocalTensor(
                    name=name, dtype="F32", shape=_local_shape(shape, held.part),
                    part=held.part, owned=held.owned,
                )
                for name, shape in shapes.items()
                if (held := _held(name, shape, rank, model, grid)) is not None
            ),
        )
        for rank in range(grid.pp * grid.stage)
    ]  # fmt: skip


def _held(name: str, shape: tuple[int, ...], rank: int, model: Model, grid: Grid) -> Holding | None:
    stage, place = divmod(rank, grid.stage)
    tp, dp = place % grid.tp, place // grid.tp
    words = name.split(".")
    copy = model.tied and name == "output_layer.weight" and grid.pp == 1
    if stage != _stage(words, model, grid) or copy:
        return None
    if ".mlp.experts." in name:
        expert = int(words[-3] if "local_experts" in words else words[-1].removeprefix("weight"))
        per_rank = model.experts // grid.ep
        return Holding(Part(), place < grid.ep) if place % grid.ep == expert // per_rank else None
    dim = _dim(name)
    owner = zlib.crc32(name.encode()) % grid.dp
    if dim is None or grid.tp == 1:
        return Holding(Part(), tp == 0 and dp == owner)
    half = shape[0] // 2
    blocks = (half, half) if "linear_fc1" in name else ()
    return Holding(Part(dim=dim, index=tp, count=grid.tp, blocks=blocks), dp == owner)


def _stage(words: list[str], model: Model, grid: Grid) -> int:
    if words[0] == "embedding":
        return 0
    if words[:2] == ["decoder", "layers"]:
        return int(words[2]) * grid.pp // model.layers
    return grid.pp - 1


def _dim(name: str) -> int | None:
    """Which dim TP cuts, by Megatron's own column and row parallel layers."""
    if name.endswith("layer_norm_weight") or "down_proj" in name:
        return None
    columns = ("embedding", "output_layer", "linear_qkv", "linear_fc1", "q_up_proj", "kv_up_proj")
    if any(word in name for word in (*columns, "linear_q_proj")):
        return 0
    return 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else None


def _local_shape(shape: tuple[int, ...], part: Part) -> tuple[int, ...]:
    return tuple(
        n // part.count if part.count > 1 and dim == part.dim else n for dim, n in enumerate(shape)
    )


@functools.cache
def whole_value(name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Different bytes in every element, by name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.integers(1, 2**32, size=shape, dtype=np.uint32)


def local_bytes(
    source: Source,
    layouts: list[Layout],
    value_of: Callable[[str, tuple[int, ...]], npt.NDArray[Any]] = whole_value,
) -> bytes:
    """The bytes of one source, cut out of its whole as schemas.layout.Part defines it."""
    layout = next(one for one in layouts if one.producer.rank == source.rank)
    tensor = layout.tensors[source.index]
    whole = value_of(tensor.name, tensor.whole_shape)
    part = tensor.part
    if part.count == 1:
        return whole.tobytes()
    blocks = part.blocks if part.blocks else (whole.shape[part.dim],)
    cut = [
        np.split(block, part.count, part.dim)[part.index]
        for block in np.split(whole, np.cumsum(blocks)[:-1], part.dim)
    ]
    return np.concatenate(cut, part.dim).tobytes()


def wanted_of(model: Model, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, Raw]:
    """The HF checkpoint that the formulas of the formats give."""
    shapes = model.shapes() if shapes is None else shapes
    wholes = {name: whole_value(name, shape) for name, shape in shapes.items()}
    made = convert(wholes, model.config, mla=model.latent)
    return {name: Raw("F32", value.shape, value.tobytes()) for name, value in made.items()}


def expectation_of(model: Model) -> Expectation:
    """Names and shapes of the formulas' answer."""
    return Expectation.of({name: ("F32", raw.shape) for name, raw in wanted_of(model).items()})
