"""Layouts of a parallel layout that is only described: what each rank would hold.

With them a mapping is certified before there is a trainer, or any weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, ValidationError

from ..schemas.base import Count, Frozen, Seq
from ..schemas.dtypes import DType
from ..schemas.errors import ConfigError
from ..schemas.layout import Layout, LocalTensor, ParallelRank, Part
from .described_config import ModelConfig
from .described_model import DescribedModel, Spec, Tensor

Positive = Annotated[int, Field(ge=1)]


class Parallel(Frozen):
    """A parallel layout, in Megatron's words.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline stages.
        vpp: chunks of each stage (virtual pipeline).
        ep: expert-parallel size.
        etp: expert-tensor-parallel size.
        dp: data-parallel size; None takes the smallest that has room for the experts.
        chunk_layers: decoder layers of each of the pp * vpp chunks, in the order in which data
            passes them. Empty: shared out evenly, the first chunks have one more.
        spec: `te` or `local`: whose modules, and names.
        grouped: experts in grouped matrix products.
        mtp_layers: MTP layers that are trained.
        vocab_multiple: the vocabulary is padded to a multiple of this times tp.
        dtype: of everything but the router's balancing bias, which is fp32.
    """

    tp: Positive = 1
    pp: Positive = 1
    vpp: Positive = 1
    ep: Positive = 1
    etp: Positive = 1
    dp: Positive | None = None
    chunk_layers: Seq[Count] = ()
    spec: Spec = "te"
    grouped: bool = True
    mtp_layers: Count = 0
    vocab_multiple: Positive = 128
    dtype: DType = "BF16"

    @classmethod
    def parse(cls, text: str) -> Parallel:
        """From `tp=8,pp=16,ep=32`; chunk_layers separated by `+`: `chunk_layers=3+4+4`.

        Raises:
            ConfigError: an unknown word, or a value that cannot be.
        """
        values: dict[str, object] = {}
        for word in filter(None, (word.strip() for word in text.split(","))):
            key, sign, value = word.partition("=")
            if not sign:
                raise ConfigError(
                    f"{word!r} in a parallel layout is not of the form key=value",
                    next_step=f"known keys: {', '.join(cls.model_fields)}",
                )
            values[key] = value.split("+") if key == "chunk_layers" else value
        unknown = sorted(set(values) - set(cls.model_fields))
        next_step = f"known keys: {', '.join(cls.model_fields)}"
        if unknown:
            raise ConfigError(
                f"the parallel layout {text!r} names {', '.join(unknown)}, which nobody knows",
                next_step=next_step,
            )
        try:
            return cls.model_validate(values, strict=False)
        except ValidationError as error:
            wrong = "; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors())
            raise ConfigError(
                f"the parallel layout {text!r} cannot be: {wrong}", next_step=next_step
            ) from error

    @property
    def data(self) -> int:
        """The data-parallel size."""
        if self.dp is not None:
            return self.dp
        return math.lcm(self.tp, self.etp * self.ep) // self.tp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.data

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.pp * self.stage_ranks

    def chunks(self, layers: int) -> list[range]:
        """The decoder layers of every chunk, in the order in which data passes them.

        Raises:
            ConfigError: chunk_layers that do not fit.
        """
        count = self.pp * self.vpp
        sizes = list(self.chunk_layers)
        if not sizes:
            least, more = divmod(layers, count)
            sizes = [least + (number < more) for number in range(count)]
        if len(sizes) != count or sum(sizes) != layers:
            raise ConfigError(
                f"chunk_layers {sizes} are {len(sizes)} chunks of {sum(sizes)} layers, the "
                f"pipeline has {count} chunks and the model {layers} layers",
                next_step="give one number per chunk, in the order in which data passes them",
            )
        starts = [sum(sizes[:number]) for number in range(count)]
        return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def described_layouts(
    parallel: Parallel, config: Mapping[str, object], family: str
) -> list[Layout]:
    """What every rank of a described parallel layout would hold, by rank.

    Args:
        parallel: the parallel layout.
        config: the model's config.json.
        family: the family's name (`family_of(config).name`).

    Raises:
        UnknownFamilyError: the family's Megatron model is not known.
        OriginError: the config lacks a number.
        ConfigError: sizes that do not divide each other.
    """
    model_config = ModelConfig(config, family)
    model = DescribedModel(
        model_config,
        spec=parallel.spec,
        grouped=parallel.grouped,
        vocab_multiple=parallel.vocab_multiple * parallel.tp,
    )
    _check(parallel, model_config)
    stages = [_stage(model, model_config, parallel, stage) for stage in range(parallel.pp)]
    return [
        _layout(rank, stages[rank // parallel.stage_ranks], parallel, model_config)
        for rank in range(parallel.ranks)
    ]


def _check(parallel: Parallel, config: ModelConfig) -> None:
    experts = config.dims.experts if config.structure.moe else 1
    if experts % parallel.ep:
        what = f"{experts} experts" if config.structure.moe else "a model without experts"
        raise ConfigError(
            f"{what} cannot be shared out to ep={parallel.ep}",
            next_step="choose an expert-parallel size that divides the number of experts",
        )
    if parallel.stage_ranks % (parallel.etp * parallel.ep):
        raise ConfigError(
            f"a stage of tp * dp = {parallel.stage_ranks} ranks is no multiple of "
            f"etp * ep = {parallel.etp * parallel.ep}",
            next_step="leave dp out: the smallest that fits is taken",
        )


def _stage(
    model: DescribedModel, config: ModelConfig, parallel: Parallel, stage: int
) -> list[tuple[Tensor, bool]]:
    """The whole tensors of one stage in model order; False marks copies that nobody there owns."""
    chunks = parallel.chunks(config.dims.layers)
    last = len(chunks) - 1
    found: list[tuple[Tensor, bool]] = []
    for number in range(stage, len(chunks), parallel.pp):
        if number == 0:
            found.append((model.embedding(), True))
        found += [(tensor, True) for layer in chunks[number] for tensor in model.layer(layer)]
        if number == last:
            found += [(tensor, True) for tensor in model.last()]
            for layer in range(parallel.mtp_layers):
                found += [(tensor, True) for tensor in model.mtp(layer)]
    # A tied head and MTP layers read the embedding: the last stage then holds a copy of it.
    if 0 < stage == parallel.pp - 1 and (config.dims.tied or parallel.mtp_layers):
        found.append((model.embedding(), False))
    return found


def _layout(
    rank: int, tensors: list[tuple[Tensor, bool]], parallel: Parallel, config: ModelConfig
) -> Layout:
    stage, place = divmod(rank, parallel.stage_ranks)
    tp, dp = place % parallel.tp, place // parallel.tp
    etp, ep = place % parallel.etp, place // parallel.etp % parallel.ep
    replica = place // (parallel.etp * parallel.ep)
    per_rank = config.dims.experts // parallel.ep if config.structure.moe else 1
    held: list[LocalTensor] = []
    for tensor, own in tensors:
        if tensor.expert is None:
            part = _part(tensor, tp, parallel.tp)
            first = dp == 0 and (part.count > 1 or tp == 0)
        elif tensor.expert // per_rank == ep:
            part = _part(tensor, etp, parallel.etp)
            first = replica == 0 and (part.count > 1 or etp == 0)
        else:
            continue
        held.append(_local(tensor, part, parallel.dtype, owned=own and first))
    producer = ParallelRank(
        rank=rank, tp_rank=tp, pp_rank=stage, ep_rank=ep, etp_rank=etp, dp_rank=dp
    )
    return Layout(naming="megatron", producer=producer, tensors=tuple(held))


def _part(tensor: Tensor, index: int, count: int) -> Part:
    if tensor.dim is None or count == 1:
        return Part()
    size = tensor.shape[tensor.dim]
    blocks = (size // 2, size // 2) if tensor.halves else ()
    if any(block % count for block in (blocks if blocks else (size,))):
        raise ConfigError(
            f"{tensor.name} with {size} elements along dim {tensor.dim} cannot be cut into {count}",
            next_step="choose a tensor-parallel size that divides the model",
        )
    return Part(dim=tensor.dim, index=index, count=count, blocks=blocks)


def _local(tensor: Tensor, part: Part, dtype: DType, *, owned: bool) -> LocalTensor:
    shape = list(tensor.shape)
    if part.count > 1:
        shape[part.dim] //= part.count
    return LocalTensor(
        name=tensor.name,
        dtype=dtype if tensor.dtype is None else tensor.dtype,
        shape=tuple(shape),
        part=part,
        owned=owned,
    )
