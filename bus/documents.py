"""The wire format as documents: JSON Schemas and an AsyncAPI 3.0 document, from the models.

`python -m weightbus.bus.documents docs/schemas` writes them; a test compares them with what is
checked in.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from .. import __version__
from ..schemas.events import (
    EVENT_TYPES,
    MAX_EVENT_BYTES,
    AnyEvent,
    AttemptOpened,
    ChunkReady,
    EngineReport,
    LayoutPublished,
    ProducerSealed,
    ShardPersisted,
    VersionAborted,
    VersionComplete,
    VersionOpened,
    VersionRetired,
)
from ..schemas.json_schemas import json_schemas, kind_of
from .subjects import EVENTS_ROOT, REPORTS_ROOT

_ATTEMPT = f"{EVENTS_ROOT}.{{run_id}}.{{attempt}}.-"
_VERSION = f"{EVENTS_ROOT}.{{run_id}}.{{attempt}}.{{weight_version}}"

CHANNELS: dict[str, tuple[str, tuple[type[AnyEvent], ...], str]] = {
    "attempt": (f"{_ATTEMPT}.attempt", (AttemptOpened,), "producers"),
    "layout": (f"{_ATTEMPT}.layout.{{rank}}", (LayoutPublished,), "producers"),
    "opened": (f"{_VERSION}.opened", (VersionOpened,), "producers"),
    "chunk": (f"{_VERSION}.chunk.{{rank}}.{{chunk}}", (ChunkReady,), "producers"),
    "sealed": (f"{_VERSION}.sealed.{{rank}}", (ProducerSealed,), "producers"),
    "shard": (f"{_VERSION}.shard.{{shard}}", (ShardPersisted,), "writers"),
    "outcome": (f"{_VERSION}.outcome", (VersionComplete, VersionAborted), "writers"),
    "retired": (f"{_VERSION}.retired", (VersionRetired,), "writers"),
    "report": (
        f"{REPORTS_ROOT}.{{run_id}}.{{engine}}.{{attempt}}.{{weight_version}}",
        (EngineReport,),
        "agents",
    ),
}
"""Channel -> (address, its messages, the role that sends them; a producer may abort too)."""

_PARAMETERS = {
    "run_id": "the training run",
    "attempt": "number of the (re)start of the trainer, from 1",
    "weight_version": "the weight version, growing inside an attempt",
    "rank": "the producer's number in the run's world",
    "chunk": "number of the chunk of that producer, from 0",
    "shard": "number of the output file, from 0",
    "engine": "name of the engine that the agent cares for",
}


def asyncapi() -> dict[str, Any]:
    """The AsyncAPI 3.0 document of both streams."""
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for name, (address, events, role) in CHANNELS.items():
        kinds = [kind_of(event) for event in events]
        channels[name] = {
            "address": address,
            "messages": {k: {"$ref": f"#/components/messages/{k}"} for k in kinds},
            "parameters": {
                parameter: {"description": _PARAMETERS[parameter]}
                for parameter in re.findall(r"{(\w+)}", address)
            },
        }
        operations[f"send-{name}"] = {
            "action": "send",
            "title": f"sent by {role}",
            "channel": {"$ref": f"#/channels/{name}"},
            "messages": [{"$ref": f"#/channels/{name}/messages/{k}"} for k in kinds],
        }
    messages = {
        kind_of(event): {
            "name": kind_of(event),
            "summary": (event.__doc__ or "").strip().splitlines()[0],
            "contentType": "application/msgpack",
            "payload": {"$ref": f"./{kind_of(event)}.json"},
        }
        for event in EVENT_TYPES
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "weightbus",
            "version": __version__,
            "license": {"name": "Apache-2.0"},
            "description": (
                "Events of weight versions on NATS JetStream, msgpack maps of at most "
                f"{MAX_EVENT_BYTES} bytes. Each subject of the event stream holds one message."
            ),
        },
        "defaultContentType": "application/msgpack",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages},
    }


def render() -> dict[str, str]:
    """File name -> text of every document."""
    files = {f"{stem}.json": schema for stem, schema in json_schemas().items()}
    files["asyncapi.json"] = asyncapi()
    return {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}


def write(folder: Path) -> None:
    """Write every document into a folder, and remove those that no model has any more."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = render()
    for stale in set(folder.glob("*.json")) - {folder / name for name in texts}:
        stale.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
