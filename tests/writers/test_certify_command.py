"""`weightbus certify` as a function: where held and expected come from, and its two reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.conversion_tiny import hf_config, save_origin
from weightbus.schemas.errors import ConfigError, LayoutError, MissingDependencyError, OriginError
from weightbus.writers import expected_transformers
from weightbus.writers.certify_command import certify_checkpoint
from weightbus.writers.described import Parallel, described_layouts
from weightbus.writers.expectation import Expectation

TP2 = Parallel.parse("tp=2,pp=2,vocab_multiple=4,dtype=F32")


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    save_origin(hf_config("qwen3"), folder)
    return folder


def test_headers_are_asked_first(origin: Path) -> None:
    report = certify_checkpoint(origin, parallel=TP2)
    assert report.ok
    assert (report.expected_from, report.expected) == ("headers", 63)
    assert report.certificate.notes
    raw = json.loads(report.to_json())
    assert raw["ok"] is True
    assert raw["differences"] == []
    assert (raw["missing_policy"], raw["copied_tensors"], raw["producers"]) == ("refuse", 0, 4)
    assert raw["total_bytes"] == report.total_bytes > 0
    assert raw["groups"] == report.groups > 0
    table = report.table()
    assert "verdict" in table
    assert "63 of 63 expected (by headers)" in table


def test_an_index_alone_knows_names(origin: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((origin / "config.json").read_bytes())
    by_headers = certify_checkpoint(origin, parallel=TP2)
    assert by_headers.expected == 63
    weight_map = dict.fromkeys(Expectation.from_folder(origin).tensors, "absent.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    report = certify_checkpoint(tmp_path, parallel=TP2)
    assert (report.ok, report.expected_from) == (True, "index")
    del weight_map["model.norm.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused = certify_checkpoint(tmp_path, parallel=TP2)
    assert not refused.ok
    assert "extra HF tensor: model.norm.weight" in refused.table()
    assert json.loads(refused.to_json())["differences"][0]["kind"] == "extra HF tensor"


def test_a_config_alone_asks_transformers(origin: Path) -> None:
    report = certify_checkpoint(origin / "config.json", parallel=TP2)
    assert (report.ok, report.expected_from, report.expected) == (True, "transformers", 63)
    other = certify_checkpoint(origin, parallel=TP2, expect="transformers")
    assert other.to_json() == report.to_json()


def test_layouts_come_from_files_too(origin: Path, tmp_path: Path) -> None:
    config = json.loads((origin / "config.json").read_text())
    for layout in described_layouts(TP2, config, "qwen3"):
        (tmp_path / f"rank{layout.producer.rank}.json").write_bytes(layout.to_bytes())
    assert certify_checkpoint(origin, layouts=[tmp_path]).ok
    files = sorted(tmp_path.glob("*.json"))
    refused = certify_checkpoint(origin, layouts=files[:-1])
    assert not refused.ok
    assert refused.groups == 0
    assert "missing" in refused.table()


@pytest.mark.parametrize("policy", ["copy", "omit"])
def test_what_nobody_trains_goes_by_policy(
    policy: Literal["copy", "omit"], origin: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((origin / "config.json").read_bytes())
    (tmp_path / "model-1.safetensors").write_bytes((origin / "model.safetensors").read_bytes())
    save_file({"visual.blocks.0.w": np.ones((2, 3), np.float32)}, tmp_path / "model-2.safetensors")
    weight_map = dict.fromkeys(Expectation.from_folder(origin).tensors, "model-1.safetensors")
    weight_map["visual.blocks.0.w"] = "model-2.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert not certify_checkpoint(tmp_path, parallel=TP2).ok
    report = certify_checkpoint(tmp_path, parallel=TP2, missing=policy)
    assert report.ok
    assert report.certificate.copied == (1 if policy == "copy" else 0)
    assert "visual.blocks.0.w" in report.table()


def test_one_source_of_layouts_is_needed(origin: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layout files or one described"):
        certify_checkpoint(origin)
    with pytest.raises(ConfigError, match="layout files or one described"):
        certify_checkpoint(origin, parallel=TP2, layouts=[tmp_path])


def test_files_that_are_no_layouts(origin: Path, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="no layout files"):
        certify_checkpoint(origin, layouts=[tmp_path])
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(LayoutError, match="no layout can be read"):
        certify_checkpoint(origin, layouts=[tmp_path])


def test_configs_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(OriginError, match="cannot read a config"):
        certify_checkpoint(file, parallel=TP2)
    file.write_text("[1]")
    with pytest.raises(OriginError, match="not a JSON object"):
        certify_checkpoint(file, parallel=TP2)


def test_a_broken_index_is_told(origin: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((origin / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(OriginError, match="cannot be read"):
        certify_checkpoint(tmp_path, parallel=TP2)


def test_models_that_transformers_does_not_know(origin: Path, tmp_path: Path) -> None:
    config = json.loads((origin / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OriginError, match="cannot build the model of this config") as caught:
        certify_checkpoint(tmp_path, parallel=TP2)
    assert "give the origin checkpoint's folder or its index" in str(caught.value)


def test_without_transformers_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(expected_transformers.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match="pip install") as caught:
        expected_transformers.expectation_of_config({"model_type": "qwen3"})
    assert "origin checkpoint's folder" in str(caught.value)
