"""patch_hf_config on real transformers configs, mappings, plain objects and wrappers."""

from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import transformers
from weightbus.producers.hf_config import patch_hf_config
from weightbus.schemas.errors import ConfigError

YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
}


def qwen3(theta: float = 1_000_000.0) -> Any:
    return transformers.Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": theta})


def vision() -> Any:
    config: Any = transformers.Qwen3VLConfig()
    config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 5e6}
    return config


def test_transformers_5_keeps_theta_elsewhere() -> None:
    # If a later transformers has the attribute again, this page of facts has to be read again.
    assert not hasattr(qwen3(), "rope_theta")


def test_a_real_config_is_filled_and_is_the_same_object() -> None:
    config = qwen3()
    assert patch_hf_config(config) is config
    assert config.rope_theta == 1_000_000.0
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1_000_000.0}


def test_yarn_of_deepseek() -> None:
    config: Any = transformers.DeepseekV3Config(
        rope_parameters=YARN, max_position_embeddings=163_840
    )
    assert patch_hf_config(config) is config
    assert config.rope_theta == 10_000.0
    assert config.rope_parameters["factor"] == 40.0


def test_a_text_config_is_filled_and_its_parent_is_not() -> None:
    config = vision()
    assert patch_hf_config(config) is config
    assert config.text_config.rope_theta == 5e6
    assert not hasattr(config, "rope_theta")


def test_a_wrapper_its_config_and_that_ones_text_config() -> None:
    wrapper = SimpleNamespace(config=vision())
    assert patch_hf_config(wrapper) is wrapper
    assert wrapper.config.text_config.rope_theta == 5e6
    assert not hasattr(wrapper, "rope_theta")
    flat = SimpleNamespace(config=qwen3(), text_config=qwen3(7.0))
    patch_hf_config(flat)
    assert (flat.config.rope_theta, flat.text_config.rope_theta) == (1_000_000.0, 7.0)


def test_a_lazy_wrapper_has_its_config_read_once() -> None:
    class Lazy:
        """Loads its config at the first look, as bridges' wrappers do."""

        def __init__(self) -> None:
            self.loads = 0
            self._config: Any = None

        @property
        def config(self) -> Any:
            if self._config is None:
                self.loads += 1
                self._config = qwen3()
            return self._config

    lazy = Lazy()
    patch_hf_config(lazy)
    assert lazy.loads == 1
    assert lazy.config.rope_theta == 1_000_000.0


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_either_field_serves_and_a_value_that_is_there_stays(field: str) -> None:
    plain = SimpleNamespace(**{field: {"rope_theta": 5.0}})
    assert patch_hf_config(plain).rope_theta == 5.0
    kept = SimpleNamespace(**{field: {"rope_theta": 5.0}}, rope_theta=6.0)
    assert patch_hf_config(kept).rope_theta == 6.0
    absent = SimpleNamespace(**{field: {"rope_theta": 5.0}}, rope_theta=None)
    assert patch_hf_config(absent).rope_theta == 5.0


def test_rope_parameters_come_first() -> None:
    both = SimpleNamespace(rope_parameters={"rope_theta": 1.0}, rope_scaling={"rope_theta": 2.0})
    assert patch_hf_config(both).rope_theta == 1.0
    older = SimpleNamespace(rope_parameters=None, rope_scaling={"rope_theta": 2.0})
    assert patch_hf_config(older).rope_theta == 2.0


def test_mappings() -> None:
    parsed: dict[str, Any] = {
        "rope_scaling": {"rope_theta": 3},
        "text_config": {"rope_parameters": {"rope_theta": 4}},
    }
    assert patch_hf_config(parsed) is parsed
    assert parsed["rope_theta"] == 3
    assert parsed["text_config"]["rope_theta"] == 4


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rope_parameters": None},
        {"rope_scaling": {"factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        {"rope_parameters": {"rope_theta": True}},
    ],
)
def test_nothing_is_guessed(config: dict[str, Any]) -> None:
    before = dict(config)
    assert patch_hf_config(config) == before


def test_patching_twice_changes_nothing() -> None:
    config = qwen3()
    before = patch_hf_config(config).to_dict()
    assert patch_hf_config(config).to_dict() == before


def test_a_config_that_cannot_be_changed_is_named() -> None:
    @dataclass(frozen=True)
    class Fixed:
        rope_parameters: Any

    with pytest.raises(ConfigError, match=r"rope_theta 5\.0 cannot be set on a Fixed"):
        patch_hf_config(Fixed({"rope_theta": 5.0}))
    with pytest.raises(ConfigError, match="a mapping that cannot be changed"):
        patch_hf_config(MappingProxyType({"rope_parameters": {"rope_theta": 5.0}}))
