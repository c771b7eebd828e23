"""Pace: how long moving some bytes may take, from the rate measured so far."""

from __future__ import annotations

SLACK_S = 2.0
SLOWER = 8.0
UNMEASURED_BYTES_PER_S = 32e6


class Pace:
    """The rate of one peer. A transfer may be SLOWER times slower than usual, and SLACK_S for a machine that is
    busy; never longer than the lease, after which the bytes would be of no use. A request's own deadline ends its pull
    by an abort."""

    def __init__(self) -> None:
        self._bytes_per_s = UNMEASURED_BYTES_PER_S
        self._measured = False

    def timeout_s(self, size_bytes: int, *, lease_s: float) -> float:
        return min(SLACK_S + SLOWER * size_bytes / self._bytes_per_s, max(lease_s, SLACK_S))

    def measured(self, size_bytes: int, seconds: float) -> None:
        """So many bytes have come in so long. Small ones say little of the rate."""
        if size_bytes < 1 << 16 or seconds <= 0:
            return
        rate = size_bytes / seconds
        self._bytes_per_s = rate if not self._measured else 0.75 * self._bytes_per_s + 0.25 * rate
        self._measured = True
