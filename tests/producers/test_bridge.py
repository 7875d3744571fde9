"""Bridge mode: exporters of Hugging Face tensors, one rank or several, and what may go wrong."""

import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from support.staging_publishers import PATIENT, end, memory_thread, of, published, read_chunk
from weightbus.bus.memory import MemoryServer
from weightbus.producers.bridge import (
    BridgePublisher,
    export_with_bridge,
    load_bridge,
    tensors_of,
    tied_head,
)
from weightbus.producers.bridge_source import HfTensor, Renaming, bridge_layout, describe
from weightbus.producers.staging import StagingConfig
from weightbus.schemas.errors import (
    LayoutError,
    MissingDependencyError,
    StagingFullError,
    VersionOrderError,
)
from weightbus.schemas.events import AttemptOpened, ChunkReady, VersionKey

WAIT_S = 10.0
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class Weight(NamedTuple):
    """What Megatron-Bridge yields; some releases have a third field."""

    param_name: str
    weight: torch.Tensor
    megatron_param_name: str = ""


class FakeBridge:
    """Called as AutoBridge is; remembers how, and how many tensors were alive at once."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = list(values.items())
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        self.ends = 0
        self.most_alive = 0

    def export_hf_weights(
        self, model: list[Any], cpu: bool = False, show_progress: bool = True, **more: Any
    ) -> Iterator[Weight]:
        self.calls.append((model, {"cpu": cpu, "show_progress": show_progress, **more}))
        alive: list[weakref.ref[torch.Tensor]] = []
        for name, value in self.values:
            made = value.clone()
            alive = [ref for ref in alive if ref() is not None] + [weakref.ref(made)]
            self.most_alive = max(self.most_alive, len(alive))
            item = Weight(name, made, "decoder.x")
            del made
            yield item
            del item
        self.ends += 1


def values() -> dict[str, torch.Tensor]:
    return {
        EMBEDDING: torch.arange(12, dtype=torch.bfloat16).view(6, 2),
        "model.layers.0.q_proj.weight": torch.randn(5, 3).t(),
        NORM: torch.randn(3),
        "model.layers.0.e_score_correction_bias": torch.randn(2),
    }


@pytest.fixture
def bridge() -> FakeBridge:
    return FakeBridge(values())


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in values().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    return folder


Make = Callable[..., BridgePublisher]


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def make(bridge: FakeBridge, origin: Path, tmp_path: Path, server: MemoryServer) -> Iterator[Make]:
    thread = memory_thread(server)
    made: list[BridgePublisher] = []

    def one(**options: Any) -> BridgePublisher:
        staging = options.pop("staging", StagingConfig(folder=tmp_path, chunk_bytes=32))
        export = export_with_bridge(bridge, ["chunk"])
        options = {"staging": staging, "times": PATIENT, **options}
        made.append(BridgePublisher(export, origin, "run", thread, **options))
        return made[-1]

    yield one
    for publisher in made:
        publisher.close()
    thread.close()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("weightbus")] == []


def bytes_of(server: MemoryServer, publisher: BridgePublisher, key: VersionKey) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for chunk in of(published(server), ChunkReady):
        if chunk.version == key and chunk.rank == publisher.layout.producer.rank:
            for index, data in read_chunk(chunk).items():
                found[publisher.layout.tensors[index].name] = data
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_each_version_is_one_pass_and_has_the_exporters_bytes(
    make: Make, bridge: FakeBridge, server: MemoryServer
) -> None:
    publisher = make()
    for version in (1, 2):
        bridge.values = [(name, value + version) for name, value in bridge.values]
        handle = publisher.publish(version)
        handle.result(WAIT_S)
        expected = {name: raw(value) for name, value in bridge.values}
        assert bytes_of(server, publisher, handle.version) == expected
        end(server, handle.version)
        handle.outcome(WAIT_S)
    assert bridge.calls == 3 * [(["chunk"], {"cpu": False, "show_progress": False})]
    assert bridge.most_alive == 1
    assert of(published(server), AttemptOpened)[0].naming == "hf"


def test_a_known_layout_needs_no_dry_pass(make: Make, bridge: FakeBridge, origin: Path) -> None:
    publisher = make(tensors=tensors_of(origin))
    assert bridge.calls == []
    publisher.publish(1).result(WAIT_S)
    assert len(bridge.calls) == 1
    assert {t.name for t in publisher.layout.tensors} == values().keys()


def test_every_trouble_is_named_and_the_pass_is_read_to_its_end(
    make: Make, bridge: FakeBridge
) -> None:
    publisher = make()
    good = bridge.values
    bridge.values = [
        good[1], good[1], ("surprise", torch.zeros(1)), (NORM, torch.zeros(4)),
        (EMBEDDING, torch.zeros(6, 2)),
    ]  # fmt: skip
    handle = publisher.publish(1)
    with pytest.raises(LayoutError) as caught:
        handle.result(WAIT_S)
    for words in (
        "q_proj.weight is yielded twice",
        "surprise is new",
        "model.norm.weight is float32 [4], was float32 [3]",
        "model.embed_tokens.weight is float32 [6, 2], was bfloat16 [6, 2]",
        "model.layers.0.e_score_correction_bias is missing",
    ):
        assert words in str(caught.value)
    assert bridge.ends == 2
    bridge.values = good
    assert publisher.publish(2).result(WAIT_S).weight_version == 2


def test_an_exporter_that_raises_fails_the_version(make: Make, bridge: FakeBridge) -> None:
    publisher = make()
    broken = mock.Mock()
    broken.clone.side_effect = RuntimeError("a rank died")
    bridge.values[2] = (NORM, broken)
    with pytest.raises(RuntimeError, match="a rank died"):
        publisher.publish(1)
    bridge.values = list(values().items())
    assert publisher.publish(2).result(WAIT_S).weight_version == 2


def test_the_dry_pass_names_doubles_and_dtypes() -> None:
    items = [("a", torch.zeros(1)), ("a", torch.zeros(1)), ("b", torch.zeros(1).to(torch.cfloat))]
    with pytest.raises(LayoutError, match=r"a is yielded twice; tensor b has dtype .*complex64"):
        describe(lambda: items)
    with pytest.raises(LayoutError, match="the exporter yields no tensors"):
        bridge_layout([], Renaming(), rank=0, ranks=1, yields="all")


def test_the_head_of_a_tied_model(origin: Path) -> None:
    head, embedding, norm = (HfTensor(n, "BF16", (6, 2)) for n in (HEAD, EMBEDDING, NORM))
    renaming = tied_head(origin, [head, embedding])
    assert renaming.copies == {HEAD: EMBEDDING}

    def names(*tensors: HfTensor) -> list[tuple[str, str]]:
        layout = bridge_layout(tensors, renaming, rank=0, ranks=1, yields="all")
        return [(tensor.name, tensor.local_name) for tensor in layout.tensors]

    assert names(embedding, head) == [(EMBEDDING, EMBEDDING)]  # dropped: the original is there
    assert names(norm, head) == [(NORM, NORM), (EMBEDDING, HEAD)]  # redirected: it is not
    both = {HEAD: torch.zeros(6, 2), EMBEDDING: torch.zeros(6, 2)}
    save_file(both, origin / "model.safetensors")
    assert tied_head(origin, [head, embedding]).copies == {}  # the checkpoint has both
    (origin / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": False}}))
    assert tied_head(origin, [head, embedding]).copies == {}
    assert tied_head(origin / "nowhere", [head, embedding]).copies == {}


def test_a_redirected_head_has_its_bytes(
    make: Make, bridge: FakeBridge, server: MemoryServer
) -> None:
    bridge.values = [(HEAD, torch.randn(6, 2)), *bridge.values[1:]]
    publisher = make()
    handle = publisher.publish(1)
    handle.result(WAIT_S)
    found = bytes_of(server, publisher, handle.version)
    assert found[EMBEDDING] == raw(bridge.values[0][1])
    assert HEAD not in found


def test_a_renaming_that_makes_one_name_of_two_is_refused() -> None:
    tensors = [HfTensor(name, "F32", (1,)) for name in ("a", "b")]
    with pytest.raises(LayoutError, match="c is named twice"):
        bridge_layout(tensors, Renaming({"a": "c", "b": "c"}), rank=0, ranks=1, yields="all")


def test_ranks_share_what_all_of_them_yield() -> None:
    tensors = [HfTensor(f"t{n}", "F32", (n,)) for n in range(1, 9)]
    layouts = [
        bridge_layout(tensors, Renaming(), rank=rank, ranks=3, yields="all") for rank in range(3)
    ]
    for column in zip(*(layout.tensors for layout in layouts), strict=True):
        assert sum(tensor.owned for tensor in column) == 1
    assert [layout.owned_bytes for layout in layouts] == [52, 48, 44]
    own = bridge_layout(tensors[:2], Renaming(), rank=1, ranks=3, yields="own")
    assert all(tensor.owned for tensor in own.tensors)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0 of two; the other one never comes."""
    store = mock.Mock()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    c10d: Any = torch.distributed.distributed_c10d
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)


