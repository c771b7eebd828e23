"""Leases: until when prefill keeps KV for decode, and until when decode may rely on it.

The source's lease runs from when it RECEIVED a renewal, the sink's from when it SENT one that the source is
known to have received. Receiving comes after sending, so the sink's lease always ends first, and a clock that
both share (CLOCK_MONOTONIC on one host) is not even needed: only that both run at the same rate.
"""

from __future__ import annotations

import hashlib
from collections import deque

from trtpd.errors import CapacityError
from trtpd.kv_transfer.pool import SharedPool

RENEWALS_PER_LEASE = 4


class SourceLease:
    """Prefill's side of one hold. It can't lapse before the seal: until then its own engine computes it."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._until_s: float | None = None
        self._newest_sent_s = float("-inf")

    def sealed(self, now_s: float) -> None:
        """The lease runs from here."""
        self._until_s = now_s + self._lease_s

    def received(self, *, sent_s: float, now_s: float) -> bool:
        """A renewal has come in. False, and no effect, for one that is not newer than the newest seen."""
        if sent_s <= self._newest_sent_s:
            return False
        self._newest_sent_s = sent_s
        if self._until_s is not None:
            self._until_s = max(self._until_s, now_s + self._lease_s)
        return True

    def lapsed(self, now_s: float) -> bool:
        return self._until_s is not None and now_s >= self._until_s


class SinkLease:
    """Decode's side of one pull."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._until_s = float("-inf")
        self._sent_s = float("-inf")

    def due_s(self) -> float:
        """When the next renewal is to be sent."""
        return self._sent_s + self._lease_s / RENEWALS_PER_LEASE

    def sent(self, now_s: float) -> None:
        self._sent_s = max(self._sent_s, now_s)

    def confirmed(self, *, sent_s: float) -> None:
        """The source has received, while it still held, the renewal sent at `sent_s`."""
        self._until_s = max(self._until_s, sent_s + self._lease_s)

    def holds(self, now_s: float) -> bool:
        return now_s < self._until_s


def lease_tag(request_id: int, attempt: int, generation: str) -> int:
    """The triple that fences an attempt as one 64-bit number, never 0."""
    text = f"{request_id}:{attempt}:{generation}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1


_GRANTED, _RENEWED, _SENT_NS, _CHECK = range(4)


class LeaseSlots:
    """The source's side of the lease slots in its pool: which slot is granted to which attempt.

    A slot's words: the tag granted (the source writes it; 0 when none), then what the sink writes: its tag,
    when it sent this renewal (CLOCK_MONOTONIC, ns), and both xor-ed, which tells a torn write.
    """

    def __init__(self, pool: SharedPool) -> None:
        self._words = pool.leases
        self._free = deque(range(len(self._words)))  # first in, first out: a late write meets an idle slot

    def grant(self, tag: int) -> int:
        """The slot. Raises CapacityError when all are taken."""
        if not self._free:
            raise CapacityError(f"all {len(self._words)} lease slots are taken: end holds before offering more")
        slot = self._free.popleft()
        self._words[slot] = 0
        self._words[slot, _GRANTED] = tag
        return slot

    def regrant(self, slot: int, tag: int) -> None:
        """Undoes `suspend`."""
        self._words[slot, _GRANTED] = tag

    def suspend(self, slot: int) -> None:
        """Readers see no grant from here on; the slot is still taken."""
        self._words[slot, _GRANTED] = 0

    def give_back(self, slot: int) -> None:
        self._words[slot, _GRANTED] = 0
        self._free.append(slot)

    def sent_s(self, slot: int, tag: int) -> float | None:
        """When the newest renewal of this attempt was sent; None if there was none."""
        _, renewed, sent_ns, check = self._words[slot, :4].tolist()
        return sent_ns / 1e9 if renewed == tag and check == tag ^ sent_ns else None

    def close(self) -> None:
        """Lets go of the pool's memory."""
        self._words = self._words[:0].copy()
        self._free.clear()


def write_renewal(pool: SharedPool, slot: int, tag: int, *, sent_s: float) -> bool:
    """The sink's side: renews in the source's pool. True if the source (still) grants this attempt the slot,
    which, since the source looks for renewals after it has suspended a grant, confirms the renewal."""
    sent_ns = int(sent_s * 1e9)
    words = pool.leases[slot]
    words[_RENEWED], words[_SENT_NS], words[_CHECK] = tag, sent_ns, tag ^ sent_ns
    return is_granted(pool, slot, tag)


def is_granted(pool: SharedPool, slot: int, tag: int) -> bool:
    return int(pool.leases[slot, _GRANTED]) == tag
