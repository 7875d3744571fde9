"""What an agent does when the engine or a version fails. (Each test ends with World.check_innocent:
the engine is not paused, was never loaded outside of a pause, and never given a broken shard.)"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engine_fake import (
    CONTINUE,
    FLUSH,
    HEALTH,
    INFO,
    LOAD,
    PAUSE,
    SERVER,
    FakeSglang,
    Step,
)
from support.engine_versions import directory_of, flip_byte, key, truncate
from support.engine_world import World
from weightbus.engine_agents.engine import EngineDeadlines
from weightbus.engine_agents.states import AgentState
from weightbus.schemas.events import VersionComplete
from weightbus.schemas.manifest import INDEX_FILE, MANIFEST_FILE

SHARD = "model-00001-of-00002.safetensors"
SHORT = EngineDeadlines(
    info_s=2, pause_s=0.1, flush_s=0.1, load_s=0.1, continue_s=0.1, health_s=0.1
)
BAD: dict[str, Step] = {
    "500": Step(reply=(500, "Internal Server Error")),
    "success=false": Step(reply=(400, {"success": False, "message": "shape mismatch"})),
    "hang": Step(hang=True),
    "drop": Step(drop=True),
}


async def serving(w: World, weight_version: int = 0) -> str:
    """An engine that serves a good version; returns its label."""
    w.start()
    label = await w.new(weight_version)
    await w.report_on(key(weight_version), "serving")
    return label


def break_truncate(event: VersionComplete) -> None:
    truncate(directory_of(event) / SHARD)


def break_flip(event: VersionComplete) -> None:
    flip_byte(directory_of(event) / SHARD, 500)


def break_missing_shard(event: VersionComplete) -> None:
    (directory_of(event) / SHARD).unlink()


def break_index(event: VersionComplete) -> None:
    path = directory_of(event) / INDEX_FILE
    path.write_text(path.read_text().replace(SHARD, "absent.safetensors"))


def break_manifest_missing(event: VersionComplete) -> None:
    (directory_of(event) / MANIFEST_FILE).unlink()


def break_manifest_of_another_run(event: VersionComplete) -> None:
    path = directory_of(event) / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["version"]["run_id"] = "other"
    path.write_text(json.dumps(manifest))


def break_directory(event: VersionComplete) -> None:
    directory_of(event).rename(directory_of(event).with_name("elsewhere"))


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (break_truncate, "ShardCorruptError", "bytes, the manifest says"),
        (break_flip, "ShardCorruptError", "have digest xxh3-128:"),
        (break_missing_shard, "ManifestError", f"file {SHARD}: the file is missing"),
        (break_index, "ManifestError", "places it in absent.safetensors"),
        (break_manifest_missing, "ManifestError", "the manifest cannot be read"),
        (break_manifest_of_another_run, "ManifestError", "of version other/1/v000001"),
        (break_directory, "ManifestError", "does not exist on this machine"),
    ],
)
async def test_a_bad_version_is_never_handed_to_the_engine(
    w: World, fake: FakeSglang, damage: Callable[[VersionComplete], None], error: str, text: str
):
    label = await serving(w)
    calls = len(fake.calls)
    event = w.make(1)
    damage(event)
    await w.complete(event)
    report = await w.report_on(key(1), "failed")
    assert (report.error, report.state) == (error, "RESUMED")
    assert text in report.message
    assert report.message.endswith("This version is not tried again.")
    assert report.serving_version == fake.label == fake.weights == label
    assert not {PAUSE, FLUSH, LOAD} & {path for path, _ in fake.calls[calls:]}
    await w.new(2)
    await w.report_on(key(2), "serving")


async def test_a_late_joiner_takes_the_newest_good_version(w: World, fake: FakeSglang):
    label = await w.new(1)
    event = w.make(2)
    break_truncate(event)
    await w.complete(event)
    w.start()
    await w.report_on(key(2), "failed")
    await w.report_on(key(1), "serving")
    assert [body["weight_version"] for body in fake.loads()] == [label]


@pytest.mark.parametrize("where", [PAUSE, FLUSH])
@pytest.mark.parametrize("kind", BAD)
async def test_a_failure_before_the_load_changes_nothing_and_is_tried_again(
    w: World, fake: FakeSglang, where: str, kind: str
):
    w.deadlines = SHORT
    label = await serving(w)
    if where == FLUSH and kind == "success=false":
        fake.always[FLUSH] = Step(reply=(400, "busy"))
    else:
        fake.script[where].append(BAD[kind])
    await w.new(1)
    report = await w.report_on(key(1), "failed")
    assert report.state == "RESUMED"
    assert report.serving_version == label
    fake.always.clear()
    await w.report_on(key(1), "serving")
    assert len(fake.loads()) == 2


@pytest.mark.parametrize("kind", ["500", "success=false"])
async def test_a_refused_load_is_undone_with_the_last_good_version(
    w: World, fake: FakeSglang, kind: str
):
    good = await serving(w)
    bad = Step(reply=BAD[kind].reply, corrupts=True)
    fake.script[LOAD].extend([bad, Step(), bad, Step()])
    await w.new(1)
    first = await w.report_on(key(1), "failed")
    assert (first.error, first.state) == ("EngineRefusedError", "RESUMED")
    assert first.serving_version == good
    await w.until(lambda: len(fake.loads()) == 5 and fake.paused is None)
    assert fake.weights == fake.label == good
    one = "run-1/1/v000001"
    assert [body["weight_version"] for body in fake.loads()] == [good, one, good, one, good]
    await w.new(2)
    await w.report_on(key(2), "serving")
    last = [r for r in await w.reports(4) if r.version == key(1)][-1]
    assert "Tried 2 times; the next version is tried again." in last.message


async def test_the_first_version_is_undone_with_what_the_engine_was_started_with(
    w: World, fake: FakeSglang
):
    fake.script[LOAD].append(Step(reply=(500, "no"), corrupts=True))
    w.start()
    await w.new(0)
    report = await w.report_on(key(0), "failed")
    assert report.serving_version == "default"
    second = fake.loads()[1]
    assert (second["model_path"], second["weight_version"]) == ("/models/origin", "default")
    await w.report_on(key(0), "serving")


async def test_a_load_that_cannot_be_undone_fences_the_engine(w: World, fake: FakeSglang):
    await serving(w)
    fake.always[LOAD] = Step(reply=(500, "no"), corrupts=True)
    await w.new(1)
    report = await w.report_on(key(1), "failed")
    assert (report.state, report.serving_version) == ("FENCED", "")
    assert fake.weights == "mixed"
    fake.always.clear()
    await fake.until(lambda: fake.weights != "mixed")
    assert fake.weights == fake.label


async def test_a_fenced_engine_is_brought_back_to_the_last_good_version(w: World, fake: FakeSglang):
    good = await serving(w)
    no = Step(reply=(500, "no"), corrupts=True)
    fake.script[LOAD].extend([no] * 4)  # two tries, neither can be undone
    await w.new(1)
    await fake.until(lambda: fake.weights == good and fake.paused is None and not fake.script[LOAD])
    assert fake.label == good


async def test_a_last_good_version_that_was_damaged_meanwhile_is_not_loaded_again(
    w: World, fake: FakeSglang
):
    w.start()
    event = w.make(0)
    await w.complete(event)
    await w.report_on(key(0), "serving")
    break_truncate(event)
    fake.script[LOAD].append(Step(reply=(500, "no"), corrupts=True))
    await w.new(1)
    report = await w.report_on(key(1), "failed")
    assert report.state == "FENCED"
    await w.report_on(key(1), "serving")


async def test_a_label_that_a_failed_way_back_left_behind_is_not_believed(
    w: World, fake: FakeSglang
):
    agent = w.start()
    await w.new(0)
    await w.report_on(key(0), "serving")
    gate = asyncio.Event()
    fake.script[LOAD].extend([Step(gate=gate), Step(mute_label=True)])
    await w.new(1)
    await fake.arrived(LOAD, 2)
    # The new version is loaded, the agent does not learn of it, and the way back keeps its label.
    fake.script[INFO].append(Step(reply=(500, "no")))
    gate.set()
    report = await w.report_on(key(1), "failed")
    assert (report.state, report.serving_version) == ("FENCED", "")
    await w.report_on(key(1), "serving")
    assert len(fake.loads()) == 4
    assert fake.weights == fake.label == agent.serving == "run-1/1/v000001"


async def test_an_unchanged_label_is_a_failure(w: World, fake: FakeSglang):
    good = await serving(w)
    fake.script[LOAD].append(Step(mute_label=True))
    await w.new(1)
    report = await w.report_on(key(1), "failed")
    assert report.error == "EngineLabelError"
    assert "the engine loaded run-1/1/v000001 and names 'run-1/1/v000000'" in report.message
    assert (report.state, report.serving_version) == ("RESUMED", good)
    await w.report_on(key(1), "serving")
    assert fake.weights == fake.label == "run-1/1/v000001"


async def test_a_load_that_never_answers(w: World, fake: FakeSglang):
    w.deadlines = SHORT
    await serving(w)
    fake.script[LOAD].append(Step(hang=True))
    await w.new(1)
    report = await w.report_on(key(1), "failed")
    assert (report.error, report.state, report.serving_version) == (
        "EngineTimeoutError",
        "FENCED",
        "",
    )
    assert f"did not answer {LOAD} within 0.1 s" in report.message
    await w.report_on(key(1), "serving")


async def test_a_load_that_ends_after_its_deadline_is_noticed(w: World, fake: FakeSglang):
    w.deadlines = SHORT
    await serving(w)
    gate = asyncio.Event()
    fake.script[LOAD].append(Step(gate=gate))
    fake.always[INFO] = Step(gate=gate)
    await w.new(1)
    await w.report_on(key(1), "failed")
    gate.set()
    report = await w.report_on(key(1), "serving")
    assert report.serving_version == fake.label == fake.weights


async def test_an_engine_that_dies_while_loading_and_is_started_again(w: World, fake: FakeSglang):
    await serving(w)
    fake.script[LOAD].append(Step(die=True))
    await w.new(1)
    report = await w.report_on(key(1), "failed")
    assert (report.error, report.state, report.serving_version) == (
        "EngineUnreachableError", "FENCED", "",
    )  # fmt: skip
    await fake.restart()
    await w.report_on(key(1), "serving")


async def test_a_version_that_kills_the_engine_is_given_up(w: World, fake: FakeSglang):
    good = await serving(w)
    await w.new(1)
    fake.script[LOAD].extend([Step(die=True), Step(die=True)])
    for times in (1, 2):
        await w.until(lambda times=times: len(fake.loads()) > times and not fake.alive)
        await fake.restart()
    await fake.until(lambda: fake.label == good)
    loaded = [body["weight_version"] for body in fake.loads()]
    assert loaded.count("run-1/1/v000001") == 2
    assert loaded[-1] == good


async def test_an_engine_that_is_away_is_reported_once_and_waited_for(w: World, fake: FakeSglang):
    await fake.close()
    agent = w.start()
    await w.new(0)
    report = await w.report_on(key(0), "failed")
    assert (report.error, report.state) == ("EngineUnreachableError", "FENCED")
    await w.until(lambda: agent.numbers()["fenced"] == 1)
    await fake.restart()
    await w.report_on(key(0), "serving")
    assert [r.outcome for r in await w.reports(2)] == ["failed", "serving"]
    assert agent.numbers()["versions_failed_total"] == 1


async def test_an_engine_that_goes_away_after_a_change_is_fenced_until_it_is_back(
    w: World, fake: FakeSglang
):
    agent = w.start()
    await w.new(0)
    await w.report_on(key(0), "serving")
    fake.always = dict.fromkeys((INFO, SERVER), Step(drop=True))
    await w.report_on(key(0), "failed")
    await w.until(lambda: agent.state is AgentState.FENCED)
    fake.always.clear()
    await w.until(lambda: agent.state is AgentState.SERVING)
    assert len(fake.loads()) == 1


@pytest.mark.parametrize("kind", BAD)
async def test_continuing_is_tried_until_it_works(w: World, fake: FakeSglang, kind: str):
    w.deadlines = SHORT
    w.change(continue_within_s=5.0)
    w.start()
    await fake.arrived(CONTINUE)
    fake.script[CONTINUE].extend([BAD[kind]] * 2)
    await w.new(1)
    report = await w.report_on(key(1), "serving")
    assert fake.paths().count(CONTINUE) == 4
    assert report.timings_s["PAUSE_TOTAL"] > 0


async def test_an_engine_that_does_not_continue_is_fenced_and_continued_later(
    w: World, fake: FakeSglang
):
    w.change(continue_within_s=0.05)
    w.start()
    await fake.arrived(CONTINUE)
    fake.always[CONTINUE] = Step(reply=(500, "no"))
    await w.new(1)
    report = await w.report_on(key(1), "failed")
    assert (report.error, report.state, report.serving_version) == (
        "EngineTimeoutError",
        "FENCED",
        "",
    )
    assert "the engine did not continue within 0.05 s" in report.message
    fake.always.clear()
    report = await w.report_on(key(1), "serving")
    assert len(fake.loads()) == 1


async def test_an_engine_that_does_not_generate_does_not_serve(w: World, fake: FakeSglang):
    fake.script[HEALTH].append(Step(reply=(503, "")))
    w.start()
    await w.new(1)
    report = await w.report_on(key(1), "failed")
    assert (report.error, report.state) == ("EngineRefusedError", "FENCED")
    await w.report_on(key(1), "serving")
    assert len(fake.loads()) == 1


async def test_a_release_that_is_too_old_is_named(w: World, fake: FakeSglang):
    fake.release = "0.4.1"
    w.start()
    await w.new(1)
    report = await w.report_on(key(1), "failed")
    assert report.error == "ConfigError"
    assert "SGLang 0.4.1 is older than 0.5.10" in report.message
    assert fake.loads() == []


async def test_a_directory_outside_of_the_root_is_refused(
    w: World, fake: FakeSglang, tmp_path: Path
):
    w.change(versions_root=tmp_path / "allowed")
    w.start()
    await w.new(1)
    report = await w.report_on(key(1), "failed")
    assert report.error == "ConfigError"
    assert f"is outside of {tmp_path / 'allowed'}" in report.message
    assert fake.loads() == []
