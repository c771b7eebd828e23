"""What a benchmark is about to do, before it does it: how long it will take, and what it was not asked in that form."""

from __future__ import annotations

import heapq
from dataclasses import replace

from trtpd.perf.make_workload import Wanted
from trtpd.perf.workload import Workload

_UNITS = ((2 * 86400.0, 86400.0, "days"), (2 * 3600.0, 3600.0, "h"), (120.0, 60.0, "min"))


def clamped(wanted: Wanted) -> tuple[Wanted, str]:
    """A closed loop has no more users than there are requests; with a note where more were asked for."""
    users = wanted.concurrency
    if users is None or users <= wanted.requests:
        return wanted, ""
    note = f"--concurrency is {users:,} and there are {wanted.requests:,} requests: as many users ask one each"
    return replace(wanted, concurrency=max(wanted.requests, 1)), note


def how_long(workload: Workload, timeout_s: float) -> str:
    """Requests, when the last is due, and when all have ended at the latest, by the time-outs."""
    count = f"{len(workload.asks):,} request{'' if len(workload.asks) == 1 else 's'}"
    latest = f"at the latest {duration(latest_end_s(workload, timeout_s))} after the start"
    given_up = f"{latest}, as each is given up after {duration(timeout_s)}"
    if workload.concurrency is not None:
        users = min(workload.concurrency, sum(ask.after is None for ask in workload.asks))
        return f"{count} of {users:,} user{'' if users == 1 else 's'}, all ended {given_up}"
    sessions = any(ask.after is not None for ask in workload.asks)
    last = "the last session begins" if sessions else "the last due"
    return f"{count}, {last} {duration(workload.duration_s)} after the start, all ended {given_up}"


def latest_end_s(workload: Workload, timeout_s: float) -> float:
    """When the last request ends if each takes as long as it may."""
    spans: dict[int, float] = {}
    roots: list[int] = []
    begins_s: dict[int, float] = {}
    for number, ask in enumerate(workload.asks):
        root = number if ask.after is None else roots[ask.after]
        roots.append(root)
        if ask.after is None:
            begins_s[number], spans[number] = ask.at_s or 0.0, timeout_s
        else:
            begins_s[number] = begins_s[ask.after] + timeout_s + ask.think_s
            spans[root] = max(spans[root], begins_s[number] + timeout_s - begins_s[root])
    if workload.concurrency is None:
        return max((begins_s[root] + span for root, span in spans.items()), default=0.0)
    free_s = [0.0] * min(workload.concurrency, max(len(spans), 1))
    for span in spans.values():
        heapq.heapreplace(free_s, free_s[0] + span)
    return max(free_s)


def duration(seconds: float) -> str:
    """For people: 58 s, 12 min, 3.5 h, 23 days."""
    for least, unit_s, name in _UNITS:
        if seconds >= least:
            return f"{seconds / unit_s:,.0f} {name}" if seconds >= 10 * unit_s else f"{seconds / unit_s:.2g} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
