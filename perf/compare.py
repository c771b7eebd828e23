"""`trtpd compare`: colocated, colocated with chunked prefill, and disaggregated, measured on the same cores in turn.

First the targets are fixed from an unloaded server (compare_targets.py). Then each arm is tuned on requests of its own
(Runs.asked), and its best rate is looked for; last, all arms are measured again at the rates that matter, rotating, on
further seeds. Every run leaves a file (compare_points.py): a command that was cut short, by Ctrl-C or its budget, goes
on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from trtpd.build.manifest import read_manifest
from trtpd.errors import InputError, TrtpdError
from trtpd.perf.arrivals import check_rate
from trtpd.perf.bench import Target
from trtpd.perf.client import Progress
from trtpd.perf.client_health import late_limit_for
from trtpd.perf.climb import next_to_try
from trtpd.perf.compare_arms import CHUNKS, COLOCATED, SPLIT, Variant, cores_of, next_variant, variants
from trtpd.perf.compare_budget import Budget, OutOfBudgetError, Step, says_nothing
from trtpd.perf.compare_ending import run_states, skipped
from trtpd.perf.compare_folder import Folder, read
from trtpd.perf.compare_outline import Outline
from trtpd.perf.compare_plan import Like, check_comparable, check_same, plan_of
from trtpd.perf.compare_points import Points, part_of
from trtpd.perf.compare_runs import DisturbedError, Runs
from trtpd.perf.compare_stretch import told
from trtpd.perf.compare_targets import disturbance, fix_targets, usual_rates
from trtpd.perf.comparison import Aside, Choice, Comparison, End, Plan, Point
from trtpd.perf.environment import Environment, this_environment
from trtpd.perf.goodput import attainment_over_scale
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.records import Record
from trtpd.perf.slo import LengthSlo

FIRST_SHARE = 3
TUNED_SHARE, TUNING_STEP = 0.3, 2
"""Of a tuning's requests that the best variant has to serve within targets, and by how many of the grid's rates lower
it is tried again if it doesn't."""

UNLOADED = "unloaded.json"
TUNING_SCALES = (0.5, 0.71, 1.0, 1.41, 2.0)
INTERFERENCE_TIMES, INTERFERENCE_LEAST_S = 2.0, 30.0
"""A request of an interference run is given up after so many times what all its arrivals take, or so long at least."""


class InterruptedEarlyError(TrtpdError):
    """Before there was anything to report."""

    code = "interrupted"
    exit_code = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """`wanted` gives the workload (its rate is replaced). `rates` empty: each arm's best is looked for around an
    estimated capacity; else all arms are measured at these. A point lasts `point_s`, longer where that would be too few
    requests, a tuning run half of that; no step begins that would not end within `budget_s`. `outside`: another
    server's command. `like`: the folder of a comparison of the same build on this machine, whose targets and tuned
    variants are taken. `definition`: of goodput, one of DEFINITIONS."""

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
    definition: str = "trtpd"


