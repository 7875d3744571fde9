"""Hugging Face tensors that stream past: described once, then copied one by one into the arena.

An exporter yields (name, tensor) once per version. Only one tensor of it is alive at a time here;
what this rank does not publish is looked at and dropped. An exporter may be a collective among the
ranks, so it is always read to its end: what is wrong is collected on the way and raised afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..schemas.dtypes import DType
from ..schemas.errors import LayoutError, MissingDependencyError
from ..schemas.layout import Layout, LocalTensor, ParallelRank
from .chunks import Placed
from .ownership import Coordinates, Holding, ParallelSizes, owned
from .staging import Slot
from .torch_source import TORCH_DTYPES, dtype_code

try:
    import torch
except ImportError as missing:
    raise MissingDependencyError(
        "torch is not installed", next_step='pip install "weightbus[torch]"'
    ) from missing

Export: TypeAlias = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Begins one pass over the current weights: whole tensors under Hugging Face names. Items may have
more fields than the two."""

Yields: TypeAlias = Literal["all", "own"]
"""`all`: every rank's exporter yields every tensor, the same list in the same order, and the ranks
share the publishing. `own`: a rank's exporter yields what this rank alone publishes."""

_MAX_NAMED = 20


@dataclass(frozen=True, slots=True)
class HfTensor:
    """Name, dtype code and shape of one tensor that an exporter yields."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Renaming:
    """What becomes of names that only repeat another tensor (the head of a tied model).

    `copies` maps such a name to the name of the tensor that it repeats, or to None. A copy is
    dropped where the exporter yields the original too; otherwise it is published as the original.
    With None it is always dropped.
    """

    copies: Mapping[str, str | None] = field(default_factory=dict[str, str | None])

    def of(self, name: str, yielded: Collection[str]) -> str | None:
        """The name to publish under; None drops the tensor."""
        if name not in self.copies:
            return name
        original = self.copies[name]
        return None if original is None or original in yielded else original


def describe(export: Export) -> list[HfTensor]:
    """A dry pass: what the exporter yields, in its order; no tensor is kept.

    Raises:
        LayoutError: a name comes twice, or a dtype that safetensors cannot hold; after the
            exporter's end.
    """
    found: dict[str, HfTensor] = {}
    troubles: list[str] = []
    for item in export():
        name, tensor = item[0], item[1]
        try:
            entry = HfTensor(name, dtype_code(name, tensor.dtype), tuple(tensor.shape))
        except LayoutError as error:
            troubles.append(error.what)
        else:
            if name in found:
                troubles.append(f"{name} is yielded twice")
            found[name] = entry
        del item, tensor  # the exporter makes its next tensor now: do not keep two
    _refuse(troubles, "the exporter's tensors cannot be published", None)
    return list(found.values())


def bridge_layout(
    tensors: Sequence[HfTensor], renaming: Renaming, *, rank: int, ranks: int, yields: Yields
) -> Layout:
    """What this rank publishes out of what its exporter yields.

    Raises:
        LayoutError: no tensors, or one name twice.
    """
    names = [tensor.name for tensor in tensors]
    yielded = frozenset(names)
    kept = [(renaming.of(tensor.name, yielded), tensor) for tensor in tensors]
    published = [name for name, _ in kept if name is not None]
    twice = sorted(name for name, times in Counter(published).items() if times > 1)
    _refuse([f"{name} is named twice" for name in twice], "the exporter's tensors clash", rank)
    if not published and yields == "all":
        raise LayoutError(
            "the exporter yields no tensors",
            where={"rank": rank},
            next_step="pass the module that is trained, and an exporter that begins anew each time",
        )
    held = [
        LocalTensor(name=name, dtype=tensor.dtype, shape=tensor.shape, local_name=tensor.name)
        for name, tensor in kept
        if name is not None
    ]
    if yields == "all":
        holdings = [Holding(tensor.nbytes, expert=False, cut=False) for tensor in held]
        mine = owned(holdings, ParallelSizes(dp=ranks, edp=ranks), Coordinates(dp_rank=rank))
        held = [
            tensor.model_copy(update={"owned": own}) for tensor, own in zip(held, mine, strict=True)
        ]
    return Layout(naming="hf", producer=ParallelRank(rank=rank, dp_rank=rank), tensors=tuple(held))


class BridgeSource:
    """A `TensorSource` over an exporter.

    Args:
        export: begins a pass.
        tensors: what a pass yields, complete (from `describe`, or known beforehand).
        layout: what this rank publishes of it (`bridge_layout`).
    """

    def __init__(self, export: Export, tensors: Sequence[HfTensor], layout: Layout) -> None:
        self._export, self._layout = export, layout
        self._expected = {tensor.name: tensor for tensor in tensors}
        # A redirected tensor stands in the layout under another name than it comes with.
        self._index = {tensor.local_name: n for n, tensor in enumerate(layout.tensors)}
        self._views: dict[int, dict[int, torch.Tensor]] = {}
        self._passes = 0

    @property
    def layout(self) -> Layout:
        """What this rank publishes."""
        return self._layout

    @property
    def passes(self) -> int:
        """Passes begun so far, without the dry one."""
        return self._passes

    def fill(self, slot: Slot, placed: Sequence[Placed]) -> None:
        """Read one pass and copy what this rank publishes into the slot.

        Raises:
            LayoutError: names that are missing, new or twice, and tensors of another shape or
                dtype than before; all of them are named, after the exporter's end.
        """
        views = self._views.get(slot.number)
        if views is None:
            views = self._views[slot.number] = self._make_views(slot, placed)
        seen: set[str] = set()
        troubles: list[str] = []
        self._passes += 1
        with torch.no_grad():
            for item in self._export():
                name, tensor = item[0], item[1].detach()
                trouble = self._trouble(name, tensor, seen)
                if trouble is not None:
                    troubles.append(trouble)
                elif (view := views.get(self._index.get(name, -1))) is not None:
                    view.copy_(tensor)
                seen.add(name)
                del item, tensor  # the exporter makes its next tensor now: do not keep two
        missing = [name for name in self._expected if name not in seen]
        troubles += [f"{name} is missing" for name in missing]
        _refuse(
            troubles,
            "the exporter yields other tensors than before",
            self._layout.producer.rank,
        )

    def drain(self) -> None:
        """Read one pass and keep nothing, because other ranks may wait in its collectives."""
        self._passes += 1
        for item in self._export():
            del item

    def forget(self) -> None:
        """Drop the views of the arena."""
        self._views.clear()

    def _make_views(self, slot: Slot, placed: Sequence[Placed]) -> dict[int, torch.Tensor]:
        views: dict[int, torch.Tensor] = {}
        for part in placed:
            tensor = self._layout.tensors[part.index]
            if part.length > 0:
                memory = slot.buffer[part.offset : part.end]
                flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[tensor.dtype])
                views[part.index] = flat.view(tensor.shape)
        return views

    def _trouble(self, name: str, tensor: torch.Tensor, seen: Collection[str]) -> str | None:
        expected = self._expected.get(name)
        if expected is None:
            return f"{name} is new"
        if name in seen:
            return f"{name} is yielded twice"
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if (shape, dtype) != (expected.shape, TORCH_DTYPES[expected.dtype]):
            return (
                f"{name} is {_short(dtype)} {list(shape)}, was "
                f"{_short(TORCH_DTYPES[expected.dtype])} {list(expected.shape)}"
            )
        return None


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse(troubles: Sequence[str], what: str, rank: int | None) -> None:
    if not troubles:
        return
    text = "; ".join(troubles[:_MAX_NAMED])
    if len(troubles) > _MAX_NAMED:
        text += f"; and {len(troubles) - _MAX_NAMED} more"
    raise LayoutError(
        f"{what}: {text}",
        where={} if rank is None else {"rank": rank},
        next_step="an exporter yields each tensor once, the same ones for every version; after "
        "changing the model make a new publisher",
    )
