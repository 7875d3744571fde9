"""A plain torch module, and the copy of torch tensors into the arena."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.staging_publishers import PATIENT, end, memory_thread, of, published, read_chunk
from weightbus.bus.memory import MemoryServer
from weightbus.producers.staging import StagingConfig
from weightbus.producers.torch_module import TorchModulePublisher, read_module
from weightbus.schemas.errors import LayoutError, OriginError
from weightbus.schemas.events import AttemptOpened, ChunkReady

WAIT_S = 10.0


class Tiny(torch.nn.Module):
    """A tied head, a buffer, and a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.mix = torch.nn.Parameter(torch.randn(5, 3).t())
        self.head = torch.nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


@pytest.fixture
def model() -> Tiny:
    return Tiny()


@pytest.fixture
def origin(tmp_path: Path, model: Tiny) -> Path:
    folder = tmp_path / "origin"
    folder.mkdir()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    del state["head.weight"]
    save_file(state, folder / "model.safetensors")
    return folder


def test_the_current_values_are_published(model: Tiny, origin: Path, tmp_path: Path) -> None:
    server = MemoryServer()
    thread = memory_thread(server)
    staging = StagingConfig(folder=tmp_path)
    with TorchModulePublisher(model, origin, "run", thread, staging=staging, times=PATIENT) as made:
        for version in (1, 2):
            with torch.no_grad():
                model.mix.add_(version)
                model.embed.weight = torch.nn.Parameter(model.embed.weight * 2)
            expected = {
                name: tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
                for name, tensor in model.state_dict().items()
                if name not in {"head.weight", "norm.num_batches_tracked"}
            }
            handle = made.publish(version)
            handle.result(WAIT_S)
            found: dict[str, bytes] = {}
            for chunk in of(published(server), ChunkReady):
                if chunk.version == handle.version:
                    for index, data in read_chunk(chunk).items():
                        found[made.layout.tensors[index].name] = data
            tracked = found.pop("norm.num_batches_tracked")
            assert tracked == bytes(8)
            assert found == expected
            end(server, handle.version)
            handle.outcome(WAIT_S)
    thread.close()
    assert of(published(server), AttemptOpened)[0].naming == "hf"
    assert [path for path in tmp_path.iterdir() if path.name.startswith("weightbus")] == []


def test_a_tied_tensor_is_held_once_unless_the_checkpoint_has_both(
    model: Tiny, origin: Path
) -> None:
    names = [tensor.name for tensor in read_module(model, origin)[0].tensors]
    assert "head.weight" not in names
    both = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file({n: t.contiguous() for n, t in both.items()}, origin / "model.safetensors")
    names = [tensor.name for tensor in read_module(model, origin)[0].tensors]
    assert "head.weight" in names


def test_a_state_dict_is_a_model_too(model: Tiny, origin: Path) -> None:
    layout, getters = read_module(dict(model.state_dict()), origin)
    assert layout.tensors[0].name == "mix"
    assert torch.equal(getters[0](), model.mix)


def test_a_model_that_changed_its_shape_fails_the_handle(
    model: Tiny, origin: Path, tmp_path: Path
) -> None:
    server = MemoryServer()
    thread = memory_thread(server)
    staging = StagingConfig(folder=tmp_path)
    with TorchModulePublisher(model, origin, "run", thread, staging=staging, times=PATIENT) as made:
        model.mix = torch.nn.Parameter(torch.zeros(2, 2))
        with pytest.raises(LayoutError, match=r"tensor mix has become \(2, 2\), the layout says"):
            made.publish(1).result(WAIT_S)
    thread.close()


def test_a_dtype_that_no_file_can_hold_is_refused(origin: Path) -> None:
    with pytest.raises(LayoutError, match=r"tensor z has dtype torch\.complex64"):
        read_module({"z": torch.zeros(2, dtype=torch.complex64)}, origin)


def test_a_model_without_tensors_is_refused(origin: Path) -> None:
    with pytest.raises(LayoutError, match="no tensors"):
        read_module({}, origin)


def test_the_checkpoint_must_exist(model: Tiny, tmp_path: Path) -> None:
    with pytest.raises(OriginError):
        read_module(model, tmp_path)
