"""`weightbus bus status`: streams against their declaration, and how far each reader is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..bus.nats_bus import ConsumerStatus, NatsBus
from ..bus.streams import StreamStatus


@dataclass(frozen=True, slots=True)
class BusReport:
    """What the server has."""

    streams: tuple[StreamStatus, ...]
    consumers: tuple[ConsumerStatus, ...]

    @property
    def ready(self) -> bool:
        """Whether every stream exists and is as declared."""
        return all(stream.exists and not stream.differences for stream in self.streams)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        streams = [
            {**asdict(stream), "differences": [str(one) for one in stream.differences]}
            for stream in self.streams
        ]
        consumers = [asdict(consumer) for consumer in self.consumers]
        return {"ready": self.ready, "streams": streams, "consumers": consumers}

    def render(self) -> str:
        """The report for people."""
        lines: list[str] = []
        for stream in self.streams:
            lines += _stream_lines(stream)
        for reader in self.consumers:
            idle = "" if reader.connected else ", nobody reads"
            lines.append(
                f"reader {reader.name}: delivered {reader.delivered_sequence}, "
                f"lag {reader.lag}{idle}"
            )
        return "\n".join(lines)


def _stream_lines(stream: StreamStatus) -> list[str]:
    if not stream.exists:
        return [f"{stream.name}: missing; run `weightbus bus init`"]
    used = stream.nbytes / max(1, stream.max_bytes)
    head = (
        f"{stream.name}: {stream.messages} messages, sequences {stream.first_sequence} to "
        f"{stream.last_sequence}, {stream.nbytes / 2**20:.1f} MiB ({used:.0%} of its limit)"
    )
    return [head, *(f"  differs: {difference}" for difference in stream.differences)]


async def bus_report(bus: NatsBus) -> BusReport:
    """Ask the server; changes nothing. Raises BusUnavailableError."""
    return BusReport(await bus.stream_status(), await bus.consumer_status())
