"""OpenAI-compatible servers: completions streamed as server-sent events. For ours, and for others to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from trtpd.build.decoding import typed_json
from trtpd.errors import InputError, ServeError
from trtpd.perf.transport import Arrived, Ending, Question

OPEN_TIMEOUT_S = 10.0
_DATA = b"data:"


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
        except ValueError as error:
            return Ending(state="failed", reason="protocol", message=f"an event is no JSON: {error}")
        return reading.ending()


class _Reading:
    """One answer's events. Each with text counts as one token until the usage says otherwise."""

    def __init__(self) -> None:
        self._finish = ""
        self._error: Mapping[str, Any] | None = None
        self._usage: Mapping[str, Any] = {}
        self._done = False

    def take(self, data: bytes, arrived: Arrived) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        event = typed_json(data, dict[str, Any])
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                arrived(1)
            self._finish = choice.get("finish_reason") or self._finish
        self._usage = event.get("usage") or self._usage
        self._error = event.get("error") or self._error

    def ending(self) -> Ending:
        if self._error is not None:
            reason = str(self._error.get("code") or self._error.get("type") or "server_error")
            return Ending(state="failed", reason=reason, message=str(self._error.get("message", "")))
        if not (self._finish or self._done):
            return Ending(state="failed", reason="no_end", message="the stream ended without [DONE]")
        return Ending(
            state="finished",
            reason=self._finish,
            prompt_tokens=self._usage.get("prompt_tokens"),
            output_tokens=self._usage.get("completion_tokens"),
        )


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
