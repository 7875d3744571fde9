"""What an agent does when nothing fails."""

import asyncio
from pathlib import Path

import pytest
from support.engine_fake import (
    CONTINUE,
    FLUSH,
    HEALTH,
    INFO,
    LOAD,
    PAUSE,
    FakeSglang,
    Step,
)
from support.engine_versions import directory_of, key
from support.engine_world import World, world
from weightbus.bus.events import publish_event
from weightbus.engine_agents.config import AgentConfig, PathRule
from weightbus.engine_agents.engine import PauseMode
from weightbus.engine_agents.states import AgentState
from weightbus.schemas.errors import ConfigError, ReaderReplacedError
from weightbus.schemas.events import VersionAborted, VersionRetired


async def test_a_version_goes_from_the_stream_to_the_engine(w: World, fake: FakeSglang):
    agent = w.start()
    await fake.arrived(INFO)
    event = w.make(0)
    await w.complete(event)
    report = await w.report_on(key(0), "serving")
    assert fake.label == fake.weights == agent.serving == "run-1/1/v000000"
    assert fake.model_path == str(directory_of(event))
    assert agent.state is AgentState.SERVING
    paths = fake.paths()
    first = paths.index(PAUSE)
    assert paths[first : first + 6] == [PAUSE, FLUSH, LOAD, INFO, CONTINUE, HEALTH]
    assert fake.loads() == [
        {
            "model_path": str(directory_of(event)),
            "weight_version": "run-1/1/v000000",
            "flush_cache": False,
        }
    ]
    assert report.engine == "engine-0"
    assert report.engine_url == fake.url
    assert report.engine_version == "0.5.23"
    assert report.state == "SERVING"
    assert report.serving_version == "run-1/1/v000000"
    assert list(report.timings_s) == [
        "STAGING", "STAGED", "PAUSED", "LOADING", "VERIFYING", "PAUSE_TOTAL",
    ]  # fmt: skip


async def test_everything_is_verified_before_the_pause(w: World, fake: FakeSglang):
    """The pause holds the engine's own calls only: none of ours comes between."""
    agent = w.start()
    gate = asyncio.Event()
    fake.script[PAUSE].append(Step(gate=gate))
    await w.new(1)
    await fake.arrived(PAUSE)
    assert agent.state is AgentState.PAUSED
    gate.set()
    report = await w.report_on(key(1), "serving")
    assert report.timings_s["PAUSE_TOTAL"] >= report.timings_s["LOADING"]


async def test_a_late_joiner_goes_straight_to_the_newest(w: World, fake: FakeSglang):
    for number in range(4):
        await w.new(number)
    w.start()
    reports = await w.reports(4)
    assert [(str(r.version), r.outcome) for r in reports] == [
        ("run-1/1/v000000", "skipped"),
        ("run-1/1/v000001", "skipped"),
        ("run-1/1/v000002", "skipped"),
        ("run-1/1/v000003", "serving"),
    ]
    assert reports[0].message == "superseded by run-1/1/v000003"
    assert len(fake.loads()) == 1


async def test_versions_that_come_during_a_change_are_skipped(w: World, fake: FakeSglang):
    gate = asyncio.Event()
    fake.script[LOAD].append(Step(gate=gate))
    w.start()
    await w.new(0)
    await fake.arrived(LOAD)
    for number in (1, 2, 3):
        await w.new(number)
    gate.set()
    await w.report_on(key(3), "serving")
    assert [body["weight_version"] for body in fake.loads()] == [
        "run-1/1/v000000",
        "run-1/1/v000003",
    ]
    outcomes = [(r.version.weight_version, r.outcome) for r in await w.reports(4)]
    assert outcomes == [(0, "serving"), (1, "skipped"), (2, "skipped"), (3, "serving")]


async def test_a_version_of_a_newer_attempt_wins_although_its_number_is_lower(
    w: World, fake: FakeSglang
):
    w.start()
    await w.new(7)
    await w.report_on(key(7), "serving")
    await w.new(0, attempt=2)
    await w.report_on(key(0, attempt=2), "serving")
    await w.new(9)  # a straggler of the old attempt
    await w.new(1, attempt=2)
    await w.report_on(key(1, attempt=2), "serving")
    assert [body["weight_version"] for body in fake.loads()] == [
        "run-1/1/v000007",
        "run-1/2/v000000",
        "run-1/2/v000001",
    ]


async def test_versions_of_other_runs_are_not_seen(w: World, fake: FakeSglang):
    w.start()
    await w.complete(w.make(9, run_id="run-2"))
    await w.new(0)
    await w.report_on(key(0), "serving")
    assert len(fake.loads()) == 1


async def test_an_engine_that_has_the_version_already_is_left_alone(w: World, fake: FakeSglang):
    fake.label = await w.new(5)
    w.start()
    report = await w.report_on(key(5), "serving")
    assert report.message == "the engine had it already"
    assert report.timings_s == {}
    assert not {PAUSE, LOAD} & set(fake.paths())


