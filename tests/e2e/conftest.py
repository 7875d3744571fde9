"""Fixtures of the end-to-end tests."""

from support.bus_fixtures import nats_server

__all__ = ["nats_server"]