@pytest.mark.parametrize("policy", ["skip", "wait", "fail"])
def test_a_rank_without_a_slot_exports_all_the_same(
    policy: str, two_ranks: None, make: Make, bridge: FakeBridge, tmp_path: Path
) -> None:
    staging = StagingConfig(folder=tmp_path, slots=1, policy=policy, wait_timeout_s=0.0)  # pyright: ignore[reportArgumentType] - one of the three
    publisher = make(staging=staging)
    assert sum(t.owned for t in publisher.layout.tensors) < len(publisher.layout.tensors)
    publisher.publish(1)
    if policy == "fail":
        with pytest.raises(StagingFullError):
            publisher.publish(2)
    else:
        assert publisher.publish(2).done
    assert bridge.ends == 3  # the dry pass and two versions
    with pytest.raises(VersionOrderError):
        publisher.publish(2)
    assert bridge.ends == 3


def test_a_missing_bridge_says_what_to_install(origin: Path) -> None:
    with pytest.raises(MissingDependencyError, match="pip install megatron-bridge"):
        load_bridge(origin)


def test_a_bridge_is_loaded_and_its_config_patched(
    origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(rope_parameters={"rope_theta": 5.0})
    wrapper = SimpleNamespace(config=config)
    auto = mock.Mock()
    auto.from_hf_pretrained.return_value = SimpleNamespace(hf_pretrained=wrapper)
    module = ModuleType("megatron.bridge")
    module.AutoBridge = auto  # pyright: ignore[reportAttributeAccessIssue] - a stand-in
    monkeypatch.setitem(sys.modules, "megatron.bridge", module)
    bridge = load_bridge(origin, trust_remote_code=True)
    auto.from_hf_pretrained.assert_called_once_with(str(origin), trust_remote_code=True)
    assert bridge.hf_pretrained.config.rope_theta == 5.0
