from collections.abc import AsyncGenerator

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
from weightbus.engine_agents.engine import EngineDeadlines, PauseMode
from weightbus.engine_agents.sglang import SglangEngine
from weightbus.engine_agents.sglang_releases import RELEASES, FlushRule, release_of
from weightbus.schemas.errors import (
    ConfigError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)

QUICK = EngineDeadlines(info_s=5, pause_s=5, flush_s=0.2, load_s=5, continue_s=5, health_s=5)
SHORT = EngineDeadlines(
    info_s=0.05, pause_s=0.05, flush_s=0.05, load_s=0.05, continue_s=0.05, health_s=0.05
)


@pytest.fixture
async def fake() -> AsyncGenerator[FakeSglang]:
    async with FakeSglang() as server:
        yield server


@pytest.fixture
async def engine(fake: FakeSglang) -> AsyncGenerator[SglangEngine]:
    engine = SglangEngine(fake.url + "/", deadlines=QUICK)
    yield engine
    await engine.close()


async def test_the_whole_cycle(fake: FakeSglang, engine: SglangEngine):
    info = await engine.probe()
    assert (info.release, info.model_path, info.label) == ("0.5.23", "/models/origin", "default")
    await engine.pause(PauseMode.RETRACT)
    assert await engine.flush(PauseMode.RETRACT)
    await engine.load_from_disk("/nowhere", "run/1/v000001")
    assert await engine.label() == "run/1/v000001"
    await engine.continue_()
    await engine.health()
    assert fake.calls[2:] == [
        (PAUSE, {"mode": "retract"}),
        (FLUSH, {}),
        (
            LOAD,
            {"model_path": "/nowhere", "weight_version": "run/1/v000001", "flush_cache": False},
        ),
        (INFO, {}),
        (CONTINUE, {}),
        (HEALTH, {}),
    ]
    assert fake.sins == []


async def test_older_names_of_the_info_paths_are_tried(fake: FakeSglang, engine: SglangEngine):
    missing = Step(reply=(404, {"detail": "Not Found"}))
    fake.always = {
        INFO: missing,
        SERVER: missing,
        "/get_model_info": Step(reply=(200, {"model_path": "/m", "weight_version": "x"})),
        "/get_server_info": Step(reply=(200, {"version": "0.5.10.post1"})),
    }
    info = await engine.probe()
    assert (info.release, info.model_path, info.label) == ("0.5.10.post1", "/m", "x")


@pytest.mark.parametrize(
    ("version", "row"),
    [
        ("0.5.10", 0), ("0.5.10.post1", 0), ("0.5.14", 0), ("0.5.15.post1", 1), ("0.5.22", 1),
        ("0.5.23", 2), ("0.6.0rc1", 2), ("1.0.0", 2), ("", 2), ("0.0.0.dev1", 2), ("main", 2),
    ],
)  # fmt: skip
def test_releases_fall_into_the_row_before_them(version: str, row: int):
    assert release_of(version) is RELEASES[row]


def test_a_release_that_is_too_old_is_refused():
    with pytest.raises(ConfigError, match=r"SGLang 0\.4\.9 is older than 0\.5\.10"):
        release_of("0.4.9")


def test_every_row_has_a_rule_for_every_mode():
    for row in RELEASES:
        assert set(row.flush_rules) == set(PauseMode)
        assert row.flush_rules[PauseMode.ABORT] is FlushRule.BUSY


@pytest.mark.parametrize("release", ["0.5.10.post1", "0.5.15.post1", "0.5.23"])
async def test_an_in_place_pause_keeps_the_cache_of_running_requests(release: str):
    async with FakeSglang(release) as fake:
        engine = SglangEngine(fake.url, deadlines=QUICK)
        await engine.probe()
        await engine.pause(PauseMode.IN_PLACE)
        assert await engine.flush(PauseMode.IN_PLACE)
        fake.running_requests = 1
        assert not await engine.flush(PauseMode.IN_PLACE)
        await engine.close()


