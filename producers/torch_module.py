"""The publisher for one process that holds a whole model under its Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from ..schemas.errors import LayoutError, MissingDependencyError
from ..schemas.hf_folder import read_folder
from ..schemas.layout import Layout, LocalTensor, ParallelRank
from .attempts import Trainer, open_attempt, origin_of
from .bus_thread import BusSource, bus_thread_of
from .publisher import DEFAULT_STAGING, DEFAULT_TIMES, PublisherTimes, VersionPublisher
from .staging import StagingConfig
from .torch_source import TensorGetter, TorchSource, dtype_code

try:
    import torch
except ImportError as missing:
    raise MissingDependencyError(
        "torch is not installed", next_step='pip install "weightbus[torch]"'
    ) from missing

TorchModel: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]


class TorchModulePublisher(VersionPublisher):
    """Publishes a module, or a state dict that is updated in place, as the only producer.

    Args:
        model: its names are the checkpoint's.
        hf_checkpoint: the checkpoint that it came from.
        run_id: the run.
        bus: a URL, a BusConfig, a factory of a bus, or a BusThread to share.
        staging: the arena.
        attempt: None takes the run's next one.
        times: deadlines.

    Raises:
        OriginError: the checkpoint folder cannot be read.
        LayoutError: no tensors, or a dtype that safetensors cannot hold.
        BusUnavailableError: no bus.
    """

    def __init__(
        self,
        model: TorchModel,
        hf_checkpoint: str | Path,
        run_id: str,
        bus: BusSource,
        *,
        staging: StagingConfig = DEFAULT_STAGING,
        attempt: int | None = None,
        times: PublisherTimes = DEFAULT_TIMES,
    ) -> None:
        layout, getters = read_module(model, Path(hf_checkpoint))
        trainer = Trainer(run_id, 1, "hf", origin_of(hf_checkpoint))
        trainer.opening(0)  # a run_id that cannot be is refused before anything is opened
        thread, owns = bus_thread_of(bus, connect_timeout_s=times.start_s)
        try:
            number = thread.run(
                open_attempt(thread.bus, trainer, attempt, timeout_s=times.start_s),
                timeout_s=2 * times.start_s,
            )
            super().__init__(
                TorchSource(layout, getters),
                thread,
                run_id=run_id,
                attempt=number,
                producers=1,
                staging=staging,
                times=times,
                owns_bus=owns,
            )
        except BaseException:
            if owns:
                thread.close()
            raise


def read_module(model: TorchModel, hf_checkpoint: Path) -> tuple[Layout, list[TensorGetter]]:
    """The layout of a whole model, and how to get each tensor.

    A tensor that repeats an earlier one (a tied head) is left out, unless the checkpoint has it.

    Raises:
        OriginError: the checkpoint folder cannot be read.
        LayoutError: no tensors, or a dtype that safetensors cannot hold.
    """
    wanted = read_folder(hf_checkpoint).keys()
    held: list[LocalTensor] = []
    getters: list[TensorGetter] = []
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, getter in _getters(model):
        tensor = getter()
        identity = (tensor.data_ptr(), tuple(tensor.shape))
        if identity in seen and tensor.numel() > 0 and name not in wanted:
            continue
        seen.add(identity)
        held.append(
            LocalTensor(
                name=name,
                dtype=dtype_code(name, tensor.dtype),
                shape=tuple(tensor.shape),
                local_name=name,
            )
        )
        getters.append(getter)
    if not held:
        raise LayoutError("the model has no tensors", next_step="pass the module that is trained")
    return Layout(naming="hf", producer=ParallelRank(rank=0), tensors=tuple(held)), getters


def _getters(model: TorchModel) -> list[tuple[str, TensorGetter]]:
    if isinstance(model, torch.nn.Module):
        found: list[tuple[str, TensorGetter]] = []
        for name in model.state_dict():
            path, _, leaf = name.rpartition(".")
            found.append((name, _attribute(model.get_submodule(path), leaf)))
        return found
    return [(name, _item(model, name)) for name in model]


def _attribute(module: torch.nn.Module, leaf: str) -> TensorGetter:
    return lambda: getattr(module, leaf)


def _item(tensors: Mapping[str, torch.Tensor], name: str) -> TensorGetter:
    return lambda: tensors[name]
