"""A request's life: its states and its instants. Metrics, timelines, benchmark and simulator use these names."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """QUEUED → PREFILLING → TRANSFERRING → DECODING → FINISHED, and from any of them the three other ends.

    With prefill and decode on one instance (local), TRANSFERRING is skipped.
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
