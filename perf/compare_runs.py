"""Variants of a comparison served and driven: each behind one start of its server, within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from trtpd.perf.arrivals import parse
from trtpd.perf.bench import BenchOptions, Target, drive
from trtpd.perf.client import Progress, Run
from trtpd.perf.compare_arms import Variant, build_variant
from trtpd.perf.lengths import LengthFit
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.outside_server import outside
from trtpd.perf.priority import before_others
from trtpd.perf.served import served
from trtpd.perf.workload import Ask, Workload

TUNING_SEED = 7919
LEAST_REQUESTS = 20
SERVER_START_S = 12.0


class OutOfBudgetError(Exception):
    """No further step fits into the budget; what is there is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """A run to its end, the CPU seconds of each kind of process meanwhile, and the client's priority."""

    run: Run
    cpu_s: dict[str, float]
    client_nice: int


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What all runs of a comparison share. `build`: what variants are made from, below `folder`. `wanted` gives the
    workload (its rate is replaced), a point lasts about `point_s`, and no step begins that would not end by `end_s` of
    the monotonic clock."""

    build: Path
    folder: Path
    wanted: Wanted
    point_s: float
    longest_tokens: int
    end_s: float
    progress: Progress

    @cached_property
    def sample(self) -> tuple[Ask, ...]:
        """Requests like those that will be asked, of which only lengths and kinds matter."""
        return make(self.wanted_at(1.0, TUNING_SEED)).asks

    def wanted_at(self, rate: float, seed: int, *, part: float = 1.0) -> Wanted:
        """What is asked at a rate, for that part of a point."""
        wanted = self.wanted
        fit: LengthFit = wanted.fit
        if fit.max_total_tokens is None:
            fit = replace(fit, max_total_tokens=self.longest_tokens)
        requests = max(LEAST_REQUESTS, round(rate * self.point_s * part))
        arrivals = wanted.arrivals or (None if wanted.name.startswith("trace:") else parse("poisson"))
        return replace(wanted, rate=rate, requests=requests, seed=seed, fit=fit, arrivals=arrivals)

    def afford(self, seconds: float) -> None:
        """Raises OutOfBudgetError if that doesn't fit any more."""
        if time.monotonic() + seconds > self.end_s:
            raise OutOfBudgetError

    @contextmanager
    def serve(self, variant: Variant) -> Iterator[Target]:
        """Built if need be. Raises TrtpdError if it can't be built or doesn't get ready."""
        arms = self.folder / "arms"
        arms.mkdir(parents=True, exist_ok=True)
        log = arms / f"{variant.folder}.log"
        if variant.command:
            with outside(variant.command, log) as target:
                yield target
        else:
            with served(build_variant(variant, self.build, arms), log=log) as server:
                yield Target(url=server.grpc)

    @contextmanager
    def served_when_needed(self, variant: Variant) -> Iterator[Callable[[], Target]]:
        """Gives what starts the server at its first call, so that nothing is started where nothing is missing."""
        with ExitStack() as stack:
            started: list[Target] = []

            def target() -> Target:
                if not started:
                    self.afford(SERVER_START_S)
                    started.append(stack.enter_context(self.serve(variant)))
                return started[0]

            yield target

    def drive(self, target: Target, workload: Workload, name: str, *, timeout_s: float = 120.0) -> Driven:
        """Targets are not sent: no arm gets to choose its requests by them. Raises KeyboardInterrupt if the run was: it
        is no point then."""
        options = BenchOptions(target=target, wanted=self.wanted, send_targets=False, timeout_s=timeout_s)
        with before_others() as nice:
            run, cpu_s = drive(options, workload, self._named(name))
        if run.info.interrupted:
            raise KeyboardInterrupt
        return Driven(run=run, cpu_s=cpu_s, client_nice=nice)

    def _named(self, name: str) -> Progress:
        """Progress of one run's requests, under its own name."""
        return lambda stage, done, total: self.progress(name, done, total) if stage == "requests" else None
