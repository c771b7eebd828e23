"""Variants of a comparison served and driven: each behind one start of its server, within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from trtpd.errors import TrtpdError
from trtpd.perf.arrivals import parse
from trtpd.perf.bench import BenchOptions, Target, drive
from trtpd.perf.client import Progress, Run
from trtpd.perf.client_health import BottleneckError, refuse_if_bottleneck
from trtpd.perf.compare_arms import Variant, build_variant
from trtpd.perf.compare_budget import Budget, Step
from trtpd.perf.compare_stretch import Stretch, stretch
from trtpd.perf.lengths import AUTO_QUANTILE, LengthFit
from trtpd.perf.make_workload import MOST_REQUESTS, Wanted, make
from trtpd.perf.outside_server import outside
from trtpd.perf.priority import before_others
from trtpd.perf.process_cpu import machine_busy_s
from trtpd.perf.served import served
from trtpd.perf.slo import FixedSlo, Slo
from trtpd.perf.traces import read_trace
from trtpd.perf.workload import Ask, Workload

TUNING_SEED = 7919
"""The tuning's seed lies so far behind the first repeat's."""
LEAST_REQUESTS = 20
OTHERS_SHARE = 0.1
"""Of the cores compared: what other work may take of them in a run that counts."""


class DisturbedError(TrtpdError):
    """Nothing that was measured can be used."""

    code = "disturbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """A run to its end, the CPU seconds of each kind of process meanwhile, the client's priority, and the cores that
    other work took."""

    run: Run
    cpu_s: dict[str, float]
    client_nice: int
    others_cores: float


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What all runs of a comparison share. `build`: what variants are made from, below `folder`. `wanted` gives the
    workload (its rate is replaced), a point lasts `point_s` unless that would be fewer than LEAST_REQUESTS requests,
    and no step begins that would not end within `budget`. `cores`: how many CPUs are compared."""

    build: Path
    folder: Path
    wanted: Wanted
    point_s: float
    longest_tokens: int
    budget: Budget
    cores: int
    progress: Progress

    @cached_property
    def sample(self) -> tuple[Ask, ...]:
        """Requests like those that will be asked, of which only lengths and kinds matter."""
        return make(self._like_all(self.fit)).asks

    @cached_property
    def fit(self) -> LengthFit:
        """Lengths bounded by what the server can hold, and one factor for all runs where it was left open: each run's
        own requests would give it another."""
        bound = self.wanted.fit.max_total_tokens or self.longest_tokens
        fit = replace(self.wanted.fit, max_total_tokens=bound)
        if fit.scale is not None:
            return fit
        asks = make(self._like_all(LengthFit(scale=1.0))).asks
        usual = float(np.percentile([ask.total_tokens for ask in asks], AUTO_QUANTILE))
        return replace(fit, scale=min(1.0, bound / usual))

    def _like_all(self, fit: LengthFit) -> Wanted:
        """The tuning's requests, of a trace all there are, since each run has its own."""
        asked = self._asked(1.0, None, part=1.0, fit=fit)
        if self.trace_rows is None:
            return asked
        return replace(asked, requests=self.trace_rows, trace=self.wanted.trace)

    @cached_property
    def trace_rows(self) -> int | None:
        """How many requests the trace has; None for a workload that is none."""
        if not self.wanted.name.startswith("trace:"):
            return None
        asks, _ = read_trace(self.wanted.name.removeprefix("trace:"), self.wanted.trace, limit=MOST_REQUESTS)
        return len(asks)

    def asked(self, rate: float, repeat: int | None, *, part: float = 1.0) -> Wanted:
        """What is asked at a rate, for that part of a point. `repeat` None: by the tuning, whose requests are others
        than those of any repeat: of another seed, of a trace another stretch if that is long enough."""
        return self._asked(rate, repeat, part=part, fit=self.fit)

    def _asked(self, rate: float, repeat: int | None, *, part: float, fit: LengthFit) -> Wanted:
        wanted = self.wanted
        requests = max(LEAST_REQUESTS, round(rate * self.point_s * part))
        arrivals = wanted.arrivals or (None if self.trace_rows is not None else parse("poisson"))
        rows = self.stretch(requests, repeat)
        trace = wanted.trace if rows is None else replace(wanted.trace, offset=wanted.trace.offset + rows.first)
        seed = wanted.seed + (TUNING_SEED if repeat is None else repeat)
        return replace(wanted, rate=rate, requests=requests, seed=seed, fit=fit, arrivals=arrivals, trace=trace)

    def stretch(self, requests: int, repeat: int | None) -> Stretch | None:
        """Of the trace, rows counted from the offset that was wanted; None without a trace."""
        if self.trace_rows is None:
            return None
        return stretch(self.trace_rows, requests, 0 if repeat is None else repeat + 1)

    @contextmanager
    def serve(self, variant: Variant) -> Iterator[Target]:
        """Built if need be. Raises TrtpdError if it can't be built or doesn't get ready."""
        arms = self.folder / "arms"
        arms.mkdir(parents=True, exist_ok=True)
        log = arms / f"{variant.folder}.log"
        began_s = time.monotonic()
        with ExitStack() as stack:
            if variant.command:
                target = stack.enter_context(outside(variant.command, log))
            else:
                build = build_variant(variant, self.build, arms)
                target = Target(url=stack.enter_context(served(build, log=log)).grpc)
            self.budget.start_took(time.monotonic() - began_s)
            yield target
            began_s = time.monotonic()
        self.budget.stop_took(time.monotonic() - began_s)

    @contextmanager
    def served_when_needed(self, variant: Variant) -> Iterator[Callable[[Step], Target]]:
        """Gives the server for a step, started at the first one, so that nothing is started where nothing is missing.
        It raises OutOfBudgetError for a step that does not fit any more."""
        with ExitStack() as stack:
            started: list[Target] = []

            def target(step: Step) -> Target:
                self.budget.begin(step, start=not started)
                if not started:
                    started.append(stack.enter_context(self.serve(variant)))
                return started[0]

            yield target

    def drive(
        self, target: Target, workload: Workload, name: str, *, timeout_s: float = 120.0, targets: Slo | None = None
    ) -> Driven:
        """Without `targets` none are sent: no arm gets to choose its requests by them. Raises KeyboardInterrupt if the
        run was: it is no point then."""
        options = BenchOptions(
            target=target,
            wanted=self.wanted,
            slo=targets or FixedSlo(),
            send_targets=targets is not None,
            timeout_s=timeout_s,
        )
        busy_s = machine_busy_s()
        with before_others() as nice:
            run, cpu_s = drive(options, workload, self._named(name))
        if run.info.interrupted:
            raise KeyboardInterrupt
        others_cores = max(0.0, machine_busy_s() - busy_s - sum(cpu_s.values())) / run.health.wall_s
        return Driven(run=run, cpu_s=cpu_s, client_nice=nice, others_cores=others_cores)

    def fault(self, driven: Driven, late_limit_s: float | None) -> str:
        """Why the run's figures must not be used; "" if they may. `late_limit_s`: of the client; None: by what was
        measured."""
        try:
            refuse_if_bottleneck(driven.run.health, driven.run.records, late_limit_s)
        except BottleneckError as error:
            return str(error)
        if driven.others_cores > OTHERS_SHARE * self.cores:
            return f"other work took {driven.others_cores:.2f} of the {self.cores} cores meanwhile"
        return ""

    def _named(self, name: str) -> Progress:
        """Progress of one run's requests, under its own name."""
        return lambda stage, done, total: self.progress(name, done, total) if stage == "requests" else None
