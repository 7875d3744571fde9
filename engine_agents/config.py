"""What a user decides about an agent."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import Field

from ..schemas.base import Frozen, Seq, Token
from ..schemas.errors import ConfigError
from .engine import PauseMode, Seconds


class PathRule(Frozen):
    """One folder under two names: `there` on the side that speaks, `here` on the side that acts."""

    there: str
    here: str


class RetryPolicy(Frozen):
    """How a failed change of version is tried again.

    Errors that pass by themselves (an engine that is not there) are tried without end; others
    `max_tries` times. Waits double from `first_wait_s` to `max_wait_s`. A version whose bytes are
    wrong is never tried again.
    """

    max_tries: Annotated[int, Field(ge=1)] = 3
    first_wait_s: Seconds = 1.0
    max_wait_s: Seconds = 60.0

    def wait_s(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, from 1."""
        return min(self.first_wait_s * 2.0 ** min(failures - 1, 30), self.max_wait_s)


class AgentConfig(Frozen):
    """Options of one agent.

    Attributes:
        run_id: the run whose versions the engine serves.
        engine_name: the engine's name in reports: one subject token.
        pause_mode: what happens to running requests.
        versions_root: if set, version directories outside of it are refused.
        writer_paths: folders that the writers name otherwise than this machine does.
        engine_paths: folders that this machine (`there`) names otherwise than the engine (`here`).
        verify_threads: shards that are verified at the same time.
        resume_at_start: resume the engine when the agent starts: a killed agent may have left it
            paused. False is for engines that somebody else pauses on purpose.
        check_health: let the engine generate a token before it counts as serving.
        continue_within_s: how long resuming is tried before the engine counts as fenced; it is
            tried on after that, between other work.
        watch_every_s: how often the engine is asked for its label, to notice that it restarted.
        fallback_depth: how many of the newest versions are candidates when the newest is corrupt.
        retry: how failures are tried again.
    """

    run_id: Token
    engine_name: Token
    pause_mode: PauseMode = PauseMode.ABORT
    versions_root: Path | None = None
    writer_paths: Seq[PathRule] = ()
    engine_paths: Seq[PathRule] = ()
    verify_threads: Annotated[int, Field(ge=1, le=64)] = 2
    resume_at_start: bool = True
    check_health: bool = True
    continue_within_s: Seconds = 60.0
    watch_every_s: Seconds = 10.0
    fallback_depth: Annotated[int, Field(ge=1)] = 3
    retry: RetryPolicy = RetryPolicy()

    def local_directory(self, uri: str) -> Path:
        """The folder on this machine that version-complete means.

        Raises:
            ConfigError: not a folder that this agent can read, or outside of `versions_root`.
        """
        parts = urlsplit(uri)
        if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
            raise ConfigError(
                f"the agent cannot read versions from {uri}",
                next_step="let the writers write to a folder that this machine mounts",
            )
        text = unquote(parts.path) if parts.scheme == "file" else uri
        path = PurePosixPath(_rename(text, self.writer_paths))
        if not path.is_absolute() or ".." in path.parts:
            raise ConfigError(
                f"a version's directory must be an absolute path, not {text}",
                next_step="start the writers with an absolute --out",
            )
        root = self.versions_root
        if root is not None and not Path(path).resolve().is_relative_to(root.resolve()):
            raise ConfigError(
                f"the version's directory {path} is outside of {root}",
                next_step="map the writers' folder to this machine's, or correct the root",
            )
        return Path(path)

    def engine_directory(self, directory: Path) -> str:
        """The name that the engine has for a folder of this machine."""
        return _rename(str(directory), self.engine_paths)


def _rename(path: str, rules: tuple[PathRule, ...]) -> str:
    pure = PurePosixPath(path)
    for rule in rules:
        if pure.is_relative_to(rule.there):
            return str(PurePosixPath(rule.here) / pure.relative_to(rule.there))
    return path
