"""How to reach the server."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..schemas.errors import ConfigError
from .streams import StreamLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class BusConfig:
    """Where the server is, who we are, and how patient we are.

    At most one way to log in: `credentials_file`, `nkey_seed_file`, `token`, or `user` with
    `password`. TLS is on with a `tls://` URL or any of the `tls_*` files.
    """

    url: str | tuple[str, ...] = field(default="nats://127.0.0.1:4222", repr=False)
    """One or several servers of one cluster."""
    name: str = "weightbus"
    """Shown in the server's list of connections."""
    credentials_file: Path | None = None
    nkey_seed_file: Path | None = None
    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_hostname: str | None = None
    inbox_prefix: str = "_INBOX"
    """Of its own for each role when permissions are per subject."""
    domain: str | None = None
    """JetStream domain, when the streams live behind a leaf node."""
    connect_timeout_s: float = 10.0
    attempt_timeout_s: float = 2.0
    """How long one request may take before it is sent again."""
    reconnect_pause_s: float = 0.05
    """The first pause between attempts to connect; it doubles up to `reconnect_pause_max_s`."""
    reconnect_pause_max_s: float = 2.0
    ping_interval_s: float = 5.0
    """A link on which two pings stay unanswered is given up."""
    prefetch: int = 512
    """Messages that a reader asks for ahead of their use."""
    streams: StreamLimits = field(default_factory=StreamLimits)
    create_streams: bool = True
    """Create missing streams when connecting, and check those that exist."""

    def __post_init__(self) -> None:
        self._check_logins()
        if not self.urls:
            raise ConfigError("no server URL", next_step="give BusConfig.url")
        numbers = {
            "connect_timeout_s": self.connect_timeout_s,
            "attempt_timeout_s": self.attempt_timeout_s,
            "reconnect_pause_s": self.reconnect_pause_s,
            "reconnect_pause_max_s": self.reconnect_pause_max_s,
            "ping_interval_s": self.ping_interval_s,
            "prefetch": self.prefetch,
        }
        wrong = {name: value for name, value in numbers.items() if value <= 0}
        if wrong:
            raise ConfigError("these options must be positive", where=wrong)

    def _check_logins(self) -> None:
        logins = {
            "credentials_file": self.credentials_file,
            "nkey_seed_file": self.nkey_seed_file,
            "token": self.token,
            "user": self.user,
        }
        given = [name for name, value in logins.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(
                "several ways to log in", where={"given": given}, next_step="keep one of them"
            )
        for name in ("credentials_file", "nkey_seed_file"):
            path = logins[name]
            if isinstance(path, Path) and not path.is_file():
                raise ConfigError("the login file does not exist", where={name: path})
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError(
                "a client certificate needs both tls_cert_file and tls_key_file",
                where={"tls_cert_file": self.tls_cert_file, "tls_key_file": self.tls_key_file},
            )

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers."""
        return (self.url,) if isinstance(self.url, str) else self.url

    @property
    def shown_urls(self) -> str:
        """The servers for messages and logs: without user and password."""
        return ",".join(re.sub(r"(?<=//)[^/@]*@", "", url) for url in self.urls)

    @property
    def api_prefix(self) -> str:
        """The root of JetStream's API subjects."""
        return "$JS.API" if self.domain is None else f"$JS.{self.domain}.API"

    def client_options(self) -> dict[str, Any]:
        """The part of nats-py's connect options that says who and where."""
        options: dict[str, Any] = {
            "servers": list(self.urls),
            "name": self.name,
            "inbox_prefix": self.inbox_prefix,
            "token": self.token,
            "user": self.user,
            "password": self.password,
            "ping_interval": self.ping_interval_s,
            "max_outstanding_pings": 2,
        }
        if self.credentials_file is not None:
            options["user_credentials"] = str(self.credentials_file)
        if self.nkey_seed_file is not None:
            options["nkeys_seed"] = str(self.nkey_seed_file)
        if self.tls_hostname is not None:
            options["tls_hostname"] = self.tls_hostname
        context = self._tls()
        if context is not None:
            options["tls"] = context
        return options

    def _tls(self) -> ssl.SSLContext | None:
        files = (self.tls_ca_file, self.tls_cert_file, self.tls_key_file)
        if all(f is None for f in files) and not any(u.startswith("tls://") for u in self.urls):
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_file)
            if self.tls_cert_file is not None:
                context.load_cert_chain(self.tls_cert_file, self.tls_key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"the TLS files cannot be used: {error}",
                where={"ca": self.tls_ca_file, "cert": self.tls_cert_file},
            ) from error
        return context
