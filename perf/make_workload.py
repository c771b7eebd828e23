"""Workloads by name: lengths and sharing of usual kinds of traffic, or a trace, with arrivals of a given shape.

Lengths are log-normal with the medians below (tokens, before fitting), in the range of published traces; what a
given service sees differs, and `trace:FILE` replays it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from trtpd.build.files import expanded
from trtpd.errors import InputError
from trtpd.perf.arrivals import Arrivals, check_rate
from trtpd.perf.lengths import LengthFit
from trtpd.perf.prompt_text import Segment
from trtpd.perf.traces import TraceOptions, parse_columns, read_trace, trace_path
from trtpd.perf.workload import Ask, Workload, check_seed, closed_loop, is_saved, load

ZIPF = 1.1
RAG_POOL = 64
LONG_SHARE = 0.2
MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to make. `name`: a key of KINDS, `trace:SLICE`, `trace:FILE`, or a saved workload's file (.jsonl or
    .jsonl.gz), which is replayed as it is and ignores all the rest.

    Open loop with `rate` (None for a trace: its own instants; else needed), or closed loop with `concurrency`.
    """

    name: str
    requests: int = 200
    seed: int = 0
    rate: float | None = None
    concurrency: int | None = None
    arrivals: Arrivals | None = None
    fit: LengthFit = field(default_factory=LengthFit)
    trace: TraceOptions = field(default_factory=TraceOptions)


class _Draw:
    """Lengths and seeds of one workload."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 1])
        self._seed = seed
        self._segments = 0

    def tokens(self, median: float, sigma: float, *, least: int = 1) -> int:
        return max(least, round(math.exp(self.rng.normal(math.log(median), sigma))))

    def own(self, tokens: int) -> Segment:
        """Text that no other segment has."""
        self._segments += 1
        return Segment(seed=(self._seed << 32) + (1 << 31) + self._segments, tokens=tokens)

    def shared(self, number: int, tokens: int) -> Segment:
        """The same text for the same number."""
        return Segment(seed=(self._seed << 32) + number, tokens=tokens)


def _chat(draw: _Draw, count: int) -> list[Ask]:
    return [
        Ask(segments=(draw.own(draw.tokens(250, 0.8)),), max_tokens=draw.tokens(120, 0.6, least=2), kind="chat")
        for _ in range(count)
    ]


def _rag(draw: _Draw, count: int) -> list[Ask]:
    """A fixed instruction, then three to five passages of a pool in which a few are asked for often."""
    sizes = [draw.tokens(300, 0.3) for _ in range(RAG_POOL)]
    odds = np.arange(1, RAG_POOL + 1) ** -ZIPF
    odds /= odds.sum()
    asks = []
    for _ in range(count):
        passages = draw.rng.choice(RAG_POOL, size=int(draw.rng.integers(3, 6)), replace=False, p=odds)
        parts = [draw.shared(1, 80)]
        parts += [draw.shared(100 + int(number), sizes[int(number)]) for number in passages]
        parts.append(draw.own(draw.tokens(30, 0.4)))
        asks.append(Ask(segments=tuple(parts), max_tokens=draw.tokens(90, 0.5, least=2), kind="rag"))
    return asks


def _code(draw: _Draw, count: int) -> list[Ask]:
    """Completions: much to read, little to write (Azure 2023 code: medians 1,469 and 13)."""
    return [
        Ask(segments=(draw.own(draw.tokens(1469, 0.9)),), max_tokens=draw.tokens(16, 0.8, least=2), kind="code")
        for _ in range(count)
    ]


def _summarise(draw: _Draw, count: int) -> list[Ask]:
    return [
        Ask(
            segments=(draw.shared(2, 60), draw.own(draw.tokens(3000, 0.35))),
            max_tokens=draw.tokens(150, 0.4, least=2),
            kind="summarise",
        )
        for _ in range(count)
    ]


def _mixed(draw: _Draw, count: int) -> list[Ask]:
    """Chats, and among them one long prompt in five: what makes prefill and decode hurt each other."""
    long = draw.rng.random(count) < LONG_SHARE
    chats, summaries = iter(_chat(draw, int((~long).sum()))), iter(_summarise(draw, int(long.sum())))
    return [next(summaries) if one else next(chats) for one in long]


def _agent(draw: _Draw, count: int) -> list[Ask]:
    """Sessions of three to eight turns behind one instruction with its tools. A turn's prompt is the former one, its
    answer and what a tool gave; the answer stands in it as text of its length, since what the model will say isn't
    known beforehand."""
    asks: list[Ask] = []
    while len(asks) < count:
        history = [draw.shared(3, 600), draw.own(draw.tokens(80, 0.5))]
        after: int | None = None
        for _ in range(min(int(draw.rng.integers(3, 9)), count - len(asks))):
            think_s = 0.0 if after is None else float(draw.rng.exponential(0.5))
            answer = draw.tokens(60, 0.4, least=2)
            asks.append(Ask(segments=tuple(history), max_tokens=answer, kind="agent", after=after, think_s=think_s))
            after = len(asks) - 1
            history += [draw.own(answer), draw.own(draw.tokens(150, 0.7))]
    return asks


KINDS: dict[str, Callable[[_Draw, int], list[Ask]]] = {
    "chat": _chat,
    "rag": _rag,
    "code": _code,
    "summarise": _summarise,
    "mixed": _mixed,
    "agent": _agent,
}


def make(wanted: Wanted) -> Workload:
    """The same for the same `wanted`. Raises InputError for an unknown name, a bad file, or rate and concurrency
    that don't fit together."""
    if is_saved(wanted.name):
        return load(expanded(wanted.name))
    check_wanted(wanted)
    asks, found = _asks(wanted)
    asks, changes = wanted.fit.apply(asks)
    notes = (*found, *changes)
    if wanted.concurrency is not None:
        timed: Sequence[Ask] = closed_loop(asks)
        notes += (f"closed loop of {wanted.concurrency}",)
    else:
        timed, note = _timed(asks, wanted)
        notes += (note,)
    return Workload(name=wanted.name, seed=wanted.seed, asks=tuple(timed), concurrency=wanted.concurrency, notes=notes)


