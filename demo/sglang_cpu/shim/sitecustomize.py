"""Runs in every process of the server: lets DeepSeek-style MLA run on the torch_native backend.

SGLang chooses how to compute MLA by a registry of attention backends that leaves torch_native out;
the absorbed path works with it. The registry's module is completed right after its import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_REGISTRY = "sglang.srt.models.deepseek_common.attention_backend_handler"


class _Completing(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        names: Any = module

        def absorbed(attention: object, batch: object) -> object:
            del attention, batch
            return names.AttnForwardMethod.MLA

        names.AttentionBackendRegistry.register("torch_native", absorbed)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Completing(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
