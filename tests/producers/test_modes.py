"""The mode option: which publisher it makes, and the options of a training script."""

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from support.staging_publishers import memory_thread
from weightbus.bus.memory import MemoryServer
from weightbus.producers import modes
from weightbus.producers.bridge import BridgePublisher
from weightbus.producers.modes import (
    add_weightbus_arguments,
    make_publisher,
    publisher_from_arguments,
)
from weightbus.producers.staging import StagingConfig
from weightbus.schemas.errors import ConfigError, MissingDependencyError

EXPORTED = [("a.weight", torch.zeros(2, 3))]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_weightbus_arguments(parser)
    return parser.parse_args(words)


def test_bridge_mode_publishes_what_the_exporter_yields(tmp_path: Path) -> None:
    thread = memory_thread(MemoryServer())
    with make_publisher(
        "bridge", [], None, "/origin", "run", thread,
        export=lambda: EXPORTED, staging=StagingConfig(folder=tmp_path),
    ) as made:  # fmt: skip
        assert isinstance(made, BridgePublisher)
        assert [tensor.name for tensor in made.layout.tensors] == ["a.weight"]
        made.close(0.0)
    thread.close()


def test_bridge_mode_without_a_bridge_says_what_to_install() -> None:
    with pytest.raises(MissingDependencyError, match="pip install megatron-bridge"):
        make_publisher("bridge", [], None, "/origin", "run", "nats://127.0.0.1:1")


def test_raw_mode_makes_megatrons_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock()
    module = ModuleType("weightbus.producers.megatron")
    module.MegatronPublisher = made  # pyright: ignore[reportAttributeAccessIssue] - a stand-in
    monkeypatch.setitem(sys.modules, module.__name__, module)
    words = ["--weightbus-url", "nats://n", "--weightbus-run-id", "r", "--hf-checkpoint", "/o"]
    options = ["--weightbus-staging-slots", "3", "--weightbus-family", "qwen3"]
    publisher_from_arguments(parse(*words, *options), ["chunk"], "config")
    (arguments, keywords) = made.call_args
    assert arguments == (["chunk"], "config", "/o", "r", "nats://n")
    assert keywords["staging"] == StagingConfig(slots=3)
    assert keywords["family"] == "qwen3"
    assert keywords["attempt"] is None


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("both", {}, "unknown mode 'both'.*raw or bridge"),
        ("raw", {"export": lambda: EXPORTED}, "raw mode has no exporter"),
        ("bridge", {"family": "qwen3"}, "the family 'qwen3' would not be used"),
    ],
)
def test_what_does_not_go_together_is_refused(
    mode: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_publisher(mode, [], None, "/origin", "run", "nats://127.0.0.1:1", **options)


def test_missing_options_are_named() -> None:
    assert parse().megatron_to_hf_mode == "raw"
    with pytest.raises(
        ConfigError, match="needs --weightbus-url, --weightbus-run-id, --hf-checkpoint"
    ):
        publisher_from_arguments(parse(), [], None)


def test_options_that_the_script_has_stay_its_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megatron-to-hf-mode", choices=["raw", "bridge"], default="bridge")
    parser.add_argument("--hf-checkpoint", default="/theirs")
    add_weightbus_arguments(parser)
    arguments = parser.parse_args([])
    assert (arguments.megatron_to_hf_mode, arguments.hf_checkpoint) == ("bridge", "/theirs")
    assert modes.MODES == ("raw", "bridge")