def check_wanted(wanted: Wanted) -> None:
    """Raises InputError for what can be seen to be wrong before a server is asked or a file is read: values that can't
    be, and such that would have no effect beside others."""
    if is_saved(wanted.name):
        return
    if not wanted.name.startswith("trace:") and wanted.name not in KINDS:
        raise InputError(
            f"workload {wanted.name!r} is not known; choose {', '.join(KINDS)}, trace:azure-code, trace:azure-conv, "
            "trace:mooncake, trace:FILE, or a saved .jsonl"
        )
    check_seed(wanted.seed)
    if wanted.rate is not None:
        check_rate(wanted.rate)
    if not 1 <= wanted.requests <= MOST_REQUESTS:
        raise InputError(f"{wanted.requests} requests; there must be at least 1 and at most {MOST_REQUESTS:,}")
    if wanted.concurrency is not None and (wanted.concurrency < 1 or wanted.rate is not None):
        fault = "a rate is given too" if wanted.rate is not None else "it must be at least 1"
        raise InputError(f"concurrency is {wanted.concurrency} and {fault}; give a rate or a concurrency of 1 or more")
    if wanted.concurrency is not None and wanted.arrivals is not None:
        raise InputError(
            f"--arrivals {wanted.arrivals} and --concurrency {wanted.concurrency}: users of a closed loop ask when "
            "they are free; give one of the two"
        )
    _check_trace_options(wanted)


def _check_trace_options(wanted: Wanted) -> None:
    trace, default = wanted.trace, TraceOptions()
    if not wanted.name.startswith("trace:"):
        for option, value, usual in (
            ("--time-scale", trace.time_scale, default.time_scale),
            ("--trace-offset", trace.offset, default.offset),
            ("--columns", trace.columns, default.columns),
        ):
            if value != usual:
                raise InputError(f"{option} {value} and --workload {wanted.name}: it is for a trace, trace:NAME alone")
        return
    if trace.columns is not None:
        parse_columns(trace.columns)
    trace_path(wanted.name.removeprefix("trace:"))
    if trace.time_scale != default.time_scale:
        others: Sequence[tuple[str, object, str]] = (
            ("--rate", wanted.rate, "stretches the trace's instants to its mean"),
            ("--arrivals", wanted.arrivals, "gives other instants than the trace's"),
            ("--concurrency", wanted.concurrency, "asks at no instants"),
        )
        for option, given, why in others:
            if given is not None:
                raise InputError(
                    f"--time-scale {trace.time_scale:g} and {option} {given}: {option} {why}, whatever the scale; give "
                    "one of the two"
                )


def _asks(wanted: Wanted) -> tuple[list[Ask], tuple[str, ...]]:
    """And notes on what is missing."""
    if wanted.name.startswith("trace:"):
        return read_trace(wanted.name.removeprefix("trace:"), wanted.trace, limit=wanted.requests)
    return KINDS[wanted.name](_Draw(wanted.seed), wanted.requests), ()


def _timed(asks: Sequence[Ask], wanted: Wanted) -> tuple[list[Ask], str]:
    """Instants for those that follow no other. In sessions the rate counts every turn. A trace keeps its own if no
    other arrivals are wanted; rows of one instant have no shape that could be stretched to a rate, and are asked as a
    workload without instants is."""
    first = [number for number, ask in enumerate(asks) if ask.after is None]
    traced = asks[first[0]].at_s is not None
    shapeless = traced and all(ask.at_s == asks[0].at_s for ask in asks)
    if wanted.arrivals is None and traced and not (shapeless and wanted.rate is not None):
        timed, note = _at_trace_times(asks, wanted)
        return timed, f"{note} ({_rows(len(asks))} at one instant)" if shapeless else note
    if wanted.rate is None:
        raise InputError(f"workload {wanted.name} needs a rate (requests/s) or a concurrency; give --rate R")
    arrivals = wanted.arrivals or Arrivals()
    rate = wanted.rate * len(first) / len(asks)
    instants = arrivals.instants(len(first), rate, np.random.default_rng([wanted.seed, 2]))
    when = dict(zip(first, (round(float(one), 6) for one in instants), strict=True))
    timed = [msgspec.structs.replace(ask, at_s=when.get(number)) for number, ask in enumerate(asks)]
    note = f"{wanted.rate:g} requests/s, {arrivals}"
    if wanted.arrivals is None and shapeless:
        note += f" (the trace has {_rows(len(asks))} at one instant, which nothing stretches to a rate)"
    return timed, note


def _rows(count: int) -> str:
    return "this one row" if count == 1 else f"all these {count} rows"


def _at_trace_times(asks: Sequence[Ask], wanted: Wanted) -> tuple[list[Ask], str]:
    """The trace's own instants, stretched to the wanted mean rate if there is one."""
    span_s = max(ask.at_s or 0.0 for ask in asks)
    factor = 1.0
    if wanted.rate is not None and span_s > 0.0:
        factor = (len(asks) / wanted.rate) / span_s
    timed = [msgspec.structs.replace(ask, at_s=round((ask.at_s or 0.0) * factor, 6)) for ask in asks]
    scale = wanted.trace.time_scale * factor
    return timed, f"the trace's own instants, times {scale:.4g}"
