"""Modules that can be imported and looked into, and that fail only when something is called.

SGLang imports names of packages that have no CPU build at module level and calls them on other
paths only. An absent name is a class: it can be a base, an annotation, an argument default.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AbsentType(type):
    """The metaclass of absent names."""

    def __getattr__(cls, name: str) -> AbsentType:
        """Names inside of an absent name are absent too."""
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args: object, **keywords: object) -> object:
        """Absent names cannot be called.

        Raises:
            NotImplementedError: always.
        """
        del args, keywords
        raise NotImplementedError(f"{cls.__module__}.{cls.__qualname__} has no CPU stand-in")


@functools.cache
def absent(module: str, name: str) -> AbsentType:
    """The stand-in for a name of a module: the same object each time."""
    return AbsentType(name, (), {"__module__": module})


class _Finder(MetaPathFinder, Loader):
    """Finds every module below a package that is not there as a file."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for names below the package."""
        del path, target
        return ModuleSpec(fullname, self, is_package=True) if self._below(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its absent names."""
        module.__getattr__ = functools.partial(_lookup, module.__name__)

    def _below(self, name: str) -> bool:
        return name.startswith(self._prefix)


def _lookup(module: str, name: str) -> AbsentType:
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(module, name)


def stand_in(module: ModuleType) -> None:
    """Let a package answer for every name and sub-module that it does not define."""
    module.__getattr__ = functools.partial(_lookup, module.__name__)
    sys.meta_path.append(_Finder(module.__name__))
