"""What a comparison still has to do at least, and how long that takes at least: told before anything begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trtpd.perf.compare_arms import Variant
from trtpd.perf.compare_budget import UNLOADED_S, Budget
from trtpd.perf.compare_folder import Folder, Kind
from trtpd.perf.compare_points import TUNING_PART, arrive_s
from trtpd.perf.compare_runs import LEAST_REQUESTS, Runs

LEAST_SEARCHED = 2
"""Rates that a search looks at at least: its first, and the next one up or down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Runs of one kind that remain, at least: in each of them requests arrive for `run_s` at least."""

    what: str
    runs: int
    run_s: float
    starts: int

    def lasts_s(self, budget: Budget) -> float:
        return self.runs * self.run_s + self.starts * (budget.start_s + budget.stop_s)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """`chosen` gives an arm's variant once it is tuned. `rates`: those given, or None where they follow from targets
    that are not there yet. `searched`: an arm's best rate is looked for. `tuned_at`: the rate of the first tuning."""

    folder: Folder
    runs: Runs
    variants: Mapping[str, Sequence[Variant]]
    chosen: Callable[[str], Variant | None]
    targets_there: bool
    rates: Sequence[float] | None
    searched: bool
    tuned_at: float | None
    repeats: int

    def parts(self) -> list[Part]:
        """Those of which something remains."""
        unloaded = 0 if self.targets_there else 1
        tunings = sum(self._tunings(arm) for arm in self.variants)
        points, starts = self._points()
        found = (
            Part(what="unloaded run", runs=unloaded, run_s=UNLOADED_S, starts=unloaded),
            Part(what="tuning run", runs=tunings, run_s=self._run_s("tuning", self.tuned_at), starts=tunings),
            Part(what="measured run", runs=points, run_s=self._shortest_s(), starts=starts),
        )
        return [part for part in found if part.runs]

    def lasts_s(self) -> float:
        return sum(part.lasts_s(self.runs.budget) for part in self.parts())

    def lines(self) -> list[str]:
        """For the user, before anything begins."""
        budget, parts = self.runs.budget, self.parts()
        arms = "; ".join(f"{arm} ({len(row)} variants)" if len(row) > 1 else arm for arm, row in self.variants.items())
        rates = "each arm's best, which is looked for"
        if not self.searched and self.rates is not None:
            rates = f"{', '.join(f'{rate:g}' for rate in self.rates)} requests/s"
        found = [f"arms: {arms}", f"rates: {rates}; repeats: {self.repeats}"]
        if not parts:
            return [*found, "nothing is left to do but runs that were left out"]
        said = ", ".join(f"{_many(part.runs, part.what)} ({part.run_s:.0f} s each)" for part in parts)
        starts = _many(sum(part.starts for part in parts), "start") + " and stops of a server"
        lasts_s = self.lasts_s()
        enough = "" if lasts_s <= budget.seconds else ", which ends before that: the same command goes on then"
        found.append(
            f"to do at least: {said}, {starts} (about {budget.start_s + budget.stop_s:.0f} s each): about "
            f"{lasts_s:.0f} s in all; the budget is {budget.seconds:g} s{enough}"
        )
        return found + self._lengthened()

    def _lengthened(self) -> list[str]:
        """Whether runs last longer than was asked for."""
        long = self._run_s("points", None if self.rates is None else min(self.rates))
        if long <= 1.01 * self.runs.point_s:
            return []
        return [
            f"a run has at least {LEAST_REQUESTS} requests, so at {min(self.rates or ()):g} requests/s it lasts "
            f"{long:.0f} s and not --point-s {self.runs.point_s:g}; fewer would show nothing"
        ]

    def _run_s(self, kind: Kind, rate: float | None) -> float:
        if rate is None:
            return self.runs.point_s * (TUNING_PART if kind == "tuning" else 1.0)
        return arrive_s(self.runs, kind, rate)

    def _shortest_s(self) -> float:
        return self._run_s("points", None if self.rates is None else max(self.rates))

    def _tunings(self, arm: str) -> int:
        """Each group's middle variant is tried at least."""
        row = self.variants[arm]
        if len(row) < 2 or self.chosen(arm) is not None:
            return 0
        groups: dict[str, bool] = {}
        for one in row:
            made = self.tuned_at is not None and self._there("tuning", one, self.tuned_at, 0)
            groups[one.group] = groups.get(one.group, False) or made
        return sum(not made for made in groups.values())

    def _points(self) -> tuple[int, int]:
        """Measured runs that are missing, and the starts of servers for them: each arm's behind one, round by round."""
        runs = starts = 0
        for arm in self.variants:
            variant = self.chosen(arm)
            for repeat in range(self.repeats):
                missing = self._missing(variant, repeat)
                runs, starts = runs + missing, starts + (missing > 0)
        return runs, starts

    def _missing(self, variant: Variant | None, repeat: int) -> int:
        if self.searched:
            least = min(LEAST_SEARCHED, len(self.rates or (0, 0))) if repeat == 0 else 1
            files = () if variant is None else self.folder.points(variant)
            made = sum(file.repeat == repeat and not file.fault for file in files)
            return max(0, least - made)
        rates = self.rates or ()
        return sum(variant is None or not self._there("points", variant, rate, repeat) for rate in rates)

    def _there(self, kind: Kind, variant: Variant, rate: float, repeat: int) -> bool:
        """Made, and fit for use."""
        file = self.folder.run_file(kind, variant, rate, repeat)
        return file is not None and not file.fault


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
