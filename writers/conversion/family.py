"""A family as data (`Table`) and bound to one model's config (`Family`)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ...schemas.errors import ConfigError
from .dims import Dims
from .kinds import Either, Geometry, Kind, Rename

# Numbers that are indices: a path component of their own, or behind a grouped expert's tensor.
_NUMBER = r"(?:0|[1-9]\d*)"
_INDEX = re.compile(rf"(?<=\.){_NUMBER}(?=\.|$)|(?:(?<=\.weight)|(?<=\.bias)){_NUMBER}$")
_FIELD = re.compile(r"\{([leim])\}")

MEGATRON_WRAPPER: Final = "language_model."
"""Multimodal Megatron models hold their language model under this name."""


class Home(NamedTuple):
    """Where an HF checkpoint keeps its language model: what stands for `model.` and `lm_head.`."""

    model: str
    head: str


PLAIN: Final = Home("model.", "lm_head.")
HOMES: Final = (
    PLAIN,
    Home("model.language_model.", "lm_head."),
    Home("language_model.model.", "language_model.lm_head."),
)
_EMBEDDING: Final = "embed_tokens.weight"


class Rule(NamedTuple):
    """Global Megatron names of one form, and what becomes of them.

    `pattern` is a whole name with {l} for the layer, {e} for the expert, {i} for the MTP layer,
    each counted over the whole model.
    """

    pattern: str
    kind: Kind


class Conversion(NamedTuple):
    """A rule applied to one whole tensor: `names` are the outputs' names, by slot.

    `rows`: how many rows further down than the geometry's moves say each output is filled; empty
    if at none (see Geometry.per_expert).
    """

    geometry: Geometry
    names: tuple[str, ...]
    rows: tuple[int, ...] = ()


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
        architectures: values of config.json's `architectures` that it serves where the model_type
            says nothing.
    """

    name: str
    model_types: tuple[str, ...]
    rules: tuple[Rule, ...]
    pairs: tuple[tuple[str, ...], ...] = ()
    unwritten: tuple[tuple[str, str], ...] = ()
    derived_head_dim: bool = False
    architectures: tuple[str, ...] = ()


class Family:
    """A table bound to one model's config. Conversions are pure; equal shapes share a geometry.

    Args:
        table: the family's rules.
        config: the model's config.json.
        home: where the origin checkpoint keeps the language model; see `fitted`.
    """

    def __init__(self, table: Table, config: Mapping[str, object], home: Home = PLAIN) -> None:
        self.table = table
        self.home = home
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
        name = name.removeprefix(MEGATRON_WRAPPER)
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
        names = tuple(
            self._at_home(output.template.format_map(values)) for output in geometry.outputs
        )
        rows = tuple(values["e"] * height for height in geometry.per_expert)
        return Conversion(geometry, names, rows)

    def fitted(self, origin: Collection[str]) -> Family:
        """The family for one origin checkpoint, by the names of its tensors.

        They say under which prefix the language model lies, and which form the rules take that
        have two (experts in one tensor, or one by one).
        """
        home = next((home for home in HOMES if home.model + _EMBEDDING in origin), PLAIN)
        rules = self.table.rules
        if any(isinstance(rule.kind, Either) for rule in rules):
            forms = {_INDEX.sub("#", name) for name in origin}
            rules = tuple(Rule(rule.pattern, _chosen(rule.kind, forms, home)) for rule in rules)
        elif home == self.home:
            return self
        return Family(replace(self.table, rules=rules), self.dims.config, home)

    def _at_home(self, name: str) -> str:
        return _moved(name, self.home)

    def nearest(self, name: str) -> list[str]:
        """The patterns of known names that look most like an unknown one, best first."""
        forms = {_FIELD.sub("#", rule.pattern): rule.pattern for rule in self.table.rules}
        wanted = _INDEX.sub("#", name.removeprefix(MEGATRON_WRAPPER))
        close = difflib.get_close_matches(wanted, list(forms), n=3, cutoff=0.5)
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
        if self.dims.tied and target == f"{self.home.head}weight":
            return "the head is tied to the embedding"
        for ending, reason in self.table.unwritten:
            if target.endswith(ending):
                return reason
        return None

    @property
    def indispensable(self) -> tuple[str, ...]:
        """Tensors outside of layers that every language model has, and every training changes."""
        names = (f"{self.home.model}{_EMBEDDING}", f"{self.home.model}norm.weight")
        return names if self.dims.tied else (*names, f"{self.home.head}weight")

    def identity(self) -> Family:
        """The family for producers that publish whole tensors under their HF names."""
        return _Identity(replace(self.table, rules=()), self.dims.config, self.home)


def _moved(name: str, home: Home) -> str:
    """The name under another home; names outside the language model (`mtp.`) stay."""
    if home is not PLAIN:
        for plain, own in zip(PLAIN, home, strict=True):
            if name.startswith(plain):
                return own + name.removeprefix(plain)
    return name


def _chosen(kind: Kind, forms: Collection[str], home: Home) -> Kind:
    if not isinstance(kind, Either):
        return kind
    marker = _moved(_FIELD.sub("#", kind.marker), home)
    return kind.then if marker in forms else kind.otherwise


class _Identity(Family):
    def fitted(self, origin: Collection[str]) -> Family:  # noqa: ARG002 - names pass as they are
        """The family itself."""
        return self

    def convert(self, name: str, shape: tuple[int, ...]) -> Conversion | None:
        """The tensor itself."""
        return Conversion(Rename(name).geometry(shape, self.dims), (name,))
