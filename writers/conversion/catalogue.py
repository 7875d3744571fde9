"""Which families there are: every module `family_*` of this package holds one `TABLE`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import cast

from ...schemas.errors import ConfigError, CoverageError, UnknownFamilyError
from ...schemas.layout import Layout
from .dims import text_config
from .family import Family, Table

_PREFIX = "family_"


@cache
def tables() -> Mapping[str, Table]:
    """All tables by name.

    Raises:
        ConfigError: a module without a table, or two tables for one name or model_type.
    """
    package = importlib.import_module(__package__ if __package__ is not None else "")
    found: dict[str, Table] = {}
    served: dict[str, str] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith(_PREFIX):
            continue
        table: object = getattr(
            importlib.import_module(f"{package.__name__}.{module.name}"), "TABLE", None
        )
        if not isinstance(table, Table) or table.name in found:
            raise ConfigError(f"{module.name} holds no TABLE of its own name")
        for model_type in table.model_types:
            if model_type in served:
                raise ConfigError(
                    f"families {served[model_type]} and {table.name} both serve {model_type}"
                )
            served[model_type] = table.name
        found[table.name] = table
    return MappingProxyType(found)


def family_of(config: Mapping[str, object], name: str = "") -> Family:
    """The family of a model, bound to its config.

    Args:
        config: the origin checkpoint's config.json.
        name: a family's name; empty to go by the config's `model_type`, or its `text_config`'s.

    Raises:
        UnknownFamilyError: nobody serves it; the message lists all families.
    """
    known = tables()
    if name:
        table = known.get(name)
        asked = f"family {name!r}"
    else:
        model_type = config.get("model_type")
        inner = text_config(config).get("model_type")
        table = _serving(known, model_type) or _serving(known, inner) or _building(known, config)
        asked = f"model_type {model_type!r}"
    if table is None:
        raise UnknownFamilyError(
            f"no conversion family for {asked}; known: {', '.join(sorted(known))}",
            next_step="name a family whose algebra is the same, or add its table",
        )
    return Family(table, config)


def _serving(known: Mapping[str, Table], model_type: object) -> Table | None:
    return next((table for table in known.values() if model_type in table.model_types), None)


def _building(known: Mapping[str, Table], config: Mapping[str, object]) -> Table | None:
    given = config.get("architectures")
    wanted = cast("list[object]", given) if isinstance(given, list) else []
    return next(
        (t for t in known.values() if any(name in wanted for name in t.architectures)), None
    )


def family_for(layouts: Sequence[Layout], config: Mapping[str, object], name: str = "") -> Family:
    """The family for what these producers publish: HF names of any model pass as they are.

    Raises:
        UnknownFamilyError: Megatron names of a model that no family serves.
        CoverageError: some producers speak Megatron names, others HF names.
    """
    namings = {layout.naming for layout in layouts}
    if len(namings) > 1:
        raise CoverageError(
            "some producers publish Megatron names, others Hugging Face names",
            where={layout.naming: layout.producer.rank for layout in layouts},
            next_step="start all producers of a run in the same mode",
        )
    if namings != {"hf"}:
        return family_of(config, name)
    try:
        return family_of(config, name).identity()
    except UnknownFamilyError:
        if name:
            raise
        return Family(Table("hf", (), ()), config).identity()
