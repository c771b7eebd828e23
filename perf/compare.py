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

from trtpd.build.manifest import read_manifest
from trtpd.errors import InputError, TrtpdError
from trtpd.perf.arrivals import check_rate
from trtpd.perf.client import Progress
from trtpd.perf.client_health import late_limit_for
from trtpd.perf.compare_arms import CHUNKS, COLOCATED, cores_of, variants
from trtpd.perf.compare_budget import Budget, OutOfBudgetError, says_nothing
from trtpd.perf.compare_ending import run_states, skipped
from trtpd.perf.compare_folder import Folder, read
from trtpd.perf.compare_outline import Outline
from trtpd.perf.compare_plan import Like, check_comparable, check_same, plan_of
from trtpd.perf.compare_points import Points, part_of
from trtpd.perf.compare_runs import Runs
from trtpd.perf.compare_search import Search
from trtpd.perf.compare_stretch import told
from trtpd.perf.compare_targets import fix_targets, usual_rates
from trtpd.perf.compare_tuning import Chosen, Tuner, first_tuned
from trtpd.perf.comparison import Aside, Choice, Comparison, End, Plan, Point
from trtpd.perf.environment import Environment, this_environment
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.records import Record
from trtpd.perf.slo import LengthSlo

UNLOADED = "unloaded.json"


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
    variants are taken. `definition`: of goodput, one of DEFINITIONS. `send_targets`: with each request of a measured or
    tuning run, so that each arm's router can plan and refuse by them."""

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
    send_targets: bool = False


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
        self._chosen = Chosen(folder=self._folder, variants=self._variants, like=self._like)
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
            targets_sent=options.send_targets,
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
        self._points = Points(
            runs=self._runs,
            folder=self._folder,
            slo=slo,
            definition=self._plan.definition,
            targets_sent=self._plan.targets_sent,
        )
        rates = tuple(sorted(set(self._options.rates))) or usual_rates(slo, self._runs.sample)
        tuner = Tuner(self._runs, self._folder, self._points, self._variants)
        repeats, given = self._options.repeats, bool(self._options.rates)
        search = Search(self._runs, self._folder, self._points, repeats=repeats, given=given)
        choices: list[Choice] = []
        how: Literal["complete", "budget", "interrupted"] = "complete"
        refused: OutOfBudgetError | None = None
        try:
            for arm in self._variants:
                choices.append(self._chosen.given(arm) or tuner.tune(arm, rates))
            search.run([self._chosen.variant(choice) for choice in choices], rates)
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
        points = tuple(point for choice in choices for point in self._points.measured(self._chosen.variant(choice)))
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
            chosen=self._chosen.known,
            targets_there=slo is not None,
            rates=rates,
            searched=not given,
            tuned_at=None if rates is None else rates[first_tuned(rates)],
            repeats=self._options.repeats,
        )

    def _too_short(self, error: OutOfBudgetError) -> InputError:
        least = "about" if not (self._folder.path / "slo.json").is_file() else "up to"
        return InputError(
            f"--budget-s {self._options.budget_s:g} is too short for anything: {error.step.name} takes {least} "
            f"{math.ceil(error.needs_s)} s, start and stop of its server included; nothing was run, give more"
        )

    def _end(self, how: Literal["complete", "budget", "interrupted"], refused: OutOfBudgetError | None) -> End:
        untuned = [arm for arm in self._variants if self._chosen.known(arm) is None]
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

    def _interferences(self, choices: Sequence[Choice]) -> dict[str, tuple[Record, ...]]:
        found = {choice.arm: self._folder.interference(self._chosen.variant(choice)) for choice in choices}
        return {arm: records for arm, records in found.items() if records is not None}

    def _asides(self, choices: Sequence[Choice]) -> Iterator[tuple[str, Aside]]:
        names = {"the unloaded run that fixed the targets": UNLOADED}
        names |= {
            f"{one.arm}, interference": self._folder.interference_name(self._chosen.variant(one)) for one in choices
        }
        for what, name in names.items():
            if (aside := self._folder.aside(name)) is not None:
                yield what, aside

    def _tuned_on(self, choices: Sequence[Choice], points: Sequence[Point], rates: Sequence[float]) -> str:
        """In words: what requests the tuning had, if there was one, and of a trace each repeat."""
        runs, taken = self._runs, any(choice.origin for choice in choices)
        if runs.trace_rows is None:
            return "" if taken else "On requests of another seed than those measured."
        rate = max((point.file.rate for point in points), default=rates[-1])
        tuned = rates[first_tuned(rates)]
        tuning = "tuning", runs.stretch(runs.asked(tuned, None, part=part_of("tuning")).requests, None)
        listed = [] if taken else [tuning]
        listed += [
            (f"repeat {n + 1}", runs.stretch(runs.asked(rate, n).requests, n)) for n in range(self._options.repeats)
        ]
        return told(runs.trace_rows, [(name, rows) for name, rows in listed if rows is not None])
