"""The JSON Schemas of everything that crosses a process, generated from the models.

They are checked in under docs/schemas/ (a test compares), so that a change of a model shows in
review as a change of the wire format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel

from .events import EVENT_TYPES
from .layout import Layout
from .manifest import Manifest, ShardTable

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def kind_of(event: type[BaseModel]) -> str:
    """The `kind` of an event class."""
    return cast("str", event.model_fields["kind"].default)


def documents() -> Mapping[str, type[BaseModel]]:
    """File stem -> model, for every model that crosses a process."""
    events = {kind_of(event): event for event in EVENT_TYPES}
    return {**events, "layout": Layout, "manifest": Manifest, "shard-table": ShardTable}


def json_schemas() -> dict[str, dict[str, Any]]:
    """File stem -> JSON Schema (draft 2020-12)."""
    return {
        stem: {"$schema": DIALECT, **model.model_json_schema()}
        for stem, model in documents().items()
    }
