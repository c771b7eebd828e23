"""Finds the best of an ordered row of settings in few trials, where results rise to one peak and fall behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

FILLED = 0.9
"""With so much of what a setting could give at most, the peak is looked for above it first."""


def next_to_try(
    count: int,
    found: Mapping[int, float],
    *,
    first: int,
    stride: int = 1,
    most: Callable[[int], float] = lambda index: float("inf"),
) -> int | None:
    """The index in 0 .. `count` - 1 to try next, None once both neighbours of the best have been tried or can't be
    better than it. `most` bounds what an index could give, and rises with it. Steps of `stride` are halved behind the
    peak.

    At most `count` calls with growing `found` reach None, and it is never one that was tried.
    """
    if not found:
        return first
    best = max(found, key=lambda index: (found[index], -index))
    ways = (_between(best, +1, count, found, stride), _between(best, -1, count, found, stride))
    up, down = (one if one is not None and most(one) > found[best] else None for one in ways)
    upwards = found[best] >= FILLED * most(best) or most(best) == float("inf")
    return (up if up is not None else down) if upwards else (down if down is not None else up)


def _between(best: int, way: int, count: int, found: Mapping[int, float], stride: int) -> int | None:
    """The middle of what is untried between the best and the next that was tried on that side; `stride` away where
    none was, but inside the row. None where there is nothing."""
    beyond = [index for index in found if (index - best) * way > 0]
    if beyond:
        nearest = min(beyond, key=lambda index: abs(index - best))
        return (best + nearest) // 2 if abs(nearest - best) > 1 else None
    edge = count - 1 if way > 0 else 0
    return best + way * min(stride, abs(edge - best)) if edge != best else None
