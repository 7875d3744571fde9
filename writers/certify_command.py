"""`weightbus certify`: prove a mapping before a version starts, without weights or a trainer.

Held: layouts from files, or of a described parallel layout. Expected: the headers of the origin's
files, its index alone, or what transformers would save for a config.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, cast

from pydantic import ValidationError

from ..schemas.dtypes import ITEM_BYTES
from ..schemas.errors import ConfigError, LayoutError, OriginError
from ..schemas.hf_folder import CONFIG_FILE, SINGLE_FILE, read_config
from ..schemas.layout import Layout
from ..schemas.manifest import INDEX_FILE
from .certificate import certificate_of
from .certify_report import CertifyReport
from .conversion.catalogue import family_for, family_of
from .conversion.family import Family
from .described import Parallel, described_layouts
from .expectation import Expectation
from .expected_transformers import expectation_of_config
from .plan import groups_of
from .plan_survey import DTypePolicy, MissingPolicy, survey

Expect: TypeAlias = Literal["auto", "headers", "index", "transformers"]
"""Who says what a version must contain. `auto`: the best of what is there, in this order."""


def certify_checkpoint(
    model: Path,
    *,
    parallel: Parallel | None = None,
    layouts: Sequence[Path] = (),
    family: str = "",
    missing: MissingPolicy = "refuse",
    dtype: DTypePolicy = "source",
    expect: Expect = "auto",
) -> CertifyReport:
    """Certify what ranks hold, or would hold, against what a version must contain.

    Args:
        model: the origin checkpoint's folder, or a config.json alone.
        parallel: a described parallel layout; give this or `layouts`.
        layouts: files with the layouts of all producers, one each (Layout.to_bytes), or folders
            of such files (`*.json`).
        family: the family's name; empty to go by the config.
        missing: what to do about expected tensors that nobody produces.
        dtype: what to do about dtypes that differ from the origin's.
        expect: who says what a version must contain.

    Raises:
        ConfigError: neither or both of `parallel` and `layouts`, or sizes that cannot be.
        LayoutError: a file that holds no layout.
        OriginError: no config, no such expectation, or a config that lacks a number.
        UnknownFamilyError: nobody serves the model.
        MissingDependencyError: transformers is asked and not installed.
    """
    if (parallel is None) == (not layouts):
        raise ConfigError(
            "a certificate needs layout files or one described parallel layout",
            next_step="give layouts of a trainer, or a description such as tp=8,pp=16,ep=32",
        )
    config = _config(model)
    if parallel is None:
        held = _read_layouts(layouts)
        bound = family_for(held, config, family)
    else:
        bound = family_of(config, family)
        held = described_layouts(parallel, config, bound.name)
    expectation, source = _expectation(model, config, expect)
    return _report(held, expectation, bound, (missing, dtype), source)


def _report(
    held: Sequence[Layout],
    expectation: Expectation,
    family: Family,
    policies: tuple[MissingPolicy, DTypePolicy],
    source: str,
) -> CertifyReport:
    missing, dtype = policies
    found = survey(held, expectation, family, missing=missing, dtype=dtype)
    certificate = certificate_of(found, len(held), family.name, missing)
    sizes = {
        name: math.prod(target.shape) * ITEM_BYTES[target.dtype]
        for name, target in found.targets.items()
    }
    groups = groups_of(found, family) if certificate.ok else []
    weighed = {names[0]: sum(sizes[name] for name in names) for names in groups}
    largest = max(weighed, key=weighed.__getitem__, default="")
    return CertifyReport(
        certificate=certificate,
        expected_from=source,
        expected=len(expectation.tensors),
        groups=len(groups),
        largest_group=largest,
        largest_group_bytes=weighed.get(largest, 0),
        total_bytes=sum(sizes.values()),
    )


def _config(model: Path) -> Mapping[str, object]:
    if model.is_dir():
        return read_config(model)
    try:
        raw: object = json.loads(model.read_bytes())
    except (OSError, ValueError) as error:
        raise OriginError(
            f"cannot read a config: {error}",
            where={"file": model},
            next_step=f"give a checkpoint's folder, or its {CONFIG_FILE}",
        ) from error
    if not isinstance(raw, dict):
        raise OriginError("the config is not a JSON object", where={"file": model})
    return cast("dict[str, object]", raw)


def _expectation(
    model: Path, config: Mapping[str, object], expect: Expect
) -> tuple[Expectation, str]:
    source = expect
    if source == "auto":
        source = _best(model)
    if source == "headers":
        return Expectation.from_folder(model), source
    if source == "index":
        return Expectation.from_index(model), source
    return expectation_of_config(config), source


def _best(model: Path) -> Expect:
    index = model / INDEX_FILE
    if (model / SINGLE_FILE).is_file():
        return "headers"
    if not index.is_file():
        return "transformers"
    names = set(_weight_map(index).values())
    return "headers" if all((model / name).is_file() for name in names) else "index"


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        return cast("dict[str, str]", json.loads(index.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError):
        # Expectation.from_index says what is wrong with it.
        return {"": ""}


def _read_layouts(paths: Sequence[Path]) -> list[Layout]:
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])
    ]
    found: list[Layout] = []
    for file in files:
        try:
            found.append(Layout.from_bytes(file.read_bytes()))
        except (OSError, ValidationError) as error:
            raise LayoutError(
                f"no layout can be read: {error}",
                where={"file": file},
                next_step="give files as producers put them into the bucket, one layout each",
            ) from error
    if not found:
        raise LayoutError("no layout files", where={"paths": [str(path) for path in paths]})
    return found
