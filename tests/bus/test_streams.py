from __future__ import annotations

import asyncio
import json
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.bus_servers import eventually, fast_config
from support.bus_servers import nats_bus as nats_bus_on
from weightbus.bus.errors import RefusedError
from weightbus.bus.nats_bus import NatsBus
from weightbus.bus.server import EmbeddedServer
from weightbus.bus.server_binary import checked_server
from weightbus.bus.streams import (
    EVENT_STREAM,
    REPORT_STREAM,
    TUNABLE,
    StreamLimits,
    declared,
    diff,
    stream_of,
)
from weightbus.schemas.errors import BusUnavailableError, ConfigError, StreamMismatchError


def test_the_declaration_keeps_one_message_per_subject_for_ever() -> None:
    events, reports, blobs = declared()
    request = events.request()
    assert request["subjects"] == ["wb.>"]
    assert request["discard"] == "new"
    assert request["discard_new_per_subject"] is True
    assert request["max_msgs_per_subject"] == 1
    assert request["max_age"] == 0
    assert request["deny_delete"] is True
    assert request["storage"] == "file"
    assert reports.request()["discard"] == "old"
    assert reports.request()["max_age"] == 30 * 24 * 3600 * 10**9
    assert blobs.request()["allow_rollup_hdrs"] is True
    for spec in (events, reports, blobs):
        assert spec.max_bytes > 0
        assert json.loads(json.dumps(spec.request())) == spec.request()


def test_limits_reach_the_declaration() -> None:
    limits = StreamLimits(replicas=3, events_max_bytes=10, reports_max_bytes=20, blobs_max_bytes=30)
    assert [spec.max_bytes for spec in declared(limits)] == [10, 20, 30]
    assert {spec.replicas for spec in declared(limits)} == {3}
    for wrong in ({"replicas": 2}, {"events_max_bytes": 0}, {"reports_max_age_s": 0}):
        with pytest.raises(ConfigError):
            StreamLimits(**wrong)


def test_subjects_find_their_stream() -> None:
    assert stream_of("wb.run.>") == EVENT_STREAM
    assert stream_of("wbr.run.*") == REPORT_STREAM
    for wrong in ("wbx.run", "", ">", "*.run"):
        with pytest.raises(ConfigError, match="belongs to no stream"):
            stream_of(wrong)


def test_diff_names_every_field() -> None:
    events = declared()[0]
    found = events.request() | {"retention": "interest", "max_bytes": 7}
    del found["deny_purge"]  # the server leaves out what is false
    del found["deny_delete"]
    assert {str(difference) for difference in diff(events, found)} == {
        "WEIGHTBUS.retention: declared 'limits', found 'interest'",
        "WEIGHTBUS.max_bytes: declared 4294967296, found 7",
        "WEIGHTBUS.deny_delete: declared True, found None",
    }
    assert set(events.request()) >= TUNABLE


async def test_connecting_creates_and_verifies(nats_server: EmbeddedServer) -> None:
    bare = replace(fast_config(nats_server.url), create_streams=False)
    async with nats_bus_on(nats_server, bare) as bus:
        missing = await bus.verify_streams()
        assert [d.found for d in missing] == ["missing"] * 3
        assert [status.exists for status in await bus.stream_status()] == [False] * 3
        await bus.ensure_streams()
        assert await bus.verify_streams() == ()
    async with nats_bus_on(nats_server) as bus:
        await bus.publish_once("wb.run.1.0.opened", b"x")
        status = (await bus.stream_status())[0]
        assert status.exists
        assert (status.messages, status.first_sequence, status.last_sequence) == (1, 1, 1)
        assert status.differences == ()
        assert status.max_bytes == StreamLimits().events_max_bytes


