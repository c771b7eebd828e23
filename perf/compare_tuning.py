"""`trtpd compare`: which variant stands for each arm, and the runs that find out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trtpd.perf.compare_arms import Variant, next_variant
from trtpd.perf.compare_folder import Folder
from trtpd.perf.compare_plan import Like
from trtpd.perf.compare_points import Points
from trtpd.perf.compare_runs import DisturbedError, Runs
from trtpd.perf.comparison import Choice, Point
from trtpd.perf.goodput import attainment_over_scale

FIRST_SHARE = 3
TUNED_SHARE, TUNING_STEP = 0.3, 2
"""Of a tuning's requests that the best variant has to serve within targets, and by how many of the grid's rates lower
it is tried again if it doesn't."""

TUNING_SCALES = (0.5, 0.71, 1.0, 1.41, 2.0)


def first_tuned(rates: Sequence[float]) -> int:
    """Which of the rates a tuning begins at."""
    return min(FIRST_SHARE, len(rates) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which variant stands for each arm: as a former call or another comparison (`like`) chose it."""

    folder: Folder
    variants: Mapping[str, Sequence[Variant]]
    like: Like | None

    def given(self, arm: str) -> Choice | None:
        """What a former call chose or took for this arm, or what another comparison chose. It stays."""
        found = self.folder.choice(arm)
        if found is None and self.like is not None:
            found = self.like.choice(arm)
            if found is not None and self._is_known(found):
                self.folder.keep_choice(found)
        return found if found is not None and self._is_known(found) else None

    def _is_known(self, choice: Choice) -> bool:
        return any(one.label == choice.variant for one in self.variants[choice.arm])

    def variant(self, choice: Choice) -> Variant:
        return next(one for one in self.variants[choice.arm] if one.label == choice.variant)

    def known(self, arm: str) -> Variant | None:
        """None before it is tuned."""
        if len(self.variants[arm]) == 1:
            return self.variants[arm][0]
        choice = self.given(arm)
        return None if choice is None else self.variant(choice)


class Tuner:
    """Measures the variants of an arm on requests of their own. Each run leaves a file."""

    def __init__(self, runs: Runs, folder: Folder, points: Points, variants: Mapping[str, Sequence[Variant]]) -> None:
        self._runs, self._folder, self._points, self._variants = runs, folder, points, variants

    def tune(self, arm: str, rates: Sequence[float]) -> Choice:
        """The variant that serves most within targets below the capacity, on another seed. Where none serves
        TUNED_SHARE, the rate was beyond what this arm can do and which is best there is chance: at a lower one then.
        """
        candidates = self._variants[arm]
        if len(candidates) == 1:
            return Choice(arm=arm, variant=candidates[0].label, tried={})
        index = first_tuned(rates)
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
                definition=self._points.definition,
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
