"""A load of several phases on a server of emulated engines, with what the server says of itself meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from trtpd.errors import TrtpdError
from trtpd.perf.client import Client, ClientOptions, Run
from trtpd.perf.goodput import DEFINITIONS
from trtpd.perf.process_cpu import rss_bytes
from trtpd.perf.prompt_text import Segment
from trtpd.perf.records import Record
from trtpd.perf.served import Served
from trtpd.perf.slo import FixedSlo
from trtpd.perf.triton_transport import TritonTransport
from trtpd.perf.workload import Ask, Workload
from trtpd.runtime.serve.client import status

SAMPLE_S = 1.0
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePhase:
    """`rate` requests a second for `seconds`, lengths in tokens drawn evenly from (least, most)."""

    name: str
    seconds: float
    rate: float
    prompt: tuple[int, int]
    output: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The server at one instant. `roles`: how many instances that are up have each; `rss_bytes` by kind of process."""

    at_s: float
    rung: int
    roles: dict[str, int]
    rss_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """What became of the requests that were due in a phase; by the definition trtpd of goodput.py."""

    name: str
    offered_per_s: float
    goodput_per_s: float
    verdicts: dict[str, int]


@dataclass(slots=True)
class Watcher:
    """Looks at a server once a second, in a thread of its own, between `with` and its end."""

    server: Served
    samples: list[Sample] = field(default_factory=list)
    misses: int = 0
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Watcher:
        self._thread = threading.Thread(target=self._look, name="watcher", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        began_s = time.monotonic()
        while not self._done.wait(SAMPLE_S):
            try:
                found = status(self.server.grpc)
            except TrtpdError:
                self.misses += 1
                continue
            up = [one["role"] for one in found["instances"].values() if one["state"] == "ready"]
            self.samples.append(
                Sample(
                    at_s=round(time.monotonic() - began_s, 1),
                    rung=found["ladder"]["rung"],
                    roles=dict(Counter(up)),
                    rss_bytes=rss_bytes(self.server.root),
                )
            )


def workload(name: str, phases: Sequence[LivePhase], seed: int) -> Workload:
    """Poisson arrivals, phase after phase; every prompt is its own."""
    rng, begin_s = random.Random(seed), 0.0
    asks: list[Ask] = []
    for phase in phases:
        at_s, end_s = begin_s, begin_s + phase.seconds
        while (at_s := at_s + rng.expovariate(phase.rate)) < end_s:
            own = Segment(seed=(seed << 32) + len(asks), tokens=rng.randint(*phase.prompt))
            asks.append(Ask(segments=(own,), max_tokens=rng.randint(*phase.output), kind=phase.name, at_s=at_s))
        begin_s = end_s
    return Workload(name=name, seed=seed, asks=tuple(asks))


def drive(server: Served, load: Workload, slo: FixedSlo) -> tuple[Run, Watcher]:
    """The whole load. Raises ServeError if the server can't be reached."""
    transport = TritonTransport(server.grpc, channels=4)
    client = Client(load, transport, ClientOptions(timeout_s=TIMEOUT_S, targets=slo))
    with Watcher(server) as watcher:
        run = asyncio.run(client.run())
    return run, watcher


def settle(server: Served, seconds: float) -> Watcher:
    """Looks on for a while after the load."""
    with Watcher(server) as watcher, contextlib.suppress(KeyboardInterrupt):
        time.sleep(seconds)
    return watcher


def by_phase(records: Sequence[Record], phases: Sequence[LivePhase], slo: FixedSlo) -> list[PhaseResult]:
    """Of each phase, in its order. Phases are told by the instants at which requests were due."""
    found, begin_s = [], 0.0
    for phase in phases:
        due = [record for record in records if begin_s <= record.scheduled_s < begin_s + phase.seconds]
        verdicts = Counter(DEFINITIONS["trtpd"].verdict(record, slo) for record in due)
        found.append(
            PhaseResult(
                name=phase.name,
                offered_per_s=round(len(due) / phase.seconds, 2),
                goodput_per_s=round(verdicts["good"] / phase.seconds, 2),
                verdicts=dict(sorted(verdicts.items())),
            )
        )
        begin_s += phase.seconds
    return found


def lost(records: Sequence[Record]) -> dict[str, int]:
    """Requests that neither finished nor were refused, by what happened to them."""
    return dict(Counter(f"{r.state}:{r.reason}" for r in records if r.state not in ("finished", "refused")))