async def test_an_aborted_version_is_nothing(w: World, fake: FakeSglang):
    w.start()
    await publish_event(w.bus, VersionAborted(version=key(0), error="X", message="m", by="w"))
    await w.new(1)
    await w.report_on(key(1), "serving")
    assert len(await w.reports(1)) == 1


async def test_a_retired_version_is_not_started(w: World, fake: FakeSglang):
    event = w.make(3)
    await w.new(2)
    await w.complete(event)
    retired = VersionRetired(version=key(3), directory=event.directory, reason="keep 1")
    await publish_event(w.bus, retired)
    w.start()
    await w.report_on(key(2), "serving")
    assert [body["weight_version"] for body in fake.loads()] == ["run-1/1/v000002"]


async def test_an_engine_that_was_restarted_gets_its_version_back(w: World, fake: FakeSglang):
    w.start()
    label = await w.new(4)
    await w.report_on(key(4), "serving")
    await fake.restart()
    assert fake.label == "default"
    await fake.until(lambda: fake.label == label)
    assert len(fake.loads()) == 2


async def test_a_restarted_agent_has_nothing_to_do(w: World, fake: FakeSglang):
    first = w.start()
    await w.new(1)
    await w.report_on(key(1), "serving")
    await first.stop()
    second = w.start()
    await w.until(lambda: second.state is AgentState.SERVING)
    assert len(fake.loads()) == 1


async def test_the_second_agent_of_an_engine_ends_the_first(w: World, fake: FakeSglang):
    first = w.start()
    await w.new(1)
    await w.report_on(key(1), "serving")
    w.start()
    with pytest.raises(ReaderReplacedError):
        await w.task(first)


@pytest.mark.parametrize("mode", list(PauseMode))
@pytest.mark.parametrize("release", ["0.5.10.post1", "0.5.15.post1", "0.5.23"])
async def test_every_pause_mode_on_every_release_while_idle(
    tmp_path: Path, release: str, mode: PauseMode
):
    async with world(tmp_path, release) as w:
        w.change(pause_mode=mode)
        w.start()
        await w.new(1)
        report = await w.report_on(key(1), "serving")
        assert report.engine_version == release
        assert (PAUSE, {"mode": mode.value}) in w.fake.calls


@pytest.mark.parametrize(
    ("release", "mode", "outcome"),
    [
        ("0.5.10.post1", PauseMode.ABORT, "serving"),
        ("0.5.15.post1", PauseMode.ABORT, "serving"),
        ("0.5.23", PauseMode.ABORT, "serving"),
        ("0.5.10.post1", PauseMode.RETRACT, "failed"),
        ("0.5.15.post1", PauseMode.RETRACT, "failed"),
        ("0.5.23", PauseMode.RETRACT, "serving"),
        ("0.5.10.post1", PauseMode.IN_PLACE, "serving"),
        ("0.5.15.post1", PauseMode.IN_PLACE, "serving"),
        ("0.5.23", PauseMode.IN_PLACE, "serving"),
    ],
)
async def test_every_pause_mode_on_every_release_while_requests_run(
    tmp_path: Path, release: str, mode: PauseMode, outcome: str
):
    async with world(tmp_path, release) as w:
        w.change(pause_mode=mode)
        w.fake.running_requests = 2
        w.start()
        await w.new(1)
        report = await w.report_on(key(1), outcome)
        if outcome == "failed":
            assert "use pause mode abort" in report.message
            assert w.fake.loads() == []
            assert report.serving_version == "default"
        kept = report.message == "the cache of running requests was kept"
        assert kept == (mode is PauseMode.IN_PLACE)


async def test_folders_have_other_names_on_each_side(w: World, fake: FakeSglang):
    real = w.folder / "versions"
    w.change(
        writer_paths=[PathRule(there="/writers/out", here=str(real))],
        engine_paths=[PathRule(there=str(real / "run-1"), here="/engine")],
    )
    event = w.make(1)
    told = event.directory.replace(str(real), "/writers/out")
    await w.complete(event.model_copy(update={"directory": told}))
    w.start()
    await w.report_on(key(1), "serving")
    assert fake.model_path == "/engine/attempt_0001/weight_v000001"


def config(root: Path | None = None) -> AgentConfig:
    return AgentConfig(run_id="r", engine_name="e", versions_root=root)


def test_plain_paths_and_file_uris_are_directories():
    assert config().local_directory("/a/b") == Path("/a/b")
    assert config().local_directory("file:///a/b%20c") == Path("/a/b c")


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("s3://bucket/v", "cannot read versions from"),
        ("file://elsewhere/v", "cannot read versions from"),
        ("relative/v", "must be an absolute path"),
        ("/versions/../../etc", "must be an absolute path"),
        ("/other/v", "is outside of /versions"),
    ],
)
def test_directories_that_are_refused(uri: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        config(Path("/versions")).local_directory(uri)
