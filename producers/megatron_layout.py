"""From what one Megatron rank holds to its Layout. Pure: records in, layout out.

`producers.megatron` reads the records off a live model; tests build them from dumps of real ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..schemas.dtypes import ITEM_BYTES, DType
from ..schemas.errors import LayoutError, UnknownPartitionError
from ..schemas.layout import Layout, LocalTensor, ParallelRank, Part
from .megatron_names import global_name, is_expert
from .megatron_partition import ModelSizes, NoPartitionError, PartitionRule, Place, part_of
from .ownership import Coordinates, Holding, ParallelSizes, owned


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One parameter or buffer. `shared`: Megatron marks it as a copy of another rank's tensor."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    shared: bool = False


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One model chunk (a virtual pipeline stage) of a rank.

    `layer_numbers`: path of an indexed layer -> its number in the whole model, from 1.
    `pre_process`: the chunk begins the model. `tied`: the output layer shares the embedding.
    """

    tensors: tuple[TensorRecord, ...]
    layer_numbers: Mapping[str, int] = field(default_factory=dict[str, int])
    pre_process: bool = True
    tied: bool = False


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Where the rank stands. `edp_rank` is its place among the replicas of its routed experts."""

    coordinates: ParallelRank
    sizes: ParallelSizes
    edp_rank: int = 0
    first_expert: int = 0


_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"


def original_of(name: str, tensor: TensorRecord, chunk: ChunkRecord) -> str | None:
    """The name of the tensor that this one only repeats, or None for a tensor in its own right.

    Under pipeline parallelism a tied model keeps its embedding a second time on the last stage,
    under the name output_layer.weight, and an MTP stage keeps one under the embedding's own name.
    The first stage's embedding is the real one and has the owner. The copies are in the layout as
    what they are, parts of the embedding that this rank does not own.
    """
    if name.endswith(_EMBEDDING):
        return name if tensor.shared or not chunk.pre_process else None
    if name.endswith(_HEAD):
        copy = tensor.shared or chunk.tied
        return name.removesuffix(_HEAD) + _EMBEDDING if copy else None
    return name if tensor.shared else None


def build_layout(
    chunks: Sequence[ChunkRecord],
    rank: RankRecord,
    sizes: ModelSizes,
    extra_rules: Sequence[PartitionRule] = (),
) -> Layout:
    """The layout of one rank, tensors in model order.

    Raises:
        UnknownPartitionError: lists every tensor whose part nobody can say.
        LayoutError: two local tensors with one global name.
        ConfigError: parallel sizes that contradict each other.
    """
    found: list[tuple[str, TensorRecord, Part, bool]] = []
    troubles: list[str] = []
    for chunk in chunks:
        for tensor in chunk.tensors:
            name = global_name(tensor.name, chunk.layer_numbers, rank.first_expert)
            try:
                part = _part(name, tensor, rank, sizes, extra_rules)
            except NoPartitionError as trouble:
                troubles.append(f"{tensor.name} {tuple(tensor.shape)}: {trouble}")
                continue
            original = original_of(name, tensor, chunk)
            found.append((original or name, tensor, part, original is not None))
    _refuse(troubles, rank)
    _refuse_doubles(found, rank)
    return Layout(
        naming="megatron",
        producer=rank.coordinates,
        tensors=tuple(
            LocalTensor(
                name=name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                part=part,
                owned=own,
                local_name=tensor.name,
            )
            for (name, tensor, part, _), own in zip(found, _owners(found, rank), strict=True)
        ),
    )


def _part(
    name: str,
    tensor: TensorRecord,
    rank: RankRecord,
    sizes: ModelSizes,
    extra_rules: Sequence[PartitionRule],
) -> Part:
    at = rank.coordinates
    if is_expert(name):
        place = Place(rank.sizes.etp, at.etp_rank)
    else:
        place = Place(rank.sizes.tp, at.tp_rank)
    return part_of(name, tensor.shape, sizes, place, extra_rules)


def _owners(found: Sequence[tuple[str, TensorRecord, Part, bool]], rank: RankRecord) -> list[bool]:
    place = rank.coordinates
    real = [entry for entry in found if not entry[3]]
    holdings = [
        Holding(_nbytes(tensor), expert=is_expert(name), cut=part.count > 1)
        for name, tensor, part, _ in real
    ]
    me = Coordinates(place.tp_rank, place.dp_rank, place.ep_rank, place.etp_rank, rank.edp_rank)
    # A tensor that could be cut but has one rank to cut it for is replicated over that one rank.
    answers = iter(owned(holdings, rank.sizes, me))
    return [not copy and next(answers) for *_, copy in found]


def _nbytes(tensor: TensorRecord) -> int:
    total = ITEM_BYTES[tensor.dtype]
    for length in tensor.shape:
        total *= length
    return total


def _refuse(troubles: Sequence[str], rank: RankRecord) -> None:
    if troubles:
        raise UnknownPartitionError(
            f"cannot say which part of the whole {len(troubles)} tensors are: "
            + "; ".join(troubles),
            where={"rank": rank.coordinates.rank},
            next_step="describe them with partition_rules=[PartitionRule(...)]",
        )


def _refuse_doubles(
    found: Sequence[tuple[str, TensorRecord, Part, bool]], rank: RankRecord
) -> None:
    first: dict[str, str] = {}
    doubles: list[str] = []
    for name, tensor, _, copy in found:
        if copy:
            continue
        if name in first:
            doubles.append(f"{name} (from {first[name]} and {tensor.name})")
        first[name] = tensor.name
    if doubles:
        raise LayoutError(
            "two local tensors with one global name: " + "; ".join(doubles),
            where={"rank": rank.coordinates.rank},
            next_step="pass every model chunk of this rank once, in virtual-stage order",
        )
