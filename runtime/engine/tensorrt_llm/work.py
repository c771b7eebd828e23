"""Work: the requests of an executor with the few moves that end, cancel or give them up, and what is to be told."""

from __future__ import annotations

from collections.abc import Callable

from trtpd.runtime.core.events import Drained, Rejected
from trtpd.runtime.engine.base import EngineEvent, RequestKind
from trtpd.runtime.engine.tensorrt_llm.backend import Backend
from trtpd.runtime.engine.tensorrt_llm.ledger import Entry, Ledger


class Work:
    """`events` are told by the engine's next poll."""

    def __init__(self, ledger: Ledger, backend: Backend, clock: Callable[[], float]) -> None:
        self.ledger = ledger
        self.backend = backend
        self.clock = clock
        self.events: list[EngineEvent] = []

    def end(self, entry: Entry, event: EngineEvent) -> None:
        """The executor has nothing of it any more; `event` is its last, unless that has been told."""
        if not entry.given_up:
            self.events.append(event)
        self.remove(entry)

    def remove(self, entry: Entry) -> None:
        """As `end`, its last event told."""
        self.ledger.remove(entry)
        self.backend.forget(entry.id)

    def give_up(self, entry: Entry, code: str, reason: str) -> None:
        """Its last event is told now; its blocks count until the executor has let go. Idempotent."""
        if entry.given_up:
            return
        self.events.append(drained(entry) if entry.closed else rejected(entry, code, reason))
        self.leave(entry)

    def leave(self, entry: Entry) -> None:
        """As `give_up`, its last event told."""
        if not entry.closed:
            entry.closed_s = self.clock()
        self.ledger.give_up(entry)

    def cancel(self, entry: Entry) -> None:
        """As soon as the executor can: one that fetches is cancelled when its KV is there, one that is held perhaps
        never."""
        fetching = entry.request.kind is RequestKind.GENERATION_ONLY and not entry.arrived
        reaches = self.backend.cancels_held if entry.held else self.backend.cancels_fetching or not fetching
        if reaches:
            self.backend.cancel(entry.id)


def drained(entry: Entry) -> Drained:
    return Drained(request_id=entry.request.request_id, attempt=entry.request.attempt)


def rejected(entry: Entry, code: str, reason: str) -> Rejected:
    return Rejected(request_id=entry.request.request_id, attempt=entry.request.attempt, code=code, reason=reason)
