"""Bridge mode: publish what an exporter (Megatron-Bridge) has converted already.

The exporter gathers whole tensors and renames them by its own means and collectives; here they are
only copied into the arena, hashed and announced, and the writers check names, shapes and dtypes
against the origin as always. What bridge mode gives up: the trainer does gather and convert, in
`publish`. For models that weightbus has no family for, or while comparing the two modes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from ..schemas.errors import MissingDependencyError, OriginError, VersionOrderError
from ..schemas.hf_folder import read_config, read_folder
from .agreement import agree_on_attempt
from .attempts import Trainer, open_attempt, origin_of
from .bridge_source import BridgeSource, Export, HfTensor, Renaming, Yields, bridge_layout, describe
from .bus_thread import BusSource, BusThread, bus_thread_of
from .handle import PublishHandle
from .hf_config import patch_hf_config
from .publisher import DEFAULT_STAGING, DEFAULT_TIMES, PublisherTimes, VersionPublisher
from .staging import StagingConfig

try:
    import torch
except ImportError as missing:
    raise MissingDependencyError(
        "torch is not installed", next_step='pip install "weightbus[torch]"'
    ) from missing

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class BridgePublisher(VersionPublisher):
    """Publishes Hugging Face tensors that an exporter yields once per version.

    With torch.distributed initialized every rank of the world makes one, with the same arguments
    (its own exporter), and calls `publish` with the same numbers; else it is the only producer.

    An exporter may be a collective. So every rank begins it once per `publish`, even when the
    version is left out here because no slot was free, and reads it to its end even after finding
    an error. Keep `staging.wait_timeout_s` below the time-out of the collectives: a rank that waits
    for a slot keeps the others waiting.

    Args:
        export: begins a pass over the current weights.
        hf_checkpoint: the checkpoint that training started from.
        run_id: the run.
        bus: a URL, a BusConfig, a factory of a bus, or a BusThread to share.
        tensors: what a pass yields, when it is known beforehand (`tensors_of` reads it off a
            checkpoint); None makes one dry pass now.
        yields: whether every rank's exporter yields everything (`all`), or its own share (`own`).
        renaming: tensors to drop or to publish under another name; None takes what the checkpoint
            says about its head (`tied_head`).
        staging: the arena.
        attempt: None takes the run's next one.
        times: deadlines.

    Raises:
        LayoutError: no tensors, one name twice, or a dtype that safetensors cannot hold.
        ConfigError: a run_id that cannot be.
        BusUnavailableError: no bus, or rank 0 did not open the attempt in time.
    """

    def __init__(
        self,
        export: Export,
        hf_checkpoint: str | Path,
        run_id: str,
        bus: BusSource,
        *,
        tensors: Sequence[HfTensor] | None = None,
        yields: Yields = "all",
        renaming: Renaming | None = None,
        staging: StagingConfig = DEFAULT_STAGING,
        attempt: int | None = None,
        times: PublisherTimes = DEFAULT_TIMES,
    ) -> None:
        rank, self._ranks = _world()
        trainer = Trainer(run_id, self._ranks, "hf", origin_of(hf_checkpoint))
        trainer.opening(0)  # a run_id that cannot be is refused before anything is opened
        found = describe(export) if tensors is None else list(tensors)
        named = tied_head(hf_checkpoint, found) if renaming is None else renaming
        if renaming is None and yields == "own" and self._ranks > 1:
            # Another rank yields the embedding: here its copy can only be dropped.
            named = Renaming(dict.fromkeys(named.copies))
        layout = bridge_layout(found, named, rank=rank, ranks=self._ranks, yields=yields)
        self._bridge = BridgeSource(export, found, layout)
        thread, owns = bus_thread_of(bus, connect_timeout_s=times.start_s)
        try:
            super().__init__(
                self._bridge,
                thread,
                run_id=run_id,
                attempt=_attempt(thread, trainer, attempt, times.start_s),
                producers=self._ranks,
                staging=staging,
                times=times,
                owns_bus=owns,
            )
        except BaseException:
            if owns:
                thread.close()
            raise

    def publish(self, weight_version: int, step: int | None = None) -> PublishHandle:
        """As `VersionPublisher.publish`; runs the exporter once, whatever happens to the version.

        Raises:
            VersionOrderError, PublishError, WeightbusError: as `VersionPublisher.publish`.
            Exception: whatever the exporter raises; the version is aborted.
        """
        before = self._bridge.passes
        try:
            return super().publish(weight_version, step)
        except VersionOrderError:
            before = -1  # wrong use, and the same on every rank: nobody exports
            raise
        finally:
            if self._ranks > 1 and self._bridge.passes == before and not self._closing:
                self._bridge.drain()


def export_with_bridge(bridge: Any, model_chunks: Sequence[Any], **options: Any) -> Export:
    """An exporter over Megatron-Bridge's `AutoBridge.export_hf_weights`.

    Every rank of the world must run it (its gathers are collectives) and gets every tensor:
    `yields="all"`.

    Args:
        bridge: an AutoBridge, or anything with `export_hf_weights(model, cpu=, show_progress=)`.
        model_chunks: this rank's model chunks in virtual-stage order.
        options: further keywords, such as `weight_dtype` or `conversion_tasks`.
    """
    begin = cast("Callable[..., Iterable[Any]]", bridge.export_hf_weights)
    chunks = list(model_chunks)
    # Tensors stay where they are: the copy into the arena is the only one.
    keywords: dict[str, Any] = {"cpu": False, "show_progress": False, **options}
    return lambda: begin(chunks, **keywords)


def load_bridge(hf_checkpoint: str | Path, **options: Any) -> Any:
    """Megatron-Bridge's AutoBridge for a checkpoint, its config patched (`patch_hf_config`).

    Args:
        hf_checkpoint: the checkpoint.
        options: for `AutoBridge.from_hf_pretrained`, such as `trust_remote_code`.

    Raises:
        MissingDependencyError: Megatron-Bridge is not installed, or does not import.
    """
    try:
        auto: Any = importlib.import_module("megatron.bridge").AutoBridge
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"bridge mode needs Megatron-Bridge: {error}",
            next_step="pip install megatron-bridge, or use --megatron-to-hf-mode raw",
        ) from error
    bridge = auto.from_hf_pretrained(str(hf_checkpoint), **options)
    patch_hf_config(bridge.hf_pretrained)
    return bridge


def tensors_of(hf_checkpoint: str | Path) -> list[HfTensor]:
    """Names, dtypes and shapes of a checkpoint's tensors, for exporters that yield just these.

    Raises:
        OriginError: not a checkpoint folder.
        ShardCorruptError: a file of it is truncated or malformed.
    """
    folder = read_folder(Path(hf_checkpoint))
    return [
        HfTensor(name, folder[name].entry.dtype, tuple(folder[name].entry.shape))
        for name in sorted(folder)
    ]


def tied_head(hf_checkpoint: str | Path, tensors: Sequence[HfTensor]) -> Renaming:
    """What becomes of the head: a copy of the embedding if the checkpoint's config ties the two.

    A checkpoint that ties them and has a head in its files all the same keeps the head, as the
    writers will expect it. A checkpoint that cannot be read here says nothing.
    """
    folder = Path(hf_checkpoint)
    if not _ties(folder):
        return Renaming()
    try:
        files = read_folder(folder).keys()
    except OriginError:
        files = frozenset[str]()
    heads = [
        tensor.name
        for tensor in tensors
        if (tensor.name == _HEAD or tensor.name.endswith(f".{_HEAD}")) and tensor.name not in files
    ]
    known = [*files, *(tensor.name for tensor in tensors)]
    return Renaming({head: _embedding_for(head, known) for head in heads})


def _embedding_for(head: str, known: Sequence[str]) -> str | None:
    """The embedding that belongs to a head: the one with the most of the head's prefix."""
    prefix = head.removesuffix(_HEAD)
    found = [name for name in known if name.endswith(f".{_EMBEDDING}") or name == _EMBEDDING]
    inside = [name for name in found if name.startswith(prefix)]
    return min(inside or found, key=lambda name: (len(name), name), default=None)


def _ties(folder: Path) -> bool:
    try:
        whole = read_config(folder)
    except OriginError:
        return False
    text = whole.get("text_config")
    inner = cast("dict[str, object]", text) if isinstance(text, dict) else {}
    key = "tie_word_embeddings"
    return whole.get(key, inner.get(key)) is True


def _world() -> tuple[int, int]:
    """This rank and the number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _attempt(thread: BusThread, trainer: Trainer, attempt: int | None, timeout_s: float) -> int:
    if trainer.producers > 1:
        return agree_on_attempt(thread, trainer, attempt, timeout_s)
    return thread.run(
        open_attempt(thread.bus, trainer, attempt, timeout_s=timeout_s), timeout_s=2 * timeout_s
    )
