"""A family as data (`Table`) and bound to one model's config (`Family`)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...schemas.errors import ConfigError
from .dims import Dims
from .kinds import Geometry, Kind, Rename

# Numbers that are indices: a path component of their own, or behind a grouped expert's tensor.
_NUMBER = r"(?:0|[1-9]\d*)"
_INDEX = re.compile(rf"(?<=\.){_NUMBER}(?=\.|$)|(?:(?<=\.weight)|(?<=\.bias)){_NUMBER}$")
_FIELD = re.compile(r"\{([lei])\}")


class Rule(NamedTuple):
    """Global Megatron names of one form, and what becomes of them.

    `pattern` is a whole name with {l} for the layer, {e} for the expert, {i} for the MTP layer,
    each counted over the whole model.
    """

    pattern: str
    kind: Kind


class Conversion(NamedTuple):
    """A rule applied to one whole tensor: `names` are the outputs' names, by slot."""

    geometry: Geometry
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """One family of models.

    Attributes:
        name: as transformers calls it.
        model_types: the values of config.json's `model_type` that it serves.
        rules: every Megatron name that it knows, in both namings.
        pairs: endings of HF names that must travel together; one tuple per pair, the beginning of
            the names is the same.
        unwritten: endings of HF names that a checkpoint may hold and no version needs, each with
            its reason.
        derived_head_dim: see Dims.
    """

    name: str
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    pairs: tuple[tuple[str, ...], ...] = ()
    unwritten: tuple[tuple[str, str], ...] = ()
    derived_head_dim: bool = False


class Family:
    """A table bound to one model's config. Conversions are pure; equal shapes share a geometry."""

    def __init__(self, table: Table, config: Mapping[str, object]) -> None:
        self.table = table
        self.dims = Dims(config, table.derived_head_dim)
        self._rules: dict[str, tuple[int, Kind, tuple[str, ...]]] = {}
        for number, rule in enumerate(table.rules):
            form = _FIELD.sub("#", rule.pattern)
            if form in self._rules:
                raise ConfigError(
                    f"two rules of family {table.name} know {rule.pattern}",
                    next_step="remove one from the table",
                )
            self._rules[form] = (number, rule.kind, tuple(_FIELD.findall(rule.pattern)))
        self._geometries: dict[tuple[int, tuple[int, ...]], Geometry] = {}

    @property
    def name(self) -> str:
        """The family's name."""
        return self.table.name

    def convert(self, name: str, shape: tuple[int, ...]) -> Conversion | None:
        """What becomes of the whole tensor `name`; None if no rule knows it.

        Raises:
            ConversionError: the shape does not fit the rule.
            OriginError: the config lacks a number that the rule needs.
        """
        found = self._rules.get(_INDEX.sub("#", name))
        if found is None:
            return None
        number, kind, fields = found
        geometry = self._geometries.get((number, shape))
        if geometry is None:
            geometry = self._geometries[number, shape] = kind.geometry(shape, self.dims)
        values = dict(zip(fields, map(int, _INDEX.findall(name)), strict=True))
        if "i" in values:
            values["m"] = self.dims.layers + values["i"]
        return Conversion(
            geometry, tuple(output.template.format_map(values) for output in geometry.outputs)
        )

    def nearest(self, name: str) -> list[str]:
        """The patterns of known names that look most like an unknown one, best first."""
        forms = {_FIELD.sub("#", rule.pattern): rule.pattern for rule in self.table.rules}
        close = difflib.get_close_matches(_INDEX.sub("#", name), list(forms), n=3, cutoff=0.5)
        return [forms[form] for form in close]

    def pair_of(self, target: str) -> tuple[int, str] | None:
        """A key that all HF tensors of one declared pair share, or None."""
        for number, endings in enumerate(self.table.pairs):
            for ending in endings:
                if target.endswith(ending):
                    return number, target.removesuffix(ending)
        return None

    def unwritten_reason(self, target: str) -> str | None:
        """Why an HF tensor of the origin checkpoint is left out of every version, or None."""
        if self.dims.tied and target == "lm_head.weight":
            return "the head is tied to the embedding"
        for ending, reason in self.table.unwritten:
            if target.endswith(ending):
                return reason
        return None

    def identity(self) -> Family:
        """The family for producers that publish whole tensors under their HF names."""
        return _Identity(replace(self.table, rules=()), self.dims.config)


class _Identity(Family):
    def convert(self, name: str, shape: tuple[int, ...]) -> Conversion | None:
        """The tensor itself."""
        return Conversion(Rename(name).geometry(shape, self.dims), (name,))
