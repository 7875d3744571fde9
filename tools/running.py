"""How a command runs: settings from the environment, one error line, signals, logs, metrics."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.console import Console

from ..bus.config import BusConfig
from ..bus.server import EmbeddedServer
from ..schemas.errors import ConfigError, WeightbusError

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
_LOOK_S = 0.2

FAILED = 1
"""Exit status of a command that ended with a named error (usage errors are 2)."""

screen = Console()
problems = Console(stderr=True, soft_wrap=True, highlight=False)


class BusSettings(BaseSettings):
    """How to reach the bus, from `WEIGHTBUS_…` variables; secrets never stand on a command line."""

    model_config = SettingsConfigDict(env_prefix="WEIGHTBUS_")

    bus: str = "nats://127.0.0.1:4222"
    credentials_file: Path | None = None
    nkey_seed_file: Path | None = None
    token: str | None = None
    user: str | None = None
    password: str | None = None
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    inbox_prefix: str = "_INBOX"

    def config(self, url: str | None, name: str) -> BusConfig:
        """The bus configuration; `url` (several: separated by commas) comes before the variable."""
        urls = tuple((self.bus if url is None else url).split(","))
        fields = self.model_dump(exclude={"bus"})
        return BusConfig(url=urls, name=name, **fields)


def configured(model: type[Model], **fields: Any) -> Model:
    """A role's options from the command line.

    Raises:
        ConfigError: options that break a rule of the model; each is named.
    """
    try:
        return model(**fields)
    except ValidationError as error:
        wrong = [
            ".".join(map(str, one["loc"])) + (": " if one["loc"] else "") + one["msg"]
            for one in error.errors()
        ]
        raise ConfigError(
            f"these options cannot work: {'; '.join(wrong)}",
            next_step="see the command's --help",
        ) from error


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; a named error becomes one line on stderr and exit status 1."""
    try:
        return asyncio.run(main)
    except (WeightbusError, ExceptionGroup) as error:
        raise fail(error) from error
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def fail(error: Exception) -> typer.Exit:
    """Print a named error (every one of a group) and return the exit to raise.

    Anything else in a group is a bug and is raised as it is.
    """
    errors = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
    for one in errors:
        if isinstance(one, ExceptionGroup):
            fail(one)
            continue
        if not isinstance(one, WeightbusError):
            raise error
        problems.print(f"[bold red]{type(one).__name__}[/]: ", end="")
        problems.print(str(one), markup=False)
    return typer.Exit(FAILED)


async def serve(work: Awaitable[None], stop: Callable[[], Awaitable[None]]) -> None:
    """Run a service until it ends; SIGINT and SIGTERM stop it in its written sequence."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    stopping: list[asyncio.Future[None]] = []

    def on_signal() -> None:
        if not stopping:
            stopping.append(asyncio.ensure_future(stop()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await task
        await asyncio.gather(*stopping)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def ended(server: EmbeddedServer) -> None:
    """Return when the server has stopped, by us or by itself."""
    while server.running:  # noqa: ASYNC110 - a child process sets no asyncio.Event
        await asyncio.sleep(_LOOK_S)


def log_to_stderr(level: str) -> None:
    """One line per record: time, level, logger, text."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
