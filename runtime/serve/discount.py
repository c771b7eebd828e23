"""Keeps requests of our own (the probe before `pd` serves) out of what status and metrics count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

OF_REQUESTS = ("arrived", "finished", "transfers", "transfer_bytes", "output_tokens")
"""Those of the router's counters that every request that is served adds to. What went wrong meanwhile stays counted."""
BY_REASON = ("finished", "placed")


class Discount:
    """Not under way until `begin`. While `under_way`, the counters aren't to be passed on."""

    def __init__(self) -> None:
        self.under_way = False
        self._before: Mapping[str, Any] = {}
        self._counters: Counter[str] = Counter()
        self._reasons: dict[str, Counter[str]] = {part: Counter() for part in BY_REASON}

    def begin(self, router: Mapping[str, Any]) -> None:
        """`router`, here and below, is RouterCore.snapshot()."""
        self.under_way, self._before = True, router

    def end(self, router: Mapping[str, Any]) -> None:
        """What was counted since `begin` is discounted from now on."""
        grown = _grown(self._before["counters"], router["counters"])
        self._counters += Counter({name: grown[name] for name in OF_REQUESTS})
        for part, counts in self._reasons.items():
            counts += _grown(self._before[part], router[part])
        self.under_way = False

    def applied(self, router: Mapping[str, Any]) -> dict[str, Any]:
        """The snapshot without what is discounted."""
        counters = {name: number - self._counters[name] for name, number in router["counters"].items()}
        parts = {
            part: {reason: number - counts[reason] for reason, number in router[part].items()}
            for part, counts in self._reasons.items()
        }
        return {**router, **parts, "counters": counters}


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> Counter[str]:
    return Counter({name: number - before.get(name, 0) for name, number in after.items()})
