"""A request's life: its states, its instants and its record. Metrics, timelines, benchmark and simulator use
them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """QUEUED → PREFILLING → TRANSFERRING → DECODING → FINISHED, and from any of them the three other ends.

    With prefill and decode on one instance (local), TRANSFERRING is skipped. A new attempt begins at QUEUED
    again.
    """

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({State.FINISHED, State.REFUSED, State.CANCELLED, State.FAILED})


class Instant(StrEnum):
    """The instants of a request, in the order they normally happen."""

    ARRIVED = "arrived"
    PLACED = "placed"
    PREFILL_BEGIN = "prefill_begin"
    FIRST_TOKEN = "first_token"
    TRANSFER_BEGIN = "transfer_begin"
    TRANSFER_END = "transfer_end"
    DECODE_BEGIN = "decode_begin"
    LAST_TOKEN = "last_token"


_FIRST, _LAST = Instant.FIRST_TOKEN, Instant.LAST_TOKEN
"""Looked up for every token: a member of an enum takes four times as long as a plain name."""


@dataclass(slots=True, kw_only=True)
class AttemptRecord:
    """One placement of a request: who did what and when. Grows while the attempt runs.

    `decode` is None where one instance does both. `outcome` is "" while it runs, "delivered" for the attempt
    that ended the request, else the reason it was given up. `cached_tokens` of its prompt were found where it was
    computed, `present_tokens` where it was moved to; `preemptions`: how often its blocks were given to others.
    """

    number: int
    kind: str
    prefill: str
    decode: str | None
    why: str
    instants: dict[Instant, float] = field(default_factory=dict)
    bytes_moved: int = 0
    chunks: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    path: str = ""
    pulls: int = 0
    cached_tokens: int = 0
    present_tokens: int = 0
    preemptions: int = 0
    outcome: str = ""


@dataclass(slots=True, kw_only=True)
class Timeline:
    """A request's record over all attempts. Grows until the request ends; then it is handed out with Finish.

    `instants` keeps the first of each kind, of LAST_TOKEN the last; an attempt's own are in its record.
    """

    request_id: int
    prompt_tokens: int
    output_tokens: int = 0
    instants: dict[Instant, float] = field(default_factory=dict)
    attempts: list[AttemptRecord] = field(default_factory=list)

    def mark(self, instant: Instant, now_s: float) -> None:
        """Notes an instant, here and in the attempt that runs now."""
        self.instants.setdefault(instant, now_s)
        if self.attempts:
            self.attempts[-1].instants.setdefault(instant, now_s)

    def mark_tokens(self, count: int, now_s: float) -> None:
        """Notes `count` tokens handed to the client."""
        self.output_tokens += count
        own = self.attempts[-1].instants if self.attempts else self.instants
        if _FIRST not in own:
            self.mark(_FIRST, now_s)
        self.instants[_LAST] = own[_LAST] = now_s
