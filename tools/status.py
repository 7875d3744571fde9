"""The board for people (one screen) and for programs (JSON): the same facts."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..schemas.events import VersionKey
from .board import Board, EngineState, RunState, VersionState

_STYLES = {
    "publishing": "cyan",
    "converting": "cyan",
    "complete": "green",
    "aborted": "red",
    "retired": "dim",
}


def to_json(board: Board) -> dict[str, Any]:
    """The board as plain data; times in seconds, None where a stage has not been reached."""
    return {"runs": [_run_json(run) for _, run in sorted(board.runs.items())]}


def _run_json(run: RunState) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "attempt": None if run.attempt is None else run.attempt.attempt,
        "producers": None if run.attempt is None else run.attempt.producers,
        "layouts": len(run.layouts),
        "newest_complete": _number(run.newest_complete()),
        "versions": [_version_json(state) for _, state in sorted(run.versions.items())],
        "engines": [
            _engine_json(run, engine) for _, engine in sorted(run.engines.items())
        ],
    }  # fmt: skip


def _version_json(state: VersionState) -> dict[str, Any]:
    return {
        "attempt": state.key.attempt,
        "weight_version": state.key.weight_version,
        "stage": state.stage,
        "sealed": len(state.sealed),
        "producers": state.producers,
        "chunks": state.chunks,
        "nbytes": state.nbytes,
        "shards_persisted": len(state.shards_done),
        "shards": state.shards,
        "publish_s": _seconds(state.opened_at, state.sealed_at),
        "convert_s": _seconds(state.sealed_at, state.outcome_at),
        "waits_for": state.waits_for,
        "directory": getattr(state.outcome, "directory", None),
    }


def _engine_json(run: RunState, engine: EngineState) -> dict[str, Any]:
    return {
        "engine": engine.engine,
        "url": engine.url,
        "serving": _number(engine.serving),
        "behind": run.lag(engine),
        "last_outcome": engine.last.outcome,
        "error": engine.last.error,
        "message": engine.last.message,
        "timings_s": engine.last.timings_s,
    }


def _number(key: VersionKey | None) -> str | None:
    return None if key is None else f"{key.attempt}/v{key.weight_version:06d}"


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else round((end - start).total_seconds(), 3)


def render(board: Board, *, newest: int = 8) -> RenderableType:
    """One screen: per run its newest versions and its engines."""
    if not board.runs:
        return Text("The stream holds no run yet.")
    parts: list[RenderableType] = []
    for run in to_json(board)["runs"]:
        parts += [_title(run), _versions(run["versions"][-newest:]), _engines(run["engines"])]
    return Group(*parts)


def _title(run: dict[str, Any]) -> Text:
    return Text(
        f"run {run['run_id']}  attempt {run['attempt']}  "
        f"layouts {run['layouts']}/{run['producers']}  newest complete {run['newest_complete']}",
        style="bold",
    )


def _versions(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in (
        "version",
        "stage",
        "sealed",
        "size",
        "shards",
        "publish",
        "convert",
        "waits for",
    ):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            f"{row['attempt']}/v{row['weight_version']:06d}",
            Text(row["stage"], style=_STYLES[row["stage"]]),
            f"{row['sealed']}/{row['producers']}",
            f"{row['nbytes'] / 2**20:.1f} MiB",
            f"{row['shards_persisted']}/{row['shards'] or '?'}",
            _time(row["publish_s"]),
            _time(row["convert_s"]),
            row["waits_for"],
        )
    return table


def _engines(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("engine", "url", "serving", "behind", "last", "pause", "error"):
        table.add_column(column, overflow="fold")
    for row in rows:
        timings = row["timings_s"]
        pause = timings.get("PAUSE_TOTAL")
        table.add_row(
            row["engine"],
            row["url"],
            row["serving"] or "-",
            str(row["behind"]),
            row["last_outcome"],
            _time(pause),
            f"{row['error']} {row['message']}".strip(),
        )
    return table


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
