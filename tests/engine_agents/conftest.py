from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from support.engine_fake import FakeSglang
from support.engine_world import World, world


@pytest.fixture
async def w(tmp_path: Path) -> AsyncGenerator[World]:
    async with world(tmp_path) as made:
        yield made


@pytest.fixture
def fake(w: World) -> FakeSglang:
    return w.fake
