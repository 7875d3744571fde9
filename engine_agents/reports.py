"""Engine reports: built here, sent in the background so that the bus never holds the agent up."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Literal

from ..bus.events import publish_event
from ..bus.interface import Bus
from ..schemas.errors import BusClosedError, BusError, WeightbusError
from ..schemas.events import EngineReport, VersionKey
from .activation import Activation
from .config import AgentConfig
from .engine import Engine
from .states import Machine

_log = logging.getLogger(__name__)
_MAX_WAITING = 256
_MESSAGE_CHARS = 2000
_SHORT_CHARS = 500
_SEND_S = 5.0
_RETRY_S = 2.0
LAST_REPORTS_S = 5.0
ReportOutcome = Literal["serving", "failed", "skipped"]
OUTCOMES: tuple[ReportOutcome, ...] = ("serving", "failed", "skipped")


class Reporter:
    """Keeps the newest 256 reports until the bus has taken them."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        config: AgentConfig,
        machine: Machine,
        activation: Activation,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._config = config
        self._machine = machine
        self._activation = activation
        self._waiting: deque[EngineReport] = deque(maxlen=_MAX_WAITING)
        self._filled = asyncio.Event()
        self.counts: dict[ReportOutcome, int] = dict.fromkeys(OUTCOMES, 0)

    def report(
        self,
        key: VersionKey,
        outcome: ReportOutcome,
        *,
        error: WeightbusError | None = None,
        message: str = "",
        timings_s: dict[str, float] | None = None,
    ) -> None:
        """Put a report about a version into the queue."""
        good = self._activation.good
        serving = "" if good is None or self._activation.fenced else good.label
        text = message if error is None else " ".join(filter(None, (str(error), message)))
        self._waiting.append(
            EngineReport(
                version=key,
                engine=self._config.engine_name,
                engine_url=self._engine.url[:_SHORT_CHARS],
                engine_version=self._activation.release[:_SHORT_CHARS],
                outcome=outcome,
                state=self._machine.state.name,
                serving_version=serving[:_SHORT_CHARS],
                error="" if error is None else type(error).__name__,
                message=text[:_MESSAGE_CHARS],
                timings_s={} if timings_s is None else timings_s,
            )
        )
        self.counts[outcome] += 1
        self._filled.set()
        _log.info("%s %s %s", key, outcome, text)

    async def send_all(self) -> None:
        """Send reports without end, each until the bus has it.

        Raises:
            BusClosedError: the bus was closed.
        """
        while True:
            await self._filled.wait()
            await self._drain()
            self._filled.clear()

    async def send_last(self) -> None:
        """Send what is waiting, for a few seconds at most; never raises a bus error."""
        try:
            async with asyncio.timeout(LAST_REPORTS_S):
                await self._drain()
        except (TimeoutError, BusError) as error:
            _log.warning("%d reports were not sent: %r", len(self._waiting), error)

    async def _drain(self) -> None:
        while self._waiting:
            report = self._waiting[0]
            try:
                await publish_event(self._bus, report, timeout_s=_SEND_S)
            except BusError as error:
                if isinstance(error, BusClosedError):
                    raise
                if error.retryable:
                    _log.warning("a report waits for the bus: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                _log.warning("a report was refused: %s", error)
            if self._waiting and self._waiting[0] is report:
                self._waiting.popleft()
