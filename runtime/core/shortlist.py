"""The best few of each side, of which pairs are made. Pure."""

from __future__ import annotations

import numpy as np

from trtpd.runtime.core.ranks import Floats, Mask

SHORTLIST = 8
"""Instances of each side that are scored as pairs."""

Shortlist = list[tuple[float, int]]
"""(score, row) of the best of one side, ascending."""

Pair = tuple[float, int, int]
"""(score, row of the source, row of the sink)."""


def shortlist(scores: Floats) -> Shortlist:
    """The best of all."""
    if len(scores) > SHORTLIST:
        rows = scores.argpartition(SHORTLIST - 1)[:SHORTLIST]
        return sorted(zip(scores[rows].tolist(), rows.tolist(), strict=False))
    return sorted(zip(scores.tolist(), range(len(scores)), strict=False))


def least(column: Floats, found: Shortlist) -> float:
    return min(map(column.item, [row for _, row in found]), default=0.0)


def of_those_that_fit(scores: Floats, unfit: Mask) -> Shortlist:
    """The best of those that fit. Takes `scores` over."""
    scores[unfit] = np.inf
    return [entry for entry in shortlist(scores) if entry[0] < np.inf]


def by_host(
    sources: Shortlist, sinks: Shortlist, source_hosts: list[int], sink_hosts: list[int], near_s: float, far_s: float
) -> Pair:
    """The best pair where all links are up and all instances of a host are equally near. The best sink for a source is
    the best of all, or the best on its own host, where moving costs less (`near_s` is at most `far_s`)."""
    sink_s, sink_row = sinks[0]
    source_s, row = sources[0]
    sink_host = sink_hosts[sink_row]
    if source_hosts[row] == sink_host or near_s == far_s:
        return (source_s + sink_s + near_s, row, sink_row)
    best: Pair = (source_s + sink_s + far_s, row, sink_row)
    bound_s = best[0]
    mates = {sink_hosts[entry[1]]: entry for entry in reversed(sinks)}
    for source_s, row in sources:
        if source_s + sink_s + near_s >= bound_s:
            break
        mate = mates.get(source_hosts[row])
        if mate is not None:
            score_s = source_s + mate[0] + near_s
            if score_s < bound_s:
                best, bound_s = (score_s, row, mate[1]), score_s
    return best