class Comparer:
    """Makes the steps that are missing in the folder."""

    def __init__(
        self, options: CompareOptions, progress: Progress, *, say: Callable[[str], None] = says_nothing
    ) -> None:
        """Raises InputError for a build that can't be compared or a folder that holds another comparison. `say` is
        told what there is to do, and each step that begins."""
        check_comparable(options.wanted)
        for rate in options.rates:
            check_rate(rate)
        self._options = options
        self._say = say
        self._folder = Folder(options.folder)
        self._like = Like(options.like) if options.like is not None else None
        manifest = read_manifest(options.build)
        self._variants = variants(manifest, chunks=options.chunks, outside=options.outside)
        self._runs = Runs(
            build=options.build,
            folder=options.folder,
            wanted=options.wanted,
            point_s=options.point_s,
            longest_tokens=int(manifest.settings["kv"]["max_seq_tokens"]),  # type: ignore[index]
            budget=Budget(seconds=options.budget_s, say=say),
            cores=len(cores_of(manifest)),
            progress=progress,
        )
        plan = plan_of(
            manifest,
            replace(self._runs.asked(1.0, 0), trace=options.wanted.trace),
            self._variants,
            point_s=options.point_s,
            chunks=options.chunks,
            definition=options.definition,
        )
        self._plan = self._folder.remembered("plan.json", Plan, lambda: plan)
        check_same(plan, self._plan, options.folder)

    def run(self) -> Comparison:
        """Up to the end or the budget. Raises TrtpdError if a server fails, InputError if the budget is too short for
        a single step, InterruptedEarlyError before the targets are fixed; what was measured stays."""
        outline = self._outline()
        for line in outline.lines():
            self._say(line)
        self._runs.budget.least_steps = sum(part.runs for part in outline.parts())
        environment = self._folder.remembered("environment.json", Environment, this_environment)
        try:
            slo = self._folder.remembered("slo.json", LengthSlo, self._targets)
        except OutOfBudgetError as error:
            raise self._too_short(error) from error
        except KeyboardInterrupt as error:
            raise InterruptedEarlyError(
                f"interrupted before the targets were fixed: nothing is measured yet in {self._options.folder}; the "
                "same command begins again"
            ) from error
        if self._like is not None:
            self._like.check(slo, self._folder)
        self._points = Points(runs=self._runs, folder=self._folder, slo=slo, definition=self._plan.definition)
        rates = tuple(sorted(set(self._options.rates))) or usual_rates(slo, self._runs.sample)
        choices: list[Choice] = []
        how: Literal["complete", "budget", "interrupted"] = "complete"
        refused: OutOfBudgetError | None = None
        try:
            for arm in self._variants:
                choices.append(self._given(arm) or self._tune(arm, rates))
            self._measure(choices, rates)
        except OutOfBudgetError as error:  # what is there is reported; the next call goes on
            if not self._runs.budget.begun:
                raise self._too_short(error) from error
            how, refused = "budget", error
        except KeyboardInterrupt:
            how = "interrupted"
        return self._so_far(environment, choices, rates, how, refused)

    def _so_far(
        self,
        environment: Environment,
        choices: Sequence[Choice],
        rates: Sequence[float],
        how: Literal["complete", "budget", "interrupted"],
        refused: OutOfBudgetError | None,
    ) -> Comparison:
        points = tuple(point for choice in choices for point in self._points.measured(self._chosen(choice)))
        measured = {point.file.rate for point in points} | set(self._options.rates)
        return Comparison(
            plan=self._plan,
            slo=self._points.slo,
            rates=tuple(sorted(measured)) or tuple(rates),
            choices=tuple(choices),
            points=points,
            interference=self._interferences(choices),
            environment=environment,
            notes=make(self._runs.asked(rates[0], 0)).notes[:-1],
            skipped=(
                *(self._like.remarks(self._plan.fingerprint) if self._like is not None else ()),
                *skipped(choices, points, rates, searched=how == "complete" and not self._options.rates),
            ),
            late_limit_s=late_limit_for(self._points.slo),
            patience_s=self._points.patience_s,
            asides=dict(self._asides(choices)),
            tuned_on=self._tuned_on(choices, points, rates),
            runs=run_states(
                tuple(self._variants),
                choices,
                points,
                rates,
                self._options.repeats,
                searched=not self._options.rates,
                how=how,
            ),
            end=self._end(how, refused),
        )

    def _outline(self) -> Outline:
        """What remains as the folder is now."""
        given = tuple(sorted(set(self._options.rates)))
        slo = None if self._like is None else self._like.slo
        if (self._folder.path / "slo.json").is_file():
            slo = read(self._folder.path / "slo.json", LengthSlo)
        rates = given or (None if slo is None else usual_rates(slo, self._runs.sample))
        return Outline(
            folder=self._folder,
            runs=self._runs,
            variants=self._variants,
            chosen=self._chosen_variant,
            targets_there=slo is not None,
            rates=rates,
            searched=not given,
            tuned_at=None if rates is None else rates[min(FIRST_SHARE, len(rates) // 2)],
            repeats=self._options.repeats,
        )

    def _chosen_variant(self, arm: str) -> Variant | None:
        """None before it is tuned."""
        if len(self._variants[arm]) == 1:
            return self._variants[arm][0]
        choice = self._given(arm)
        return None if choice is None else self._chosen(choice)

    def _too_short(self, error: OutOfBudgetError) -> InputError:
        least = "about" if not (self._folder.path / "slo.json").is_file() else "up to"
        return InputError(
            f"--budget-s {self._options.budget_s:g} is too short for anything: {error.step.name} takes {least} "
            f"{math.ceil(error.needs_s)} s, start and stop of its server included; nothing was run, give more"
        )

    def _end(self, how: Literal["complete", "budget", "interrupted"], refused: OutOfBudgetError | None) -> End:
        untuned = [arm for arm in self._variants if self._chosen_variant(arm) is None]
        return End(
            how=how,
            folder=str(self._options.folder),
            budget_s=self._options.budget_s,
            spent_s=round(self._runs.budget.spent_s, 1),
            next_step="" if refused is None else refused.step.name,
            next_needs_s=0.0 if refused is None else round(refused.needs_s, 1),
            rest_s=0.0 if how == "complete" else round(self._outline().lasts_s(), 1),
            tuning_runs={arm: sum(self._folder.tunings(one) for one in self._variants[arm]) for arm in untuned},
        )

    def _targets(self) -> LengthSlo:
        if self._like is not None:
            slo, aside = self._like.slo, Folder(self._like.folder).aside(UNLOADED)
        else:
            slo, aside = fix_targets(self._runs, self._variants[COLOCATED][0])
        if aside is not None:
            self._folder.keep_aside(UNLOADED, aside)
        return slo

    def _given(self, arm: str) -> Choice | None:
        """What a former call chose or took for this arm, or what another comparison chose. It stays."""
        found = self._folder.choice(arm)
        if found is None and self._like is not None:
            found = self._like.choice(arm)
            if found is not None and self._known(found):
                self._folder.keep_choice(found)
        return found if found is not None and self._known(found) else None

    def _known(self, choice: Choice) -> bool:
        return any(one.label == choice.variant for one in self._variants[choice.arm])

    def _tune(self, arm: str, rates: Sequence[float]) -> Choice:
        """The variant that serves most within targets below the capacity, on another seed. Where none serves
        TUNED_SHARE, the rate was beyond what this arm can do and which is best there is chance: at a lower one then.
        """
        candidates = self._variants[arm]
        if len(candidates) == 1:
            return Choice(arm=arm, variant=candidates[0].label, tried={})
        index = min(FIRST_SHARE, len(rates) // 2)
        tried, unusable = self._shares(candidates, rates[index])
        while index > 0 and max(tried.values()) < TUNED_SHARE:
            index = max(0, index - TUNING_STEP)
            tried, unusable = self._shares(candidates, rates[index])
        untried = tuple(one.label for one in candidates if one.label not in tried and one.label not in unusable)
        best = max(tried, key=lambda label: tried[label])
        choice = Choice(arm=arm, variant=best, tried=tried, untried=untried, unusable=unusable)
        self._folder.keep_choice(choice)
        return choice

    def _shares(self, candidates: Sequence[Variant], rate: float) -> tuple[dict[str, float], dict[str, str]]:
        """What each variant tried serves within targets at `rate`: the mean over TUNING_SCALES of all targets, since a
        short run's share at one scale is mostly chance; and those whose runs can't be used, with why: they are not
        ranked. Raises DisturbedError if no run can be used."""
        tried: dict[str, float] = {}
        unusable: dict[str, str] = {}
        while (variant := next_variant([c for c in candidates if c.label not in unusable], tried)) is not None:
            point = self._points.of("tuning", variant, rate, 0)
            if point is None or point.file.fault:
                point = self._tuned(variant, rate)
            if point.file.fault:
                unusable[variant.label] = point.file.fault
                continue
            shares = attainment_over_scale(
                point.records,
                self._points.slo,
                TUNING_SCALES,
                warm_up_s=point.figures.warm_up_s,
                definition=self._plan.definition,
            )
            tried[variant.label] = float(np.mean([share or 0.0 for _, share in shares]))
        if not tried:
            why = "; ".join(f"{label}: {fault}" for label, fault in unusable.items())
            raise DisturbedError(
                f"no tuning run of {candidates[0].arm} at {rate:g} requests/s can be used, each made twice ({why}). "
                "What was measured so far stays: end the other work, or give the client a core of its own, and give "
                "the same command again"
            )
        return tried, unusable

    def _tuned(self, variant: Variant, rate: float) -> Point:
        """Made once more, on a server that knows none of it, if its figures can't be used."""
        for _ in range(2):
            with self._runs.served_when_needed(variant) as target_of:
                target = target_of(self._points.step("tuning", variant, rate, 0))
                point = self._points.measure("tuning", variant, target, rate, 0)
            if not point.file.fault:
                break
        return point

    def _chosen(self, choice: Choice) -> Variant:
        return next(one for one in self._variants[choice.arm] if one.label == choice.variant)

    def _measure(self, choices: Sequence[Choice], rates: Sequence[float]) -> None:
        chosen = [self._chosen(choice) for choice in choices]
        for variant in chosen:
            self._search(variant, rates)
            if self._once_more(variant):
                self._search(variant, rates)
        tops = {variant.arm: self._top(variant, rates) for variant in chosen}
        for repeat in range(self._options.repeats):  # what the first round has is not made again
            for turn in range(len(chosen)):
                variant = chosen[(turn + repeat) % len(chosen)]
                found = {top for top in (tops[variant.arm], tops[SPLIT]) if top is not None}
                again = rates if self._options.rates else sorted(found)
                self._all(variant, [(rate, repeat) for rate in again])
        for variant in chosen:
            self._once_more(variant)

    def _search(self, variant: Variant, rates: Sequence[float]) -> None:
        """The first round of an arm: all rates if they were given, else those around its best. What can't be used is
        passed over."""
        with self._runs.served_when_needed(variant) as target_of:
            while (rate := self._next_rate(variant, rates)) is not None:
                target = target_of(self._points.step("points", variant, rate, 0))
                self._points.measure("points", variant, target, rate, 0)
            if self._has_short_ones and self._folder.interference(variant) is None:
                self._interfere(variant, target_of)

    def _interfere(self, variant: Variant, target_of: Callable[[Step], Target]) -> None:
        workload = disturbance(self._points.slo, self._runs.sample, self._runs.longest_tokens)
        patience_s = max(INTERFERENCE_LEAST_S, INTERFERENCE_TIMES * workload.duration_s)
        name = f"{variant.arm} ({variant.label}), long prompts beside answers being written"
        target = target_of(Step(name=name, arrive_s=workload.duration_s, drain_s=patience_s))
        driven = self._runs.drive(target, workload, name, timeout_s=patience_s)
        fault = self._runs.fault(driven, late_limit_for(self._points.slo))
        aside = Aside(fault=fault, health=driven.run.health, others_cores=driven.others_cores)
        self._folder.keep_interference(variant, driven.run, aside)

    def _next_rate(self, variant: Variant, rates: Sequence[float]) -> float | None:
        found = {rate: self._points.of("points", variant, rate, 0) for rate in rates}
        row = [rate for rate, point in found.items() if point is None or not point.file.fault]
        goods = {i: point.good_per_s or 0.0 for i, rate in enumerate(row) if (point := found[rate]) is not None}
        if self._options.rates or not row:
            return next((rate for index, rate in enumerate(row) if index not in goods), None)
        first = min(FIRST_SHARE, len(row) - 1)
        index = next_to_try(len(row), goods, first=first, stride=2, most=lambda index: row[index])
        return None if index is None else row[index]

    def _top(self, variant: Variant, rates: Sequence[float]) -> float | None:
        """The rate of most goodput in the first round; None where none can be used. Where the goal was missed nothing
        is gained."""
        found = [(rate, self._points.of("points", variant, rate, 0)) for rate in rates]
        goods = {rate: point.good_per_s or 0.0 for rate, point in found if point is not None and not point.file.fault}
        return max(goods, key=lambda rate: goods[rate], default=None)

    def _all(self, variant: Variant, runs: Sequence[tuple[float, int]], *, afresh: bool = False) -> None:
        """These (rate, repeat) of a variant behind one start of its server, unless they are there."""
        with self._runs.served_when_needed(variant) as target_of:
            for rate, repeat in runs:
                if afresh or self._folder.run_file("points", variant, rate, repeat) is None:
                    target = target_of(self._points.step("points", variant, rate, repeat))
                    self._points.measure("points", variant, target, rate, repeat)

    def _once_more(self, variant: Variant) -> bool:
        """Makes again what can't be used. False if all can."""
        faulty = [(file.rate, file.repeat) for file in self._folder.points(variant) if file.fault]
        self._all(variant, faulty, afresh=True)
        aside = self._folder.aside(self._folder.interference_name(variant))
        if aside is not None and aside.fault:
            with self._runs.served_when_needed(variant) as target_of:  # one that has not seen its prompts
                self._interfere(variant, target_of)
        return bool(faulty)

    @property
    def _has_short_ones(self) -> bool:
        """Whether there are several kinds of requests, of which long ones disturb short ones."""
        return len({ask.kind for ask in self._runs.sample}) > 1

    def _interferences(self, choices: Sequence[Choice]) -> dict[str, tuple[Record, ...]]:
        found = {choice.arm: self._folder.interference(self._chosen(choice)) for choice in choices}
        return {arm: records for arm, records in found.items() if records is not None}

    def _asides(self, choices: Sequence[Choice]) -> Iterator[tuple[str, Aside]]:
        names = {"the unloaded run that fixed the targets": UNLOADED}
        names |= {f"{one.arm}, interference": self._folder.interference_name(self._chosen(one)) for one in choices}
        for what, name in names.items():
            if (aside := self._folder.aside(name)) is not None:
                yield what, aside

    def _tuned_on(self, choices: Sequence[Choice], points: Sequence[Point], rates: Sequence[float]) -> str:
        """In words: what requests the tuning had, if there was one, and of a trace each repeat."""
        runs, taken = self._runs, any(choice.origin for choice in choices)
        if runs.trace_rows is None:
            return "" if taken else "On requests of another seed than those measured."
        rate = max((point.file.rate for point in points), default=rates[-1])
        tuned = rates[min(FIRST_SHARE, len(rates) // 2)]
        tuning = "tuning", runs.stretch(runs.asked(tuned, None, part=part_of("tuning")).requests, None)
        listed = [] if taken else [tuning]
        listed += [
            (f"repeat {n + 1}", runs.stretch(runs.asked(rate, n).requests, n)) for n in range(self._options.repeats)
        ]
        return told(runs.trace_rows, [(name, rows) for name, rows in listed if rows is not None])
