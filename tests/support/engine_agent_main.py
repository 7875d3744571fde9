"""An agent as a process of its own, to be killed: `engine_agent_main.py BUS_URL ENGINE_URL`."""

import asyncio
import sys

from weightbus.bus.nats_bus import NatsBus
from weightbus.engine_agents.agent import Agent
from weightbus.engine_agents.config import AgentConfig
from weightbus.engine_agents.sglang import SglangEngine


async def main(bus_url: str, engine_url: str) -> None:
    async with await NatsBus.connect(bus_url) as bus:
        config = AgentConfig(run_id="run-1", engine_name="engine-0")
        await Agent(bus, SglangEngine(engine_url), config).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
