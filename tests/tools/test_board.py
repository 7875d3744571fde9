"""The board: every stage, what is waited for, who lags; the table and the JSON agree."""

from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from rich.console import Console
from support.events import DIGEST, small_events
from weightbus.bus.events import Received
from weightbus.bus.interface import Message
from weightbus.bus.subjects import subject_of
from weightbus.schemas.codec import encode
from weightbus.schemas.events import (
    AnyEvent,
    AttemptOpened,
    EngineReport,
    ProducerSealed,
    ShardPersisted,
    VersionAborted,
    VersionComplete,
    VersionKey,
    VersionOpened,
    VersionRetired,
)
from weightbus.tools.board import Board
from weightbus.tools.status import render, to_json

START = datetime(2026, 1, 1, tzinfo=UTC)


def _key(version: int, attempt: int = 1) -> VersionKey:
    return VersionKey(run_id="run", attempt=attempt, weight_version=version)


def _board(*events: AnyEvent) -> Board:
    board = Board()
    for number, event in enumerate(events):
        message = Message(
            subject_of(event), encode(event), number + 1, START + timedelta(seconds=number)
        )
        board.apply(Received(event, message))
    return board


def _sealed(version: int, rank: int) -> ProducerSealed:
    return ProducerSealed(version=_key(version), rank=rank, chunks=1, tensors=1, nbytes=1)


def _shard(version: int, shard: int) -> ShardPersisted:
    return ShardPersisted(
        version=_key(version),
        plan_digest=DIGEST,
        writer=0,
        writers=1,
        shard=shard,
        shards=3,
        file="f",
        nbytes=1,
        digest=DIGEST,
        table_digest=DIGEST,
    )


def _complete(version: int, attempt: int = 1) -> VersionComplete:
    return VersionComplete(
        version=_key(version, attempt), directory="/v", manifest_digest=DIGEST, shards=3, nbytes=9
    )


def _report(version: int, outcome: str, engine: str = "e0", attempt: int = 1) -> EngineReport:
    return EngineReport.model_validate(
        {
            "version": _key(version, attempt),
            "engine": engine,
            "engine_url": "http://e",
            "outcome": outcome,
            "state": "SERVING",
            "error": "" if outcome == "serving" else "EngineRefusedError",
            "timings_s": {"PAUSED": 0.25, "LOADING": 0.5, "PAUSE_TOTAL": 0.81},
        }
    )


OPENED = VersionOpened(version=_key(7), producers=3)
ABORTED = VersionAborted(version=_key(7), error="CoverageError", message="a gap", by="writer-0")
_STAGES: list[tuple[list[AnyEvent], str, str]] = [
    ([OPENED], "publishing", "seals of ranks 0, 1, 2"),
    ([_sealed(7, 1), OPENED], "publishing", "seals of ranks 0, 2"),
    ([_sealed(7, 1)], "publishing", "its opening"),
    (
        [OPENED, *(_sealed(7, k) for k in range(3))],
        "converting",
        "the first shard: is a writer running?",
    ),
    ([OPENED, *(_sealed(7, k) for k in range(3)), _shard(7, 1)], "converting", "shards 0, 2"),
    ([OPENED, _complete(7)], "complete", ""),
    (
        [OPENED, _complete(7), VersionRetired(version=_key(7), directory="/v", reason="r")],
        "retired",
        "",
    ),
    ([OPENED, ABORTED], "aborted", "CoverageError: a gap (by writer-0)"),
]


@pytest.mark.parametrize(("events", "stage", "waits_for"), _STAGES)
def test_stage_and_what_is_waited_for(events: list[AnyEvent], stage: str, waits_for: str) -> None:
    (row,) = to_json(_board(*events))["runs"][0]["versions"]
    assert (row["stage"], row["waits_for"]) == (stage, waits_for)


def test_doubled_events_count_once_where_a_number_names_them() -> None:
    (row,) = to_json(_board(OPENED, _sealed(7, 0), _sealed(7, 0), _shard(7, 2), _shard(7, 2)))[
        "runs"
    ][0]["versions"]
    assert (row["sealed"], row["shards_persisted"], row["shards"]) == (1, 1, 3)


def test_times_are_those_of_the_stream() -> None:
    events = [OPENED, *(_sealed(7, k) for k in range(3)), _shard(7, 0), _complete(7)]
    (row,) = to_json(_board(*events))["runs"][0]["versions"]
    assert (row["publish_s"], row["convert_s"]) == (3.0, 2.0)


def test_an_engine_that_failed_still_serves_what_it_served_and_lags() -> None:
    board = _board(
        _complete(6),
        _complete(7),
        _report(6, "serving"),
        _report(7, "failed"),
        _report(7, "serving", "e1"),
        _complete(1, attempt=2),
        _report(1, "serving", "e2", attempt=2),
    )
    run = to_json(board)["runs"][0]
    rows = {row["engine"]: row for row in run["engines"]}
    assert run["newest_complete"] == "2/v000001"
    assert (rows["e0"]["serving"], rows["e0"]["behind"]) == ("1/v000006", 2)
    assert rows["e0"]["error"] == "EngineRefusedError"
    assert (rows["e1"]["serving"], rows["e1"]["behind"]) == ("1/v000007", 1)
    assert (rows["e2"]["serving"], rows["e2"]["behind"]) == ("2/v000001", 0)


def test_the_newest_attempt_counts_whatever_the_order() -> None:
    def opened(attempt: int) -> AttemptOpened:
        return AttemptOpened(
            run_id="run", attempt=attempt, nonce="n", producers=attempt, naming="hf", origin="/o"
        )

    run = to_json(_board(opened(2), opened(1)))["runs"][0]
    assert (run["attempt"], run["producers"]) == (2, 2)


def test_the_screen_shows_the_facts_of_the_json() -> None:
    board = _board(*small_events(), _complete(6), OPENED, _report(6, "serving"), ABORTED)
    screen = StringIO()
    Console(file=screen, width=200).print(render(board))
    for run in to_json(board)["runs"]:
        assert f"run {run['run_id']}" in screen.getvalue()
        for row in run["versions"]:
            assert f"{row['attempt']}/v{row['weight_version']:06d}" in screen.getvalue()
            assert row["waits_for"] in screen.getvalue()
        for row in run["engines"]:
            assert row["engine"] in screen.getvalue()
    assert "0.81 s" in screen.getvalue()


def test_an_empty_stream_is_said_to_be_empty() -> None:
    screen = StringIO()
    Console(file=screen, width=80).print(render(Board()))
    assert "no run yet" in screen.getvalue()
