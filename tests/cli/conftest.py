"""Fixtures of the command-line tests."""

from support.bus_fixtures import nats_server

__all__ = ["nats_server"]
