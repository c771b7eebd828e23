"""OpenAI-compatible servers: completions streamed as server-sent events. For ours, and for others to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from trtpd.build.decoding import typed_json
from trtpd.errors import InputError, ServeError
from trtpd.perf.transport import Arrived, Ending, Question
from trtpd.perf.workload import MOST_TOKENS

OPEN_TIMEOUT_S = 10.0
_DATA = b"data:"
_SHOWN = 80
"""So much of an event that can't be read is quoted."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _Event(msgspec.Struct):
    """What is read of one; `error` has as many shapes as there are servers."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class OpenAiTransport:
    """`url` is the server's root (http://HOST:PORT). Prompts go raw to /v1/completions.

    `extra` is merged into each request; a value of None takes a field out. `ignore_eos` is sent unless taken out, so
    that answers have the workload's lengths.
    """

    def __init__(self, url: str, *, model: str = "", extra: Mapping[str, Any] | None = None) -> None:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise InputError(f"{url!r} is not the address of an OpenAI server; write http://HOST:PORT")
        self._root = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._extra = dict(extra or {})
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Content-Type": "application/json"},
            read_bufsize=1 << 20,
        )
        try:
            async with self._session.get(
                f"{self._root}/v1/models", timeout=aiohttp.ClientTimeout(total=OPEN_TIMEOUT_S)
            ) as answer:
                listed = await answer.read()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            await self.close()
            raise ServeError(f"no OpenAI server at {self._root} ({error}); is it up, and the address right?") from error
        if status != 200:
            await self.close()
            raise ServeError(f"{self._root}/v1/models answers with status {status}; is it an OpenAI server?")
        self._model = self._model or _first_model(listed)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def prepare(self, question: Question) -> bytes:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        } | self._extra
        return msgspec.json.encode({name: value for name, value in body.items() if value is not None})

    async def send(self, request: bytes, arrived: Arrived) -> Ending:
        assert self._session is not None, "open comes first"
        reading = _Reading()
        try:
            async with self._session.post(f"{self._root}/v1/completions", data=request) as answer:
                if answer.status != 200:
                    return _refusal(answer.status, await answer.read())
                async for line in answer.content:
                    if line.startswith(_DATA):
                        reading.take(line[len(_DATA) :].strip(), arrived)
        except (aiohttp.ClientError, ConnectionError) as error:
            return Ending(state="failed", reason="connection", message=str(error) or type(error).__name__)
        except (ValueError, HttpProcessingError) as error:
            return Ending(state="failed", reason="protocol", message=f"the stream can't be read: {error}")
        return reading.ending()


class _Reading:
    """One answer's events. Each with text counts as one token until the usage says otherwise."""

    def __init__(self) -> None:
        self._finish = ""
        self._error: Any = None
        self._usage = _Usage()
        self._done = False

    def take(self, data: bytes, arrived: Arrived) -> None:
        """Raises ValueError, quoting it, for an event of another shape."""
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = typed_json(data, _Event)
        except ValueError as error:
            raise ValueError(f"{error} in {data[:_SHOWN].decode('utf-8', 'replace')!r}") from error
        for choice in event.choices or ():
            if choice.text or (choice.delta is not None and choice.delta.content):
                arrived(1)
            self._finish = choice.finish_reason or self._finish
        self._usage = event.usage or self._usage
        self._error = event.error or self._error

    def ending(self) -> Ending:
        if self._error is not None:
            return _failure(self._error)
        if not (self._finish or self._done):
            return Ending(state="failed", reason="no_end", message="the stream ended without [DONE]")
        return Ending(
            state="finished",
            reason=self._finish,
            prompt_tokens=self._usage.prompt_tokens,
            output_tokens=self._usage.completion_tokens,
        )


def _failure(error: Any) -> Ending:
    """Of an error in the stream: an object as OpenAI sends it, or whatever else a server puts there."""
    if not isinstance(error, Mapping):
        return Ending(state="failed", reason="server_error", message=str(error))
    reason = str(error.get("code") or error.get("type") or "server_error")
    return Ending(state="failed", reason=reason, message=str(error.get("message", "")))


def _refusal(status: int, body: bytes) -> Ending:
    reasons = {429: "saturated", 503: "no_instance"}
    reason = reasons.get(status, f"http_{status}")
    state = "refused" if status < 500 or status in reasons else "failed"
    return Ending(
        state="refused" if state == "refused" else "failed",
        reason=reason,
        message=body[:300].decode("utf-8", "replace"),
    )


def _first_model(listed: bytes) -> str:
    try:
        models = typed_json(listed, dict[str, Any]).get("data") or []
        return str(models[0]["id"]) if models else ""
    except (ValueError, KeyError, TypeError) as error:
        raise ServeError(f"/v1/models is not a list of models ({error}); name the model with --model") from error
