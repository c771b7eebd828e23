"""A router of few lines over a real RouterLink: hands requests from prefill to decode and keeps what it hears."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from trtpd.kv_transfer.base import Key
from trtpd.runtime.core import events as core
from trtpd.runtime.engine.base import EngineRequest, RequestKind, Sampling
from trtpd.runtime.worker.link import RouterLink
from trtpd.runtime.worker.messages import CancelWork, PullWork, SubmitWork, WithdrawWork
from trtpd.runtime.worker.session import fresh_id


def make_request(request_id: int, prompt_ids: tuple[int, ...], **changes: Any) -> EngineRequest:
    made = EngineRequest(
        request_id=request_id,
        attempt=1,
        kind=RequestKind.CONTEXT_ONLY,
        prompt_ids=prompt_ids,
        max_tokens=12,
        sampling=Sampling(),
    )
    return msgspec.structs.replace(made, **changes)


class MiniRouter:
    """`heard[key]` are the events of a key in order; `hellos` and `lost` by instance; `moving`: to be handed over."""

    def __init__(self, address: str) -> None:
        self.link = RouterLink(address, epoch=fresh_id(time.time_ns(), secrets.token_hex(4)), wake=lambda: None)
        self.link.start()
        self.hellos: dict[str, list[core.Hello]] = {}
        self.lost: dict[str, list[core.Lost]] = {}
        self.load: dict[str, core.Load] = {}
        self.heard: dict[Key, list[core.InstanceEvent]] = {}
        self.tokens: dict[Key, dict[int, int]] = {}
        self.moving: dict[Key, EngineRequest] = {}

    def submit(self, instance: str, request: EngineRequest, *, deadline_s: float = 30.0) -> None:
        assert self.link.send(instance, SubmitWork(request=request, deadline_in_s=deadline_s))

    def start(self, request: EngineRequest) -> None:
        """Prefill on prefill_0, then decode on decode_0."""
        self.moving[request.key] = request
        self.submit("prefill_0", request)

    def cancel(self, instance: str, key: Key) -> None:
        self.link.send(instance, CancelWork(request_id=key[0], attempt=key[1]))

    def until(self, condition: Callable[[], object], timeout_s: float = 15.0) -> None:
        """Handles what comes in until the condition is met."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end_s:
                heard = {key: [type(event).__name__ for event in events] for key, events in self.heard.items()}
                raise AssertionError(f"not within {timeout_s} s; heard {heard}, lost {self.lost}")
            self.link.check()
            for event in self.link.drain():
                self._handle(event)
            time.sleep(0.002)

    def until_heard(self, key: Key, kind: type, count: int = 1) -> list[Any]:
        """Waits for that many events of a kind."""
        self.until(lambda: len(self.of(key, kind)) >= count)
        return self.of(key, kind)

    def of(self, key: Key, kind: type) -> list[Any]:
        return [event for event in self.heard.get(key, []) if isinstance(event, kind)]

    def answer(self, key: Key) -> list[int]:
        """Tokens of a request in order of their index."""
        return [token for _, token in sorted(self.tokens[key].items())]

    def finished(self, key: Key) -> bool:
        return any(event.finish for event in self.of(key, core.Tokens))

    def close(self) -> None:
        self.link.close()

    def _handle(self, event: core.Event) -> None:
        if isinstance(event, core.Hello):
            self.hellos.setdefault(event.instance, []).append(event)
        elif isinstance(event, core.Lost):
            self.lost.setdefault(event.instance, []).append(event)
        elif isinstance(event, core.Step):
            self.load[event.instance] = event.load
            for inner in event.events:
                self._on_event(inner)

    def _on_event(self, event: core.InstanceEvent) -> None:
        key = (event.request_id, event.attempt)
        self.heard.setdefault(key, []).append(event)
        tokens = self.tokens.setdefault(key, {})
        if isinstance(event, core.Sealed):
            tokens[event.first_index] = event.token
        elif isinstance(event, core.Tokens):
            tokens.update(enumerate(event.ids, event.first_index))
        if request := self.moving.get(key):
            self._hand_over(event, request)

    def _hand_over(self, event: core.InstanceEvent, request: EngineRequest) -> None:
        if isinstance(event, core.Offered):
            moved = msgspec.structs.replace(request, kind=RequestKind.GENERATION_ONLY)
            self.pull(request, request=moved, offer=event.offer)
        elif isinstance(event, core.ChunkReady):
            self.pull(request, chunks=(event.chunk,))
        elif isinstance(event, core.Sealed):
            self.pull(request, seal=event.seal)
        elif isinstance(event, core.TransferDone):
            self.link.send("prefill_0", WithdrawWork(request_id=request.request_id, attempt=request.attempt))

    def pull(self, of: EngineRequest, **parts: Any) -> None:
        """Tells decode_0 parts of a hand-off."""
        work = PullWork(
            request_id=of.request_id,
            attempt=of.attempt,
            request=None,
            offer=None,
            chunks=(),
            seal=None,
            deadline_in_s=30.0,
        )
        self.link.send("decode_0", msgspec.structs.replace(work, **parts))
