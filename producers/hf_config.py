"""Hugging Face configs as a Megatron bridge wants them: with `rope_theta` where it used to be.

transformers 5 moved `rope_theta` into `rope_parameters` (before that it could stand in
`rope_scaling`). A bridge still asks for `config.rope_theta` and falls back to 10000 without it: a
model that trains, and is wrong. Needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, TypeVar, cast

from ..schemas.errors import ConfigError

Config = TypeVar("Config")
_THETA = "rope_theta"
_ROPE_FIELDS = ("rope_parameters", "rope_scaling")


def patch_hf_config(config: Config) -> Config:
    """Fill in `rope_theta` from `rope_parameters` or `rope_scaling`, where it is missing.

    Looks at the config itself, at `.config` of a wrapper, and at the `text_config` of each. A value
    that is there is never changed. Rope parameters by layer type hold several values, of which none
    is *the* theta: they are left alone.

    Args:
        config: a transformers config, a mapping (a parsed config.json), any object with such
            attributes, or a wrapper that has the config as `.config`.

    Returns:
        the same object.

    Raises:
        ConfigError: rope_theta is missing and cannot be set.
    """
    wrapped = _read(config, "config")
    seen: set[int] = set()
    for outer in (config, wrapped):
        for found in (outer, _read(outer, "text_config")):
            if found is not None and id(found) not in seen:
                seen.add(id(found))
                _fill(found)
    return config


def _fill(config: object) -> None:
    if _read(config, _THETA) is not None:
        return
    for field in _ROPE_FIELDS:
        theta = _read(_read(config, field), _THETA)
        if isinstance(theta, int | float) and not isinstance(theta, bool):
            _write(config, theta)
            return


def _read(config: object, name: str) -> Any:
    if isinstance(config, Mapping):
        return cast("Mapping[str, Any]", config).get(name)
    return getattr(config, name, None)


def _write(config: object, theta: float) -> None:
    try:
        if isinstance(config, MutableMapping):
            cast("MutableMapping[str, Any]", config)[_THETA] = theta
        elif isinstance(config, Mapping):
            raise TypeError("a mapping that cannot be changed")
        else:
            setattr(config, _THETA, theta)
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"rope_theta {theta} cannot be set on a {type(config).__name__}: {error}",
            next_step="pass a config that can be changed, or set rope_theta yourself",
        ) from error