async def test_a_foreign_stream_is_refused_with_every_difference(
    nats_server: EmbeddedServer,
) -> None:
    bare = replace(fast_config(nats_server.url), create_streams=False)
    async with nats_bus_on(nats_server, bare) as bus:
        await bus.connection.call(
            f"STREAM.CREATE.{EVENT_STREAM}",
            {
                "name": EVENT_STREAM,
                "subjects": ["wb.>"],
                "storage": "memory",
                "retention": "interest",
            },
        )
    with pytest.raises(StreamMismatchError, match="not the declared ones") as caught:
        await NatsBus.connect(fast_config(nats_server.url))
    for field in ("storage", "retention", "discard", "max_msgs_per_subject", "deny_delete"):
        assert f"WEIGHTBUS.{field}: declared" in str(caught.value)
    assert "weightbus bus init" in str(caught.value)
    async with nats_bus_on(nats_server, bare) as bus:
        with pytest.raises(StreamMismatchError, match=r"storage: declared 'file', found 'memory'"):
            await bus.ensure_streams()
        info = await bus.connection.call(f"STREAM.INFO.{EVENT_STREAM}")
        assert info["config"]["storage"] == "memory"


async def test_other_limits_are_an_operators_choice(nats_server: EmbeddedServer) -> None:
    own = StreamLimits(events_max_bytes=10**6, blobs_max_bytes=10**6)
    config = replace(fast_config(nats_server.url), streams=own)
    async with nats_bus_on(nats_server, config):
        pass
    async with nats_bus_on(nats_server) as bus:  # accepts, and changes nothing
        assert {(d.stream, d.field) for d in await bus.verify_streams()} == {
            ("WEIGHTBUS", "max_bytes"),
            ("OBJ_weightbus-blobs", "max_bytes"),
        }
        await bus.ensure_streams()
        assert await bus.verify_streams() == ()


async def test_a_server_without_room_says_so(nats_server: EmbeddedServer) -> None:
    config = replace(fast_config(nats_server.url), streams=StreamLimits(events_max_bytes=10**15))
    with pytest.raises(StreamMismatchError, match="cannot be created") as caught:
        await NatsBus.connect(config)
    assert "choose smaller limits" in str(caught.value)


async def test_an_alien_publisher_cannot_replace_a_message(nats_server: EmbeddedServer) -> None:
    async with nats_bus_on(nats_server) as bus:
        await bus.publish_once("wb.run.1.0.outcome", b"complete")
        answer = await bus.connection.request("wb.run.1.0.outcome", b"alien")
        assert json.loads(answer.data)["error"]["err_code"] == 10077
        with pytest.raises(RefusedError, match=r"refuses STREAM\.MSG\.DELETE") as caught:
            await bus.connection.call(f"STREAM.MSG.DELETE.{EVENT_STREAM}", {"seq": 1})
        assert caught.value.code >= 400
        standing = await bus.last("wb.run.1.0.outcome")
        assert standing is not None
        assert standing.data == b"complete"


async def test_many_may_be_the_first_to_connect(nats_server: EmbeddedServer) -> None:
    own = replace(fast_config(nats_server.url), streams=StreamLimits(events_max_bytes=10**6))
    configs = [fast_config(nats_server.url), own] * 3
    buses = await asyncio.gather(*[NatsBus.connect(config) for config in configs])
    receipts = await asyncio.gather(*[bus.publish_once("wb.run.1.0.opened", b"x") for bus in buses])
    assert {receipt.sequence for receipt in receipts} == {1}
    for bus in buses:
        await bus.close()


def url_in(folder: Path) -> str:
    for ports in folder.glob("*.ports"):
        with suppress(ValueError):  # half written
            return json.loads(ports.read_text())["nats"][0]
    return ""


async def test_a_server_without_jetstream_says_so(tmp_path: Path) -> None:
    config = tmp_path / "plain.conf"
    config.write_text(f'listen: "127.0.0.1:-1"\nports_file_dir: "{tmp_path}"\n')
    process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
        [checked_server(), "-c", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        await eventually(lambda: bool(url_in(tmp_path)))
        url = url_in(tmp_path)
        with pytest.raises(BusUnavailableError, match="creating the streams") as caught:
            await NatsBus.connect(replace(fast_config(url), connect_timeout_s=0.3))
        assert "check that JetStream runs" in str(caught.value)
    finally:
        process.kill()
        process.wait(10)
