"""Instants at which something is due, and the fewest wake-ups that serve them."""

from __future__ import annotations

import heapq
from collections.abc import Callable

EARLY_S = 0.001
"""A driver's timer may fire this much before its instant; such a Tick uses up its WakeAt all the same."""


def _nothing() -> None:
    """What is left to do for a timer that is done."""


class Timer:
    """One due instant. Held by whoever may want to cancel it. It lets go of its action once it is cancelled or has
    fired: that is often the last to keep its holder."""

    __slots__ = ("action", "at_s", "cancelled")

    def __init__(self, at_s: float, action: Callable[[], None]) -> None:
        self.at_s = at_s
        self.action = action
        self.cancelled = False


class Timers:
    """A heap of timers. Cancelled ones are dropped when they surface, or all at once when they are the
    majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._cancelled = 0
        self._announced: list[float] = []

    def __len__(self) -> int:
        return len(self._heap) - self._cancelled

    def at(self, at_s: float, action: Callable[[], None]) -> Timer:
        timer = Timer(at_s, action)
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, timer))
        return timer

    def cancel(self, timer: Timer) -> None:
        """Idempotent. A timer that has fired counts as cancelled."""
        if timer.cancelled:
            return
        timer.cancelled, timer.action = True, _nothing
        self._cancelled += 1
        if self._cancelled > 64 and self._cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].cancelled]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def fire(self, now_s: float) -> None:
        """Runs everything due by `now_s`, earliest first. Actions may add timers; one due already runs
        too."""
        while self._heap and self._heap[0][0] <= now_s:
            timer = heapq.heappop(self._heap)[2]
            if timer.cancelled:
                self._cancelled -= 1
            else:
                action, timer.action = timer.action, _nothing
                timer.cancelled = True
                action()

    def next_s(self) -> float | None:
        """The earliest instant at which something is due."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def wake_s(self, now_s: float, *, ticked: bool) -> float | None:
        """The instant to ask a wake-up for, or None if one that was asked for comes in time.

        `ticked`: a Tick came at `now_s`, which may answer a wake-up that is a hair later.
        """
        horizon_s = now_s + EARLY_S if ticked else now_s
        while self._announced and self._announced[0] <= horizon_s:
            heapq.heappop(self._announced)
        due_s = self.next_s()
        if due_s is None or (self._announced and self._announced[0] <= due_s):
            return None
        heapq.heappush(self._announced, due_s)
        return due_s
