"""SGLang over HTTP. What differs between its releases is in `sglang_releases`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import cast

import httpx

from ..schemas.errors import EngineRefusedError, EngineTimeoutError, EngineUnreachableError
from .engine import EngineDeadlines, EngineInfo, PauseMode
from .sglang_releases import RELEASES, FlushRule, release_of

_MESSAGE_CHARS = 2000
_FLUSH_RETRY_S = 0.05


class SglangEngine:
    """An SGLang server.

    Args:
        url: `http://host:port` of the server.
        deadlines: the longest that each call may take.
        api_key: sent as a bearer token, for servers started with `--api-key` or `--admin-api-key`.
        flush_retry_s: pause between two questions while the last requests end.
    """

    def __init__(
        self,
        url: str,
        *,
        deadlines: EngineDeadlines | None = None,
        api_key: str | None = None,
        flush_retry_s: float = _FLUSH_RETRY_S,
    ) -> None:
        self._url = url.rstrip("/")
        self._deadlines = deadlines if deadlines is not None else EngineDeadlines()
        self._flush_retry_s = flush_retry_s
        self._release = RELEASES[-1]
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # One connection per call: a kept one that the server closes while a call goes out looks
        # like a dead engine. No proxy from the environment: engines are neighbours.
        self._client = httpx.AsyncClient(
            base_url=self._url,
            headers=headers,
            timeout=None,  # noqa: S113 - every call has a total deadline in `_send`
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    @property
    def url(self) -> str:
        """The server's address."""
        return self._url

    async def probe(self) -> EngineInfo:
        """Ask for the release (/server_info) and for what is loaded (/model_info).

        Raises:
            ConfigError: the release is too old.
        """
        server = await self._get("/server_info", "/get_server_info")
        release = str(server.get("version", ""))
        self._release = release_of(release)
        model = await self._get("/model_info", "/get_model_info")
        return EngineInfo(
            release=release,
            model_path=str(model.get("model_path", "")),
            label=str(model.get("weight_version", "")),
        )

    async def label(self) -> str:
        """The server's `weight_version`."""
        model = await self._get("/model_info", "/get_model_info")
        return str(model.get("weight_version", ""))

    async def pause(self, mode: PauseMode) -> None:
        """/pause_generation."""
        self._accept(
            await self._send(
                "POST", "/pause_generation", self._deadlines.pause_s, {"mode": mode.value}
            )
        )

    async def flush(self, mode: PauseMode) -> bool:
        """/flush_cache, asked again while it is refused for requests that are just ending."""
        rule = self._release.flush_rules[mode]
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadlines.flush_s
        while True:
            answer = await self._send("POST", "/flush_cache", max(end - loop.time(), 0.001))
            if answer.status_code != HTTPStatus.BAD_REQUEST:
                self._accept(answer)
                return True
            if rule is FlushRule.KEPT:
                return False
            if rule is FlushRule.NEVER or loop.time() + self._flush_retry_s >= end:
                raise self._flush_refused(answer, mode)
            await asyncio.sleep(self._flush_retry_s)

    async def load_from_disk(self, model_path: str, label: str) -> None:
        """/update_weights_from_disk with the label; success must be said in so many words."""
        answer = await self._send(
            "POST",
            "/update_weights_from_disk",
            self._deadlines.load_s,
            {"model_path": model_path, "weight_version": label, "flush_cache": False},
        )
        fields = self._accept(answer)
        if fields.get("success") is not True:
            raise self._refusal(answer, "did not load the version")

    async def continue_(self) -> None:
        """/continue_generation."""
        self._accept(
            await self._send("POST", "/continue_generation", self._deadlines.continue_s, {})
        )

    async def health(self) -> None:
        """/health, which generates one token when nothing else runs."""
        self._accept(await self._send("GET", "/health", self._deadlines.health_s))

    async def close(self) -> None:
        """Close the client."""
        await self._client.aclose()

    async def _get(self, path: str, older_path: str) -> Mapping[str, object]:
        answer = await self._send("GET", path, self._deadlines.info_s)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            answer = await self._send("GET", older_path, self._deadlines.info_s)
        return self._accept(answer)

    async def _send(
        self, method: str, path: str, deadline_s: float, body: Mapping[str, object] | None = None
    ) -> httpx.Response:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._client.request(method, path, json=body)
        except TimeoutError as error:
            raise EngineTimeoutError(
                f"the engine did not answer {path} within {deadline_s:g} s",
                where={"engine": self._url},
                next_step="look at the engine's log: it hangs, or the deadline is too short",
            ) from error
        except httpx.HTTPError as error:
            raise EngineUnreachableError(
                f"no answer to {path}: {error!r}",
                where={"engine": self._url},
                next_step="is the engine running, and is this its address?",
            ) from error

    def _accept(self, answer: httpx.Response) -> Mapping[str, object]:
        if answer.status_code != HTTPStatus.OK:
            raise self._refusal(answer, "answered with an error")
        try:
            fields: object = answer.json()
        except ValueError:
            return {}  # plain text: /flush_cache and /health
        if not isinstance(fields, dict):
            return {}
        named = cast("dict[str, object]", fields)
        if named.get("success") is False:
            raise self._refusal(answer, "answered success=false")
        return named

    def _refusal(self, answer: httpx.Response, what: str) -> EngineRefusedError:
        return EngineRefusedError(
            f"the engine {what}: {answer.text[:_MESSAGE_CHARS]!r}",
            where={
                "engine": self._url,
                "path": answer.request.url.path,
                "status": answer.status_code,
            },
            next_step="the engine's log has the whole story",
        )

    def _flush_refused(self, answer: httpx.Response, mode: PauseMode) -> EngineRefusedError:
        return EngineRefusedError(
            f"the engine does not drop the cache of the old weights in a pause of mode "
            f"{mode.value}: {answer.text[:_MESSAGE_CHARS]!r}",
            where={"engine": self._url, "path": "/flush_cache", "status": answer.status_code},
            next_step="use pause mode abort, or a newer SGLang, or send the engine fewer requests",
        )
