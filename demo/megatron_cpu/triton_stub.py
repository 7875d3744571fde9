"""Enough of triton to import Megatron-core 0.19 on a CPU; its kernels never run."""

from __future__ import annotations

import sys
import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_NAMES = (
    "triton",
    "triton.language",
    "triton.language.extra",
    "triton.language.extra.libdevice",
    "triton.runtime",
)


class _Anything:
    def __getattr__(self, _: str) -> _Anything:
        return _Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A decorator gives its function back; a factory gives a decorator.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything()

    def __getitem__(self, _: object) -> _Anything:
        return _Anything()


@contextmanager
def stubbed_triton() -> Generator[None]:
    """Import Megatron inside; afterwards triton is as absent as before."""
    modules: dict[str, Any] = {}
    for name in _NAMES:
        module: Any = types.ModuleType(name)
        module.__path__ = []
        module.__version__ = "0"
        module.__getattr__ = _attribute
        modules[name] = module
    modules["triton"].language = modules["triton.language"]
    modules["triton"].runtime = modules["triton.runtime"]
    modules["triton"].jit = _Anything()
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
            del sys.modules[name]


def _attribute(name: str) -> _Anything:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()
