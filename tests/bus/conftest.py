from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from support.bus_fixtures import nats_server
from support.bus_worlds import KINDS, World
from support.bus_worlds import world as open_world
from weightbus.bus.interface import Bus

__all__ = ["bus", "nats_server", "world"]


@pytest.fixture(params=KINDS)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[World]:
    async with open_world(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture
async def bus(world: World) -> Bus:
    return await world.connect()
