"""How long answers get: seen lengths, forgotten slowly, and what they say of one that is being written."""

from __future__ import annotations

from bisect import bisect_right

EDGES = tuple(sorted({round(2 ** (step / 2)) for step in range(35)}))
"""Upper ends of the buckets, each about 1.4 times the one before; the last is 131,072."""

HALF_LIFE = 2048
"""Answers after which older ones count half."""

PRIOR_WEIGHT = 4.0
"""The guess without any seen answer (half of what is allowed) counts as so many."""


class Lengths:
    """Lengths of the answers of one model, in buckets. Every method is O(1) but for the few buckets."""

    def __init__(self) -> None:
        self._counts = [0.0] * (len(EDGES) + 1)
        self._sums = [0.0] * (len(EDGES) + 1)
        self._noted = 0
        self._above: list[tuple[float, float]] | None = None

    def note(self, tokens: int) -> bool:
        """An answer ended of itself or at its bound, after so many tokens. True now and then: what is expected may
        have changed."""
        bucket = bisect_right(EDGES, tokens - 1)
        self._counts[bucket] += 1.0
        self._sums[bucket] += tokens
        self._noted += 1
        if self._noted % HALF_LIFE == 0:
            self._counts = [count / 2 for count in self._counts]
            self._sums = [total / 2 for total in self._sums]
        if self._noted >= 64 and self._noted % 32:
            return False
        self._above = None
        return True

    def usual(self) -> float:
        """The mean answer."""
        return sum(self._sums) / sum(self._counts)

    def left(self, done_tokens: int, most_tokens: int) -> float:
        """How many more tokens to expect of an answer that has `done_tokens` and may have `most_tokens`."""
        bound = most_tokens - done_tokens
        if bound <= 1:
            return float(max(bound, 0))
        if self._above is None:
            self._above = self._suffixes()
        count, total = self._above[bisect_right(EDGES, done_tokens)]
        guess = done_tokens + bound / 2
        expected = (total + PRIOR_WEIGHT * guess) / (count + PRIOR_WEIGHT) - done_tokens
        return min(max(expected, 1.0), float(bound))

    def _suffixes(self) -> list[tuple[float, float]]:
        """For each bucket, count and sum of the answers in it and above."""
        found, count, total = [], 0.0, 0.0
        for bucket_count, bucket_sum in zip(reversed(self._counts), reversed(self._sums), strict=True):
            count, total = count + bucket_count, total + bucket_sum
            found.append((count, total))
        return found[::-1]
