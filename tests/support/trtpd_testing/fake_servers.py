"""Servers with known latencies: one in this process for exact checks, and real gRPC and SSE servers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np
from aiohttp import web
from tritonclient.grpc import service_pb2, service_pb2_grpc

from trtpd.perf.transport import Arrived, Ending, Question

Script = Callable[[int, float], Sequence[float]]
"""(request's number in order of arrival, its instant of arrival) -> seconds from there to each of its tokens."""


TokenAt = Callable[[int, int], int]
"""(request's number in order of arrival, index of the token) -> its id."""


def fixed(first_s: float, gap_s: float, tokens: int) -> Script:
    return lambda number, now_s: [first_s + gap_s * index for index in range(tokens)]


def stalled(script: Script, from_s: float, to_s: float) -> Script:
    """Nothing happens between two instants: what would have come then comes at the end of it."""

    def run(number: int, now_s: float) -> Sequence[float]:
        return [to_s - now_s if from_s <= now_s + at_s < to_s else at_s for at_s in script(number, now_s)]

    return run


def bursty(first_s: float, burst: int, every_s: float, tokens: int) -> Script:
    """Tokens come `burst` at a time."""
    return lambda number, now_s: [first_s + every_s * (index // burst) for index in range(tokens)]


class ScriptedTransport:
    """Answers as its script says, by the loop's clock. `ends` says how the requests of these numbers end."""

    def __init__(self, script: Script, *, ends: dict[int, Ending] | None = None) -> None:
        self._script = script
        self._ends = ends or {}
        self._count = 0
        self.sent: list[bytes] = []
        self.asked: list[Question] = []
        self.closed = False
        self.cancelled = 0
        self._begin_s: float | None = None

    async def open(self) -> None:
        self._begin_s = asyncio.get_running_loop().time()

    def prepare(self, question: Question) -> bytes:
        self.asked.append(question)
        return question.prompt.encode()

    async def send(self, request: bytes, arrived: Arrived) -> Ending:
        loop = asyncio.get_running_loop()
        number, self._count = self._count, self._count + 1
        self.sent.append(request)
        assert self._begin_s is not None
        began_s = loop.time()
        instants = self._script(number, began_s - self._begin_s)
        try:
            for at_s in sorted(set(instants)):
                await asyncio.sleep(began_s + at_s - loop.time())
                arrived(list(instants).count(at_s))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self._ends.get(number, Ending(state="finished", output_tokens=len(instants)))

    async def close(self) -> None:
        self.closed = True


@dataclass
class FakeServer:
    """A server in a thread of its own. `came_s` is the instant (monotonic) at which it got each request, `sent_s` those
    at which it wrote the request's tokens; `bodies` what it was asked."""

    address: str = ""
    came_s: dict[int, float] = field(default_factory=dict)
    sent_s: dict[int, list[float]] = field(default_factory=dict)
    bodies: list[Any] = field(default_factory=list)
    cancelled: int = 0


Start = Callable[[FakeServer], Any]


@contextmanager
def _in_thread(start: Start) -> Iterator[FakeServer]:
    """`start(server)` is a coroutine that sets the address and returns an async function that stops it."""
    server, ready, ended = FakeServer(), threading.Event(), threading.Event()

    async def live() -> None:
        stop = await start(server)
        ready.set()
        while not ended.is_set():
            await asyncio.sleep(0.01)
        await stop()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield server
    finally:
        ended.set()
        thread.join(20)


class _Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(
        self,
        server: FakeServer,
        script: Script,
        errors: dict[int, str],
        token_at: TokenAt,
        lost_after: int | None,
        index: bool,
        lasts: dict[int, Any],
    ) -> None:
        self._index = index
        self._server, self._script, self._errors, self._count = server, script, errors, 0
        self._lasts = lasts
        self._token_at = token_at
        self._lost_after = lost_after

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name != "absent")

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        if not self._index:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted")
        listed = service_pb2.RepositoryIndexResponse()
        for name in ("pd", "decode_0", "decode_0"):  # once for each version
            listed.models.add(name=name, state="READY")
        listed.models.add(name="former", state="UNAVAILABLE")
        return listed

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        async for request in requests:
            number, self._count = self._count, self._count + 1
            self._server.bodies.append(request)
            sent = self._server.sent_s.setdefault(number, [])
            if number in self._errors:
                yield service_pb2.ModelStreamInferResponse(error_message=self._errors[number])
                try:
                    await asyncio.sleep(0.05)  # as in Triton, the stream ends behind the error
                except asyncio.CancelledError:
                    self._server.cancelled += 1
                    raise
                continue
            began_s, instants = loop.time(), self._script(number, loop.time())
            self._server.came_s[number] = began_s
            try:
                for index, at_s in enumerate(instants):
                    if index == self._lost_after:
                        await context.abort(grpc.StatusCode.UNKNOWN, "Stream removed")
                    await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
                    sent.append(loop.time())
                    last = index == len(instants) - 1
                    stage = request.model_name != "pd"
                    token = self._token_at(number, index)
                    if last and number in self._lasts:
                        yield self._lasts[number]
                        continue
                    yield (
                        _stage_response(token, last=last)
                        if stage
                        else _response(token, last=last, tokens=len(instants))
                    )
            except asyncio.CancelledError:
                self._server.cancelled += 1
                raise


def _response(token: int, *, last: bool, tokens: int) -> Any:
    response = service_pb2.ModelStreamInferResponse()
    infer = response.infer_response

    def add(name: str, kind: str, raw: bytes) -> None:
        infer.outputs.add(name=name, datatype=kind, shape=[1])
        infer.raw_output_contents.append(raw)

    def text(value: str) -> bytes:
        return len(value.encode()).to_bytes(4, "little") + value.encode()

    add("text_output", "BYTES", text(" word"))
    add("output_ids", "INT32", np.array([token], np.int32).tobytes())
    if last:
        timeline = {
            "finish": "length", "prompt_tokens": 7, "output_tokens": tokens, "queue_ms": 1.0, "prefill_ms": 2.0,
            "ttft_ms": 3.0, "second_token_ms": 4.0, "tpot_ms": 5.0, "total_ms": 6.0,
            "transfer": {"bytes": 10, "chunks": 1, "ms": 8.0, "exposed_ms": 0.5, "path": "shm"},
            "attempts": [{"prefill": "prefill_0", "decode": "decode_0", "why": "", "outcome": "delivered"}],
        }  # fmt: skip
        add("finish_reason", "BYTES", text("length"))
        add("timeline", "BYTES", text(json.dumps(timeline)))
        add("num_input_tokens", "INT32", np.array([7], np.int32).tobytes())
    return response


def _stage_response(token: int, *, last: bool) -> Any:
    """As a stage model answers: no text, and a timeline of another shape."""
    response = _response(token, last=False, tokens=0)
    del response.infer_response.outputs[0], response.infer_response.raw_output_contents[0]
    if last:
        response.infer_response.outputs.add(name="timeline", datatype="BYTES", shape=[1])
        response.infer_response.raw_output_contents.append((2).to_bytes(4, "little") + b"{}")
    return response


@contextmanager
def fake_triton(
    script: Script,
    *,
    errors: dict[int, str] | None = None,
    token_at: TokenAt = lambda number, index: index,
    lost_after: int | None = None,
    index: bool = True,
    lasts: dict[int, Any] | None = None,
) -> Iterator[FakeServer]:
    """A real gRPC server that speaks KServe's streaming inference. `lost_after`: it breaks every stream off behind so
    many tokens, as one that goes away does. `index`: whether it names its models. `lasts`: the last response to the
    requests of these numbers."""

    async def start(server: FakeServer) -> Any:
        service = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            _Triton(server, script, errors or {}, token_at, lost_after, index, lasts or {}), service
        )
        server.address = f"127.0.0.1:{service.add_insecure_port('127.0.0.1:0')}"
        await service.start()
        return lambda: service.stop(None)

    with _in_thread(start) as server:
        yield server


@contextmanager
def fake_openai(
    script: Script,
    *,
    statuses: dict[int, int] | None = None,
    cut: bool = False,
    events: dict[int, bytes] | None = None,
) -> Iterator[FakeServer]:
    """A real HTTP server that streams completions as server-sent events. `cut`: streams end without [DONE]. `events`:
    what the requests of these numbers are told behind their tokens."""

    async def start(server: FakeServer) -> Any:
        count = 0

        async def models(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "toy"}]})

        async def completions(request: web.Request) -> web.StreamResponse:
            nonlocal count
            number, count = count, count + 1
            server.bodies.append(await request.json())
            if number in (statuses or {}):
                return web.json_response({"error": {"message": "no"}}, status=(statuses or {})[number])
            loop = asyncio.get_running_loop()
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            began_s, instants = loop.time(), script(number, loop.time())
            server.came_s[number] = began_s
            for at_s in instants:
                await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
                server.sent_s.setdefault(number, []).append(loop.time())
                event = {"choices": [{"text": " word", "finish_reason": None}]}
                await stream.write(f"data: {json.dumps(event)}\n\n".encode())
            if number in (events or {}):
                await stream.write(b"data: " + (events or {})[number] + b"\n\n")
            if not cut:
                usage = {"prompt_tokens": 7, "completion_tokens": len(instants)}
                end = {"choices": [{"text": "", "finish_reason": "length"}]}
                await stream.write(f"data: {json.dumps(end)}\n\n".encode())
                await stream.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
                await stream.write(b"data: [DONE]\n\n")
            return stream

        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner.cleanup

    with _in_thread(start) as server:
        yield server
