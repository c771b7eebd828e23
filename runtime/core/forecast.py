"""What a new request would meet, if it were admitted now: how long its first token would take, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np

from trtpd.runtime.core.books import Books
from trtpd.runtime.core.events import Arrived
from trtpd.runtime.core.instance import Instance
from trtpd.runtime.core.message import message
from trtpd.runtime.core.ranks import CAUTION, Table, places_s
from trtpd.runtime.core.score import Work, spare_s, too_late

SAMPLED = 8
"""Decode instances whose sequences are looked at one by one; beyond that, they stand for the others."""


@message
class Forecast:
    """What a new request would meet. `wait_s`: prompts before its own, at the instances and in the queue, spread
    over all that prefill; `own_s`: its prefill and hand-off with nothing before it; `place_s`: until its prefill may
    begin because decode will have a place in which it keeps its TPOT target."""

    wait_s: float
    own_s: float
    place_s: float

    @property
    def ttft_s(self) -> float:
        return max(self.wait_s, self.place_s) + self.own_s


def forecast(arrived: Arrived, model: str, books: Books) -> Forecast:
    """For a request that would be admitted now."""
    books.settle()
    tables = books.cluster.prefillers(model)
    if not tables:
        return Forecast(wait_s=0.0, own_s=0.0, place_s=0.0)
    tokens = arrived.prompt_tokens
    short = books.policy.is_short(tokens)
    queued, rate = _queued(tables, short=short)
    own_s = min(tokens * table.stretch(tokens) / table.rates[1] for table in tables)
    queue = books.backlog.queues.get(model)
    ahead = len(queue) if queue is not None else 0
    before = 0
    if queue is not None and ahead:
        most = books.policy.short_tokens if short and all(map(_shorter_first, tables)) else None
        before = queue.tokens_ahead(arrived.priority, arrived.tenant, most_tokens=most)
    own_s += books.policy.handoff_s
    place_s = 0.0
    if arrived.ttft_s is not None or arrived.tpot_s is not None:
        line = Line(ahead=ahead, busy_s=queued / rate, each_s=before / rate / max(ahead, 1), own_s=own_s)
        place_s = _place_s(arrived, model, books, line)
    return Forecast(wait_s=(queued + before) / rate, own_s=own_s, place_s=place_s)


@message
class Line:
    """What a new request stands in. `ahead`: requests before it in the router; `busy_s`: until the prefill pool has
    done what it was given; `each_s`: what it spends on one of those ahead; `own_s`: as in Forecast."""

    ahead: int
    busy_s: float
    each_s: float
    own_s: float


def _place_s(arrived: Arrived, model: str, books: Books, line: Line) -> float:
    """Forecast.place_s; 0 while there is a place."""
    work = Work(
        prompt_tokens=arrived.prompt_tokens,
        total_tokens=arrived.prompt_tokens + arrived.max_tokens,
        left_tokens=books.lengths_of(model).left(0, arrived.max_tokens),
        tpot_s=arrived.tpot_s,
        hits={},
    )
    decoders = _decoders(books, model)
    room = [_room(table, work, books, line.own_s) for table in decoders]
    if any(open_now for _, open_now in room) and not (line.ahead and arrived.tpot_s):
        return 0.0
    if arrived.tpot_s is None or not any(fits for fits, _ in room):
        return place_wait_s(books, model, line.ahead + 1)
    return _turn_s(work, arrived.tpot_s, books, decoders, line)


def _room(table: Table, work: Work, books: Books, ready_s: float) -> tuple[bool, bool]:
    """Whether an instance there can hold it, and whether one can decode it in time, once it is prefilled."""
    fastest, ready_at_s = int(table.joined_s.argmin()), books.now_s + ready_s
    if (
        table.whole_fits.item(fastest) >= work.total_tokens
        and table.joined_s.item(fastest) <= (work.tpot_s or math.inf)
        and table.free_at_s.item(fastest) <= ready_at_s
    ):
        return True, True
    fits = table.whole_fits >= work.total_tokens
    late = too_late(table, work, books.cluster.costs, ready_at_s=ready_at_s)
    return bool(fits.any()), bool((fits if late is None else fits & ~late).any())


def _turn_s(work: Work, tpot_s: float, books: Books, decoders: list[Table], line: Line) -> float:
    """Seconds until its prefill begins, if each before it takes the next place that keeps a TPOT target, is begun as
    early as that allows, and its prefill follows the one before."""
    spare = max(float(spare_s(table, tpot_s, work.left_tokens).max()) for table in decoders)
    early_s = line.own_s + max(spare, 0.0)
    instances = [one for table in decoders for one in table.instances if table.capacity.item(one.row) >= 0.0]
    looked = instances[:: max(1, len(instances) // SAMPLED)]
    share = len(looked) / len(instances)
    free: list[tuple[float, float]] = []
    for one in looked:
        places, step_s = _places(one, tpot_s, books)
        taken = places_s(one, step_s, places)
        free += [(at_s, step_s) for at_s in [0.0] * (places - len(taken)) + taken]
    heapify(free)
    begins_s, each_s = line.busy_s, line.each_s / share
    for _ in range(int(line.ahead * share)):
        at_s, step_s = free[0]
        begins_s = max(begins_s, at_s - early_s)
        heapreplace(free, (max(at_s, begins_s + line.own_s) + work.left_tokens * step_s, step_s))
        begins_s += each_s
    return max(begins_s, free[0][0] - early_s)


def _places(one: Instance, tpot_s: float, books: Books) -> tuple[int, float]:
    """How many places of its batch keep a TPOT target, and a step of so many. While nobody knows how long its steps
    are, they are taken to be as long as may be."""
    one_s, each_s, places = one.table.one_s.item(one.row), one.table.each_s.item(one.row), one.hello.max_batch
    if not books.cluster.costs.known(one.hello, one.table.role):
        return places, tpot_s
    if one_s <= tpot_s and each_s > 0.0:
        places = max(1, min(places, 1 + int((tpot_s / CAUTION - one_s) / each_s)))
    return places, one_s + each_s * (min(one.sequences + 1, places) - 1)


def place_wait_s(books: Books, model: str, waiting: int) -> float:
    """Seconds until so many sequences have ended on decode; 0 where nobody knows."""
    ends_per_s = sum(map(_ends_per_s, _decoders(books, model)))
    return waiting / ends_per_s if ends_per_s > 0.0 else 0.0


def _decoders(books: Books, model: str) -> list[Table]:
    """Those that would decode a new request: decode and mixed instances that serve, or whatever does without
    them."""
    tables = [table for table in books.cluster.tables(model) if table.open]
    return [table for table in tables if table.role != "prefill"] or tables


def _ends_per_s(table: Table) -> float:
    """Sequences that end there a second, on the whole: each writes a token a step, and a usual answer takes as many
    steps as it has tokens. Where those that run have more than that left, so many."""
    busy = (table.sequences > 0.0) & (table.capacity >= 0.0)
    if not busy.any():
        return 0.0
    sequences = table.sequences[busy]
    batch = np.fromiter((instance.hello.max_batch for instance in table.instances), float, len(table))[busy]
    inside = np.minimum(sequences, batch)
    step_s = table.one_s[busy] + table.each_s[busy] * (inside - 1.0)
    left = np.maximum(table.left[busy] / sequences, 1.0)
    left = np.clip(table.usual_tokens, left, 2.0 * left)  # one that runs has half of its answer left on average
    return float((inside / (left * np.maximum(step_s, 1e-6))).sum())


def backlog_s(books: Books, model: str) -> float:
    """Seconds of prefill that stand before a new request of the lowest claim."""
    books.settle()
    queued, rate = _queued(books.cluster.prefillers(model))
    return (queued + books.backlog.tokens_of(model)) / rate if rate > 0.0 else 0.0


def _shorter_first(table: Table) -> bool:
    """The instances of a table are of one build."""
    return table.instances[0].hello.capabilities.shorter_first


def _queued(tables: Sequence[Table], *, short: bool = False) -> tuple[float, float]:
    """Prompt tokens before one more at all instances there, and how many a second they compute together."""
    queues = [table.queue(short=short) for table in tables]
    return sum(waiting for waiting, _ in queues), sum(rate for _, rate in queues)
