"""`trtpd compare`: the runs of the arms once each is tuned: the search for its best rate, the repeats, interference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtpd.perf.bench import Target
from trtpd.perf.client_health import late_limit_for
from trtpd.perf.climb import next_to_try
from trtpd.perf.compare_arms import SPLIT, Variant
from trtpd.perf.compare_budget import Step
from trtpd.perf.compare_folder import Folder
from trtpd.perf.compare_points import Points
from trtpd.perf.compare_runs import Runs
from trtpd.perf.compare_targets import disturbance
from trtpd.perf.compare_tuning import FIRST_SHARE
from trtpd.perf.comparison import Aside, Point, first_round, top_rate

INTERFERENCE_TIMES, INTERFERENCE_LEAST_S = 2.0, 30.0
"""A request of an interference run is given up after so many times what all its arrivals take, or so long at least."""


class Search:
    """Makes the points that are missing. `given`: the rates were, so all arms are measured at all of them."""

    def __init__(self, runs: Runs, folder: Folder, points: Points, *, repeats: int, given: bool) -> None:
        self._runs, self._folder, self._points = runs, folder, points
        self._repeats, self._given = repeats, given

    def run(self, chosen: Sequence[Variant], rates: Sequence[float]) -> None:
        """All rounds. Raises OutOfBudgetError where the next step doesn't fit."""
        for variant in chosen:
            self._search(variant, rates)
            if self._once_more(variant):
                self._search(variant, rates)
        tops = {variant.arm: top_rate(self._first_points(variant, rates)) for variant in chosen}
        for repeat in range(self._repeats):  # what the first round has is not made again
            for turn in range(len(chosen)):
                variant = chosen[(turn + repeat) % len(chosen)]
                found = {top for top in (tops[variant.arm], tops[SPLIT]) if top is not None}
                again = rates if self._given else sorted(found)
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
        points = self._first_points(variant, rates)
        faulty = {point.file.rate for point in points if point.file.fault}
        row, found = [rate for rate in rates if rate not in faulty], first_round(points)
        goods = {index: found[rate] for index, rate in enumerate(row) if rate in found}
        if self._given or not row:
            return next((rate for index, rate in enumerate(row) if index not in goods), None)
        first = min(FIRST_SHARE, len(row) - 1)
        index = next_to_try(len(row), goods, first=first, stride=2, most=lambda index: row[index])
        return None if index is None else row[index]

    def _first_points(self, variant: Variant, rates: Sequence[float]) -> list[Point]:
        """Those of the first round that are there."""
        found = (self._points.of("points", variant, rate, 0) for rate in rates)
        return [point for point in found if point is not None]

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