@pytest.mark.parametrize("release", ["0.5.10.post1", "0.5.15.post1"])
async def test_old_releases_cannot_flush_while_retracted_requests_wait(release: str):
    async with FakeSglang(release) as fake:
        engine = SglangEngine(fake.url, deadlines=QUICK)
        await engine.probe()
        fake.running_requests = 1
        await engine.pause(PauseMode.RETRACT)
        with pytest.raises(EngineRefusedError, match="in a pause of mode retract") as caught:
            await engine.flush(PauseMode.RETRACT)
        assert "use pause mode abort" in caught.value.next_step
        assert fake.paths().count(FLUSH) == 1
        await engine.close()


async def test_a_new_release_flushes_while_retracted_requests_wait(
    fake: FakeSglang, engine: SglangEngine
):
    await engine.probe()
    fake.running_requests = 1
    await engine.pause(PauseMode.RETRACT)
    assert await engine.flush(PauseMode.RETRACT)


async def test_a_flush_is_asked_again_while_aborted_requests_end(
    fake: FakeSglang, engine: SglangEngine
):
    fake.script[FLUSH].extend([Step(reply=(400, "busy"))] * 2)
    assert await engine.flush(PauseMode.ABORT)
    assert fake.paths() == [FLUSH] * 3


async def test_a_flush_that_stays_refused_is_an_error(fake: FakeSglang, engine: SglangEngine):
    fake.always[FLUSH] = Step(reply=(400, "Flush cache failed"))
    with pytest.raises(EngineRefusedError, match="Flush cache failed"):
        await engine.flush(PauseMode.ABORT)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ((500, "Internal Server Error"), "answered with an error: 'Internal Server Error'"),
        ((400, {"success": False, "message": "no such layer"}), "no such layer"),
        ((200, {"success": False, "message": "shape"}), "answered success=false: .*shape"),
        ((200, {"message": "?"}), "did not load the version"),
        ((200, "fine"), "did not load the version"),
    ],
)
async def test_a_load_counts_only_with_success_true(
    fake: FakeSglang, engine: SglangEngine, reply: tuple[int, dict[str, object] | str], text: str
):
    fake.script[LOAD].append(Step(reply=reply))
    with pytest.raises(EngineRefusedError, match=text) as caught:
        await engine.load_from_disk("/v", "label")
    assert caught.value.where["path"] == LOAD
    assert caught.value.where["status"] == reply[0]


@pytest.mark.parametrize("step", [Step(drop=True), Step(die=True)])
async def test_a_broken_connection(fake: FakeSglang, engine: SglangEngine, step: Step):
    fake.script[LOAD].append(step)
    with pytest.raises(EngineUnreachableError, match=f"no answer to {LOAD}"):
        await engine.load_from_disk("/v", "label")


async def test_nobody_listens(fake: FakeSglang, engine: SglangEngine):
    await fake.close()
    with pytest.raises(EngineUnreachableError, match="is the engine running"):
        await engine.probe()


async def test_every_call_has_a_deadline(fake: FakeSglang):
    engine = SglangEngine(fake.url, deadlines=SHORT)
    fake.always = dict.fromkeys(
        (PAUSE, CONTINUE, FLUSH, LOAD, INFO, SERVER, HEALTH), Step(hang=True)
    )
    for call in (
        engine.probe(),
        engine.label(),
        engine.pause(PauseMode.ABORT),
        engine.flush(PauseMode.ABORT),
        engine.load_from_disk("/v", "label"),
        engine.continue_(),
        engine.health(),
    ):
        with pytest.raises(EngineTimeoutError, match="did not answer /"):
            await call
    await engine.close()


async def test_the_key_is_sent(fake: FakeSglang):
    engine = SglangEngine(fake.url, deadlines=QUICK, api_key="s3cret")
    await engine.label()
    assert fake.headers["authorization"] == "Bearer s3cret"
    await engine.close()
