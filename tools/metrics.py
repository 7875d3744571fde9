"""A Prometheus endpoint for a long-running process: the board's facts about it, and the process's.

Small on purpose: counters of finished work, read from the role's own numbers when scraped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

from ..schemas.errors import ConfigError, MissingDependencyError

_log = logging.getLogger(__name__)
Numbers = Callable[[], Mapping[str, float]]
"""Metric name -> value now; names end in `_total` for counters, in a unit for gauges."""


@contextmanager
def metrics_endpoint(
    host: str, port: int | None, role: str, numbers: Numbers
) -> Generator[int | None, None, None]:
    """Serve `weightbus_<role>_<name>` on http://host:port/metrics while the context is open.

    Args:
        host: the address to bind.
        port: None serves nothing; 0 lets the system choose.
        role: writer or agent.
        numbers: read at each scrape.

    Yields:
        the port, or None.

    Raises:
        MissingDependencyError: prometheus-client is not installed.
        ConfigError: the port cannot be bound.
    """
    if port is None:
        yield None
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415
        from prometheus_client.metrics_core import (  # noqa: PLC0415
            CounterMetricFamily,
            GaugeMetricFamily,
            Metric,
        )
        from prometheus_client.process_collector import ProcessCollector  # noqa: PLC0415
        from prometheus_client.registry import Collector  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError(
            "--metrics-port needs prometheus-client",
            next_step="pip install 'weightbus[metrics]'",
        ) from error

    class Numbered(Collector):
        def collect(self) -> Iterable[Metric]:
            for name, value in numbers().items():
                full = f"weightbus_{role}_{name}"
                if name.endswith("_total"):
                    yield CounterMetricFamily(full.removesuffix("_total"), name, value)
                else:
                    yield GaugeMetricFamily(full, name, value)

    registry = CollectorRegistry()
    registry.register(Numbered())
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"the metrics port cannot be bound: {error}",
            where={"host": host, "port": port},
            next_step="choose another --metrics-port, or 0",
        ) from error
    _log.info("metrics on http://%s:%d/metrics", host, server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
