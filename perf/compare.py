"""`trtpd compare`: colocated, colocated with chunked prefill, and disaggregated, measured on the same cores in turn.

First the targets are fixed from an unloaded server. Then each arm is tuned on requests of a seed of its own, and its
best rate is looked for; last, all arms are measured again at the rates that matter, rotating, on further seeds. Every
run leaves a file (compare_folder.py): a command that was cut short, by Ctrl-C or its budget, goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from trtpd.build.manifest import Manifest, read_manifest
from trtpd.errors import InputError
from trtpd.perf.arrivals import parse
from trtpd.perf.bench import BenchOptions, Target, drive
from trtpd.perf.client import Run
from trtpd.perf.client_health import BottleneckError, late_limit_for, refuse_if_bottleneck
from trtpd.perf.climb import next_to_try
from trtpd.perf.compare_arms import CHUNKS, COLOCATED, SPLIT, Variant, build_variant, cores_of, next_variant, variants
from trtpd.perf.compare_folder import Folder, read
from trtpd.perf.comparison import Choice, Comparison, Plan, Point, PointFile
from trtpd.perf.environment import Environment, this_environment
from trtpd.perf.goodput import Deployment, Figures, account, attainment_over_scale
from trtpd.perf.interference import interference_workload
from trtpd.perf.lengths import LengthFit
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.outside_server import outside
from trtpd.perf.priority import before_others
from trtpd.perf.process_cpu import machine_busy_s
from trtpd.perf.prompt_text import Segment
from trtpd.perf.records import Record
from trtpd.perf.served import served
from trtpd.perf.slo import LengthSlo
from trtpd.perf.workload import Ask, Workload

TTFT_FLOOR_S = 1.0
FACTOR = 2.5
UNLOADED_LENGTHS = (32, 128, 256, 512, 1024, 2048, 4096)
UNLOADED_REPEATS = 3
UNLOADED_ANSWER = 24
UNLOADED_ANSWERED = 256
SHARED_DECODE = 4
LOAD_SHARES = (0.33, 0.41, 0.51, 0.64, 0.8, 1.0, 1.25, 1.56, 1.95, 2.44)
FIRST_SHARE = 3
TUNING_SEED = 7919
TUNING_PART = 0.5
TUNING_SCALES = (0.5, 0.71, 1.0, 1.41, 2.0)
PATIENCE = 1.5
OTHERS_SHARE = 0.1
"""Of the cores compared: what other work may take of them in a run that counts."""

LONG_PERCENTILE = 90
SERVER_START_S = 12.0

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """`wanted` gives the workload (its rate is replaced). `rates` empty: each arm's best is looked for around an
    estimated capacity; else all arms are measured at these. A point lasts about `point_s`; no step begins that would
    not end within `budget_s`. `outside`: another server's command. `like`: the folder of a comparison of the same build
    on this machine, whose targets and tuned variants are taken."""

    build: Path
    wanted: Wanted
    folder: Path
    rates: Sequence[float] = ()
    repeats: int = 2
    point_s: float = 60.0
    budget_s: float = 3600.0
    chunks: Sequence[int] = CHUNKS
    outside: str = ""
    like: Path | None = None


class OutOfBudgetError(Exception):
    """No further step fits into the budget; what is there is reported."""


class Comparer:
    """Makes the steps that are missing in the folder."""

    def __init__(self, options: CompareOptions, progress: Progress) -> None:
        """Raises InputError for a build that can't be compared or a folder that holds another comparison."""
        self._options = options
        self._progress = progress
        self._folder = Folder(options.folder)
        self._manifest: Manifest = read_manifest(options.build)
        self._variants = variants(self._manifest, chunks=options.chunks, outside=options.outside)
        self._end_s = time.monotonic() + options.budget_s
        self._longest = int(self._manifest.settings["kv"]["max_seq_tokens"])  # type: ignore[index]
        self._cores = cores_of(self._manifest)
        plan = Plan(
            fingerprint=self._manifest.pair_fingerprint,
            workload=options.wanted.name,
            seed=options.wanted.seed,
            point_s=options.point_s,
            cores=self._cores,
            chunks=tuple(options.chunks),
        )
        self._plan = self._folder.remembered("plan.json", Plan, lambda: plan)
        if self._plan != plan:
            raise InputError(f"{options.folder} holds another comparison; name another folder with -o")

    def run(self) -> Comparison:
        """Up to the end or the budget. Raises TrtpdError if a server fails; what was measured stays."""
        environment = self._folder.remembered("environment.json", Environment, this_environment)
        self._slo = self._folder.remembered("slo.json", LengthSlo, self._fix_targets)
        self._patience_s = self._fix_patience()
        rates = tuple(sorted(self._options.rates)) or self._default_rates()
        choices: list[Choice] = []
        complete = True
        try:
            for arm in self._variants:
                choices.append(self._given(arm) or self._tune(arm, rates))
            self._measure(choices, rates)
        except (OutOfBudgetError, KeyboardInterrupt):  # what is there is reported; the next call goes on
            complete = False
        points = tuple(self._points(choices))
        measured = sorted({point.file.rate for point in points})
        return Comparison(
            plan=self._plan,
            slo=self._slo,
            rates=tuple(measured) or rates,
            choices=tuple(choices),
            points=points,
            interference=self._interferences(choices),
            environment=environment,
            complete=complete,
            notes=make(self._wanted(rates[0], self._options.wanted.seed)).notes[:-1],
            skipped=tuple(self._skipped(choices, points, rates)),
            late_limit_s=late_limit_for(self._slo),
            patience_s=self._patience_s,
        )

    # Before any loaded run

    def _fix_targets(self) -> LengthSlo:
        """From one request at a time on all cores together: what a user alone on the machine would get."""
        if self._options.like is not None:
            return read(self._options.like / "slo.json", LengthSlo)
        most = max(ask.prompt_tokens for ask in self._sample)
        enough = next((tokens for tokens in UNLOADED_LENGTHS[1:] if tokens >= most), UNLOADED_LENGTHS[-1])
        lengths = [t for t in UNLOADED_LENGTHS if t <= enough and t + UNLOADED_ANSWER <= self._longest]
        warm_up = [tokens for tokens in lengths if tokens <= UNLOADED_ANSWERED]
        asks = [
            Ask(
                segments=(Segment(number, tokens),),
                max_tokens=UNLOADED_ANSWER if tokens <= UNLOADED_ANSWERED else 1,
                kind=str(tokens),
            )
            for number, tokens in enumerate(warm_up + lengths * UNLOADED_REPEATS)
        ]
        workload = Workload(name="unloaded", seed=0, asks=tuple(asks), concurrency=1)
        with self._serve(self._variants[COLOCATED][0]) as target:
            run, _, _ = self._drive(target, workload, "unloaded")
        records = run.records[len(warm_up) :]
        unloaded = [
            (tokens, float(np.median([r.ttft_s for r in records if r.kind == str(tokens) and r.ttft_s is not None])))
            for tokens in lengths
        ]
        tpot_s = float(np.median([r.tpot_s for r in records if r.tpot_s is not None]))
        return LengthSlo(floor_s=TTFT_FLOOR_S, factor=FACTOR, unloaded=tuple(unloaded), tpot_s=FACTOR * tpot_s)

    def _fix_patience(self) -> float:
        """PATIENCE times what the request of the latest end may take by its targets: one that takes longer is of no use
        to anyone, and an overloaded run needs an end."""
        asks = self._sample
        tpot_s = self._slo.tpot_s or 0.0
        return PATIENCE * max(self._slo.ttft_for(ask.prompt_tokens) + ask.max_tokens * tpot_s for ask in asks)

    def _default_rates(self) -> tuple[float, ...]:
        """Shares of the rate at which prompts alone one after another, and decoding SHARED_DECODE at a time, would fill
        the machine."""
        asks = self._sample
        tpot_s = (self._slo.tpot_s or 0.0) / FACTOR
        busy_s = np.mean([self._slo.unloaded_s(a.prompt_tokens) + a.max_tokens * tpot_s / SHARED_DECODE for a in asks])
        return tuple(round(share / float(busy_s), 3) for share in LOAD_SHARES)

    # Steps

    def _given(self, arm: str) -> Choice | None:
        """What another comparison, or a former call, chose for this arm."""
        folder = Folder(self._options.like) if self._options.like is not None else self._folder
        found = folder.choice(arm)
        return found if found is not None and any(v.label == found.variant for v in self._variants[arm]) else None

    def _tune(self, arm: str, rates: Sequence[float]) -> Choice:
        """The variant that serves most within targets below the capacity, on another seed: the mean over TUNING_SCALES
        of all targets, since a short run's share at one scale is mostly chance."""
        candidates = self._variants[arm]
        if len(candidates) == 1:
            return Choice(arm=arm, variant=candidates[0].label, tried={})
        rate = rates[min(FIRST_SHARE, len(rates) // 2)]
        tried: dict[str, float] = {}
        while (variant := next_variant(candidates, tried)) is not None:
            if self._folder.run_file("tuning", variant, rate, 0) is None:
                self._afford(SERVER_START_S + self._point_s(TUNING_PART))
                with self._serve(variant) as target:
                    self._run("tuning", variant, target, rate, 0)
            point = self._point("tuning", variant, rate, 0)
            shares = attainment_over_scale(point.records, self._slo, TUNING_SCALES, warm_up_s=point.figures.warm_up_s)
            tried[variant.label] = float(np.mean([share or 0.0 for _, share in shares]))
        untried = tuple(one.label for one in candidates if one.label not in tried)
        choice = Choice(arm=arm, variant=max(tried, key=lambda label: tried[label]), tried=tried, untried=untried)
        self._folder.keep_choice(choice)
        return choice

    def _measure(self, choices: Sequence[Choice], rates: Sequence[float]) -> None:
        chosen = [self._chosen(choice) for choice in choices]
        total = self._options.repeats * len(chosen)
        for turn, variant in enumerate(chosen):
            self._progress("arms", turn, total)
            self._search(variant, rates)
        tops = {variant.arm: self._top(variant, rates) for variant in chosen}
        for repeat in range(1, self._options.repeats):
            for turn in range(len(chosen)):
                variant = chosen[(turn + repeat) % len(chosen)]
                self._progress("arms", repeat * len(chosen) + turn, total)
                again = sorted({tops[variant.arm], tops[SPLIT]}) if not self._options.rates else rates
                self._all(variant, [(rate, repeat) for rate in again])
        for variant in chosen:  # once more what can't be used
            self._all(variant, [(f.rate, f.repeat) for f in self._folder.points(variant) if f.fault], afresh=True)
        self._progress("arms", total, total)

    def _search(self, variant: Variant, rates: Sequence[float]) -> None:
        """The first round of an arm: all rates if they were given, else those around its best."""
        with self._served_when_needed(variant) as target_of:
            while (rate := self._next_rate(variant, rates)) is not None:
                self._afford(self._point_s())
                self._run("points", variant, target_of(), rate, 0)
            if self._has_short_ones and self._folder.interference(variant) is None:
                self._afford(self._options.point_s)
                self._show_interference(variant, target_of())

    def _next_rate(self, variant: Variant, rates: Sequence[float]) -> float | None:
        goods = self._goods(variant, rates)
        if self._options.rates:
            return next((rate for index, rate in enumerate(rates) if index not in goods), None)
        index = next_to_try(len(rates), goods, first=FIRST_SHARE, stride=2, most=lambda index: rates[index])
        return None if index is None else rates[index]

    def _goods(self, variant: Variant, rates: Sequence[float]) -> dict[int, float]:
        """Goodput of the first round, by the rate's place."""
        files = {file.rate for file in self._folder.points(variant) if file.repeat == 0}
        return {
            index: self._point("points", variant, rate, 0).good_per_s
            for index, rate in enumerate(rates)
            if rate in files
        }

    def _top(self, variant: Variant, rates: Sequence[float]) -> float:
        goods = self._goods(variant, rates)
        return rates[max(goods, key=lambda index: goods[index])]

    def _all(self, variant: Variant, runs: Sequence[tuple[float, int]], *, afresh: bool = False) -> None:
        """These (rate, repeat) of a variant behind one start of its server, unless they are there."""
        with self._served_when_needed(variant) as target_of:
            for rate, repeat in runs:
                if afresh or self._folder.run_file("points", variant, rate, repeat) is None:
                    self._afford(self._point_s())
                    self._run("points", variant, target_of(), rate, repeat)

    def _run(self, kind: str, variant: Variant, target: Target, rate: float, repeat: int) -> None:
        tuning = kind == "tuning"
        seed = TUNING_SEED if tuning else self._options.wanted.seed + repeat
        workload = _at_exactly(rate, make(self._wanted(rate, seed, part=TUNING_PART if tuning else 1.0)))
        name = f"{variant.folder} at {rate:g}, {kind} {repeat + 1}"
        busy_s = machine_busy_s()
        run, cpu_s, nice = self._drive(target, workload, name, timeout_s=self._patience_s)
        others_cores = max(0.0, machine_busy_s() - busy_s - sum(cpu_s.values())) / run.health.wall_s
        fault = ""
        if others_cores > OTHERS_SHARE * len(self._cores):
            fault = f"other work took {others_cores:.2f} of the {len(self._cores)} cores meanwhile"
        try:
            refuse_if_bottleneck(run.health, run.records, late_limit_for(self._slo))
        except BottleneckError as error:
            fault = str(error)
        file = PointFile(
            arm=variant.arm,
            variant=variant.label,
            rate=rate,
            repeat=repeat,
            until_s=run.info.offered_until_s,
            health=run.health,
            cpu_s=cpu_s,
            fault=fault,
            client_nice=nice,
            others_cores=others_cores,
        )
        self._folder.keep(kind, variant, file, run)

    def _show_interference(self, variant: Variant, target: Target) -> None:
        asks = self._sample
        tokens = round(float(np.percentile([ask.prompt_tokens for ask in asks], LONG_PERCENTILE)))
        workload = interference_workload(
            longest=self._longest,
            tpot_s=(self._slo.tpot_s or 0.1) / FACTOR,
            prefill_s=self._slo.unloaded_s(tokens),
            prompt_tokens=tokens,
        )
        run, _, _ = self._drive(target, workload, f"{variant.folder}, interference")
        self._folder.keep_interference(variant, run)

    # What is there

    def _points(self, choices: Sequence[Choice]) -> Iterator[Point]:
        for choice in choices:
            variant = self._chosen(choice)
            for file in self._folder.points(variant):
                yield self._point("points", variant, file.rate, file.repeat)

    def _point(self, kind: str, variant: Variant, rate: float, repeat: int) -> Point:
        file = self._folder.run_file(kind, variant, rate, repeat)
        assert file is not None, "made before it is read"
        records = self._folder.records(kind, variant, file)
        return Point(file=file, records=records, figures=self._account(file, records))

    def _account(self, file: PointFile, records: Sequence[Record]) -> Figures:
        return account(records, self._slo, until_s=file.until_s, deployment=Deployment(units=len(self._cores)))

    def _interferences(self, choices: Sequence[Choice]) -> dict[str, tuple[Record, ...]]:
        found = {choice.arm: self._folder.interference(self._chosen(choice)) for choice in choices}
        return {arm: records for arm, records in found.items() if records is not None}

    def _skipped(self, choices: Sequence[Choice], points: Sequence[Point], rates: Sequence[float]) -> Iterator[str]:
        """What the search had no reason to measure."""
        for choice in choices:
            measured = {point.file.rate for point in points if point.file.arm == choice.arm}
            left = [f"{rate:g}" for rate in rates if rate not in measured]
            if measured and left:
                yield f"{choice.arm} was not measured at {', '.join(left)} requests/s: away from its best."
            if choice.untried:
                yield f"{choice.arm}: not tried in tuning: {'; '.join(choice.untried)}."

    # Small things

    def _wanted(self, rate: float, seed: int, *, part: float = 1.0) -> Wanted:
        wanted = self._options.wanted
        fit: LengthFit = wanted.fit
        if fit.max_total_tokens is None:
            fit = replace(fit, max_total_tokens=self._longest)
        requests = max(20, round(rate * self._options.point_s * part))
        arrivals = wanted.arrivals or (None if wanted.name.startswith("trace:") else parse("poisson"))
        return replace(wanted, rate=rate, requests=requests, seed=seed, fit=fit, arrivals=arrivals)

    @cached_property
    def _sample(self) -> tuple[Ask, ...]:
        """Requests like those that will be asked, of which only lengths and kinds matter."""
        return make(self._wanted(1.0, TUNING_SEED)).asks

    @property
    def _has_short_ones(self) -> bool:
        """Whether there are several kinds of requests, of which long ones disturb short ones."""
        return len({ask.kind for ask in self._sample}) > 1

    def _point_s(self, part: float = 1.0) -> float:
        """What a run may take: the last request of an overloaded one is waited for."""
        return part * self._options.point_s + 0.5 * self._patience_s

    def _chosen(self, choice: Choice) -> Variant:
        return next(one for one in self._variants[choice.arm] if one.label == choice.variant)

    def _drive(
        self, target: Target, workload: Workload, name: str, *, timeout_s: float = 120.0
    ) -> tuple[Run, dict[str, float], int]:
        """One run, the CPU it took, and the client's priority. Targets are not sent: no arm gets to choose its requests
        by them. Raises KeyboardInterrupt if the run was: it is no point then."""
        options = BenchOptions(target=target, wanted=self._options.wanted, send_targets=False, timeout_s=timeout_s)
        with before_others() as nice:
            run, cpu_s = drive(options, workload, self._named(name))
        if run.info.interrupted:
            raise KeyboardInterrupt
        return run, cpu_s, nice

    @contextmanager
    def _served_when_needed(self, variant: Variant) -> Iterator[Callable[[], Target]]:
        """Gives what starts the server at its first call, so that nothing is started where nothing is missing."""
        with ExitStack() as stack:
            started: list[Target] = []

            def target() -> Target:
                if not started:
                    self._afford(SERVER_START_S)
                    started.append(stack.enter_context(self._serve(variant)))
                return started[0]

            yield target

    @contextmanager
    def _serve(self, variant: Variant) -> Iterator[Target]:
        arms = self._options.folder / "arms"
        arms.mkdir(parents=True, exist_ok=True)
        log = arms / f"{variant.folder}.log"
        if variant.command:
            with outside(variant.command, log) as target:
                yield target
        else:
            with served(build_variant(variant, self._options.build, arms), log=log) as server:
                yield Target(url=server.grpc)

    def _named(self, name: str) -> Progress:
        """Progress of one run's requests, under its own name."""
        return lambda stage, done, total: self._progress(name, done, total) if stage == "requests" else None

    def _afford(self, seconds: float) -> None:
        """Raises OutOfBudgetError."""
        if time.monotonic() + seconds > self._end_s:
            raise OutOfBudgetError


def _at_exactly(rate: float, workload: Workload) -> Workload:
    """The instants stretched so that the requests come at `rate` on the whole: a short run's own mean is off by chance,
    and a goodput above what was said to be offered tells nobody anything."""
    last_s = workload.duration_s
    factor = len(workload.asks) / (rate * last_s) if last_s > 0.0 else 1.0
    asks = (
        ask if ask.at_s is None else msgspec.structs.replace(ask, at_s=round(ask.at_s * factor, 6))
        for ask in workload.asks
    )
    return msgspec.structs.replace(workload, asks=tuple(asks))
