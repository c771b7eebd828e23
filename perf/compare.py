"""`trtpd compare`: colocated, colocated with chunked prefill, and disaggregated, measured in turn on the same cores.

First the targets are fixed from an unloaded server, then each arm is tuned on a workload of its own seed, then all arms
are measured at all rates, rotating, several times over. Every step leaves a file: a run that was cut short, by Ctrl-C
or its budget, goes on where it stopped.

FOLDER/
  plan.json         what is compared; another comparison needs another folder
  slo.json          the targets, fixed before any loaded run
  tuning/ points/   records and figures of each run
  arms/             builds (weights linked), logs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from trtpd.build.manifest import Manifest, read_manifest
from trtpd.errors import InputError
from trtpd.perf.arrivals import parse
from trtpd.perf.bench import BenchOptions, Target, drive
from trtpd.perf.client import Run
from trtpd.perf.client_health import BottleneckError, ClientHealth, refuse_if_bottleneck
from trtpd.perf.compare_arms import COLOCATED, Variant, build_variant, cores_of, variants
from trtpd.perf.environment import Environment, this_environment
from trtpd.perf.goodput import Deployment, Figures, account
from trtpd.perf.interference import interference_workload
from trtpd.perf.lengths import LengthFit
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.outside_server import outside
from trtpd.perf.prompt_text import Segment
from trtpd.perf.records import Record, load_records, save_records
from trtpd.perf.served import served
from trtpd.perf.slo import LengthSlo
from trtpd.perf.workload import Ask, Workload

TTFT_FLOOR_S = 1.0
FACTOR = 2.5
UNLOADED_LENGTHS = (32, 128, 256, 512, 1024, 2048, 4096)
UNLOADED_REPEATS = 3
UNLOADED_ANSWER = 24
LOAD_SHARES = (0.25, 0.5, 0.75, 1.0, 1.25)
SHARED_DECODE = 4
TUNING_SEED = 7919
SERVER_START_S = 20.0

Progress = Callable[[str, int, int], None]
Stored = TypeVar("Stored", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """`wanted` gives the workload (its rate is replaced). `rates` empty: shares of an estimated capacity. A point lasts
    about `point_s`; no step begins that would not end within `budget_s`. `outside`: another server's command."""

    build: Path
    wanted: Wanted
    folder: Path
    rates: Sequence[float] = ()
    repeats: int = 2
    point_s: float = 60.0
    budget_s: float = 3600.0
    chunks: Sequence[int] = (64, 128, 256, 512)
    outside: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two comparisons the same one."""

    fingerprint: str
    workload: str
    seed: int
    point_s: float
    cores: tuple[int, ...]
    chunks: tuple[int, ...]
    outside: str


class PointFile(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one variant. `fault`: why its figures must not be used."""

    arm: str
    variant: str
    rate: float
    repeat: int
    until_s: float
    health: ClientHealth
    cpu_s: dict[str, float]
    fault: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What the tuning of an arm found: the variant taken, and goodput (requests/s) of all that were tried."""

    arm: str
    variant: str
    tried: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A run with its records, and figures by the comparison's targets."""

    file: PointFile
    records: tuple[Record, ...]
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything there is so far. `complete`: all steps were made."""

    plan: Plan
    slo: LengthSlo
    rates: tuple[float, ...]
    choices: tuple[Choice, ...]
    points: tuple[Point, ...]
    interference: dict[str, tuple[Record, ...]]
    environment: Environment
    complete: bool
    notes: tuple[str, ...]


class OutOfBudgetError(Exception):
    """No further step fits into the budget; what is there is reported."""


class Comparer:
    """Makes the steps that are missing in the folder."""

    def __init__(self, options: CompareOptions, progress: Progress) -> None:
        """Raises InputError for a build that can't be compared or a folder that holds another comparison."""
        self._options = options
        self._progress = progress
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
            outside=options.outside,
        )
        self._plan = self._remembered("plan.json", Plan, lambda: plan)
        if self._plan != plan:
            raise InputError(f"{options.folder} holds another comparison; name another folder with -o")

    def run(self) -> Comparison:
        """Up to the end or the budget. Raises TrtpdError if a server fails; what was measured stays."""
        environment = self._remembered("environment.json", Environment, this_environment)
        slo = self._remembered("slo.json", LengthSlo, self._fix_targets)
        rates = tuple(self._options.rates) or self._default_rates(slo)
        choices: list[Choice] = []
        complete = True
        try:
            choices += [self._tune(arm, slo, rates) for arm in self._variants]
            self._measure(choices, rates)
        except (OutOfBudgetError, KeyboardInterrupt):  # what is there is reported; the next call goes on
            complete = False
        return Comparison(
            plan=self._plan,
            slo=slo,
            rates=rates,
            choices=tuple(choices),
            points=tuple(self._points(choices, slo)),
            interference=self._interferences(choices),
            environment=environment,
            complete=complete,
            notes=make(self._wanted(rates[0], self._options.wanted.seed)).notes,
        )

    # Steps

    def _fix_targets(self) -> LengthSlo:
        """From one request at a time on all cores together: what a user alone on the machine would get."""
        most = max(ask.prompt_tokens for ask in make(self._wanted(1.0, TUNING_SEED)).asks)
        enough = next((tokens for tokens in UNLOADED_LENGTHS[1:] if tokens >= most), UNLOADED_LENGTHS[-1])
        lengths = [t for t in UNLOADED_LENGTHS if t <= enough and t + UNLOADED_ANSWER <= self._longest]
        asks = [
            Ask(segments=(Segment(number, tokens),), max_tokens=UNLOADED_ANSWER, kind=str(tokens))
            for number, tokens in enumerate(tokens for _ in range(UNLOADED_REPEATS + 1) for tokens in lengths)
        ]
        workload = Workload(name="unloaded", seed=0, asks=tuple(asks), concurrency=1)
        with self._serve(self._variants[COLOCATED][0]) as target:
            run, _ = drive(self._bench(target), workload, self._named("unloaded"))
        _go_on_unless_interrupted(run)
        records = run.records[len(lengths) :]  # the first round warms up
        unloaded = [
            (tokens, float(np.median([r.ttft_s for r in records if r.kind == str(tokens) and r.ttft_s is not None])))
            for tokens in lengths
        ]
        tpot_s = float(np.median([r.tpot_s for r in records if r.tpot_s is not None]))
        return LengthSlo(floor_s=TTFT_FLOOR_S, factor=FACTOR, unloaded=tuple(unloaded), tpot_s=FACTOR * tpot_s)

    def _default_rates(self, slo: LengthSlo) -> tuple[float, ...]:
        """Shares of the rate at which prompts alone one after another, and decoding SHARED_DECODE at a time, would fill
        the machine."""
        asks = make(self._wanted(1.0, TUNING_SEED)).asks
        tpot_s = (slo.tpot_s or 0.0) / FACTOR
        busy_s = np.mean([slo.unloaded_s(a.prompt_tokens) + a.max_tokens * tpot_s / SHARED_DECODE for a in asks])
        return tuple(round(share / float(busy_s), 3) for share in LOAD_SHARES)

    def _tune(self, arm: str, slo: LengthSlo, rates: Sequence[float]) -> Choice:
        """The variant of the highest goodput at the middle rate, on another seed; of equals the faster by TPOT."""
        candidates = self._variants[arm]
        rate = sorted(rates)[len(rates) // 2]
        tried: dict[str, tuple[float, float]] = {}
        for variant in candidates if len(candidates) > 1 else ():
            point = self._point("tuning", variant, [rate], 0, seed=TUNING_SEED)[0]
            figures = self._account(point, slo)
            good = figures.goodput["trtpd"].per_s
            pace_s = figures.tpot.p99.value if figures.tpot is not None else float("inf")
            tried[variant.label] = (good.value if good is not None else 0.0, -pace_s)
        best = max(tried, key=lambda label: tried[label]) if tried else candidates[0].label
        return Choice(arm=arm, variant=best, tried={label: good for label, (good, _) in tried.items()})

    def _measure(self, choices: Sequence[Choice], rates: Sequence[float]) -> None:
        chosen = [self._chosen(choice) for choice in choices]
        total = self._options.repeats * len(chosen)
        for repeat in range(self._options.repeats):
            for turn in range(len(chosen)):
                variant = chosen[(turn + repeat) % len(chosen)]
                self._progress("arms", repeat * len(chosen) + turn, total)
                self._point("points", variant, rates, repeat, seed=self._options.wanted.seed + repeat)
        self._progress("arms", total, total)

    def _point(
        self, kind: str, variant: Variant, rates: Sequence[float], repeat: int, *, seed: int
    ) -> list[tuple[PointFile, tuple[Record, ...]]]:
        """The runs of one variant at all rates, behind one start of its server; those that are there already are
        read, unless they can't be used."""
        folder = self._options.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        paths = {rate: folder / f"{variant.folder}.{rate:g}.{repeat}" for rate in rates}
        missing = [rate for rate, path in paths.items() if not _is_usable(path)]
        shows = kind == "points" and repeat == 0 and not self._interference_path(variant).is_file()
        if missing or shows:
            self._afford(SERVER_START_S + self._options.point_s)
            with self._serve(variant) as target:
                if shows:
                    self._show_interference(variant, target)
                for rate in missing:
                    self._afford(self._options.point_s)
                    self._run(variant, target, rate, repeat, seed, paths[rate])
        return [_read_point(path) for path in paths.values()]

    def _run(self, variant: Variant, target: Target, rate: float, repeat: int, seed: int, path: Path) -> None:
        workload = make(self._wanted(rate, seed))
        run, cpu_s = drive(self._bench(target), workload, self._named(f"{variant.folder} at {rate:g}, {repeat + 1}"))
        _go_on_unless_interrupted(run)
        fault = ""
        try:
            refuse_if_bottleneck(run.health, run.records)
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
        )
        save_records(path.with_name(path.name + ".jsonl.gz"), run.info, run.records)
        path.with_name(path.name + ".json").write_bytes(msgspec.json.encode(file))

    def _show_interference(self, variant: Variant, target: Target) -> None:
        slo = self._remembered("slo.json", LengthSlo, self._fix_targets)
        tokens = slo.unloaded[-1][0]
        workload = interference_workload(
            longest=self._longest,
            tpot_s=(slo.tpot_s or 0.1) / FACTOR,
            prefill_s=slo.unloaded_s(tokens),
            prompt_tokens=tokens,
        )
        run, _ = drive(self._bench(target), workload, self._named(f"{variant.folder}, interference"))
        _go_on_unless_interrupted(run)
        save_records(self._interference_path(variant), run.info, run.records)

    # What is there

    def _points(self, choices: Sequence[Choice], slo: LengthSlo) -> Iterator[Point]:
        for choice in choices:
            variant = self._chosen(choice)
            for path in sorted((self._options.folder / "points").glob(f"{variant.folder}.*.json")):
                file, records = _read_point(path.with_suffix(""))
                yield Point(file=file, records=records, figures=self._account((file, records), slo))

    def _interferences(self, choices: Sequence[Choice]) -> dict[str, tuple[Record, ...]]:
        found = {}
        for choice in choices:
            path = self._interference_path(self._chosen(choice))
            if path.is_file():
                found[choice.arm] = tuple(load_records(path)[1])
        return found

    def _account(self, point: tuple[PointFile, tuple[Record, ...]], slo: LengthSlo) -> Figures:
        file, records = point
        return account(records, slo, until_s=file.until_s, deployment=Deployment(units=len(self._cores)))

    # Small things

    def _wanted(self, rate: float, seed: int) -> Wanted:
        wanted = self._options.wanted
        fit: LengthFit = wanted.fit
        if fit.max_total_tokens is None:
            fit = replace(fit, max_total_tokens=self._longest)
        requests = max(20, round(rate * self._options.point_s))
        arrivals = wanted.arrivals or (None if wanted.name.startswith("trace:") else parse("poisson"))
        return replace(wanted, rate=rate, requests=requests, seed=seed, fit=fit, arrivals=arrivals)

    def _chosen(self, choice: Choice) -> Variant:
        return next(one for one in self._variants[choice.arm] if one.label == choice.variant)

    def _bench(self, target: Target) -> BenchOptions:
        """Targets are not sent: no arm gets to choose its requests by them."""
        return BenchOptions(target=target, wanted=self._options.wanted, send_targets=False)

    def _interference_path(self, variant: Variant) -> Path:
        return self._options.folder / "points" / f"{variant.folder}.interference.jsonl.gz"

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

    def _remembered(self, name: str, kind: type[Stored], find: Callable[[], Stored]) -> Stored:
        """What the file says, or what `find` finds, which is put there."""
        path = self._options.folder / name
        if path.is_file():
            try:
                return msgspec.json.decode(path.read_bytes(), type=kind)
            except msgspec.MsgspecError as error:
                raise InputError(f"{path}: can't be read ({error}); name another folder with -o") from error
        found = find()
        self._options.folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        return found


def _is_usable(path: Path) -> bool:
    """Whether a run is there whose figures may be used; another is made again."""
    stored = path.with_name(path.name + ".json")
    return stored.is_file() and not msgspec.json.decode(stored.read_bytes(), type=PointFile).fault


def _read_point(path: Path) -> tuple[PointFile, tuple[Record, ...]]:
    file = msgspec.json.decode(path.with_name(path.name + ".json").read_bytes(), type=PointFile)
    _, records = load_records(path.with_name(path.name + ".jsonl.gz"))
    return file, tuple(records)


def _go_on_unless_interrupted(run: Run) -> None:
    """Raises KeyboardInterrupt: a run that was cut short is no point."""
    if run.info.interrupted:
        raise KeyboardInterrupt
