"""The loaded runs of a comparison: measured, kept in its folder, and read back, each accounted for once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from trtpd.build.files import digest_of
from trtpd.perf.bench import Target
from trtpd.perf.client import Run
from trtpd.perf.client_health import late_limit_for
from trtpd.perf.compare_arms import Variant
from trtpd.perf.compare_budget import Step
from trtpd.perf.compare_folder import Folder, Kind
from trtpd.perf.compare_runs import Runs
from trtpd.perf.compare_targets import PATIENCE, patience_s
from trtpd.perf.comparison import Point, PointFile
from trtpd.perf.goodput import Deployment, account
from trtpd.perf.make_workload import make
from trtpd.perf.prompt_text import Segment
from trtpd.perf.slo import LengthSlo
from trtpd.perf.workload import Workload

TUNING_PART = 0.5


@dataclass(frozen=True, kw_only=True)
class Points:
    """Runs by one comparison's targets and definition of goodput."""

    runs: Runs
    folder: Folder
    slo: LengthSlo
    definition: str = "trtpd"
    targets_sent: bool = False
    _accounted: dict[Path, Point] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def patience_s(self) -> float:
        """After so long a client gives up."""
        return patience_s(self.slo, self.runs.sample)

    def step(self, kind: Kind, variant: Variant, rate: float, repeat: int) -> Step:
        """The run as a step: the last request is waited for until the client gives up; of a session's turns the former
        ones are expected within their targets."""
        drain_s = self.patience_s * (1.0 + (self._turns - 1) / PATIENCE)
        there = self.folder.run_file(kind, variant, rate, repeat)
        return Step(
            name=name_of(kind, variant, rate, repeat),
            arrive_s=arrive_s(self.runs, kind, rate),
            drain_s=drain_s,
            again="" if there is None else there.fault,
        )

    @cached_property
    def _turns(self) -> int:
        """Of the longest session."""
        places: list[int] = []
        for ask in self.runs.sample:
            places.append(1 if ask.after is None else places[ask.after] + 1)
        return max(places)

    def measure(self, kind: Kind, variant: Variant, target: Target, rate: float, repeat: int) -> Point:
        """Makes a run, in place of one that is there."""
        asked = self.runs.asked(rate, None if kind == "tuning" else repeat, part=part_of(kind))
        workload = with_own_text(_at_exactly(rate, make(asked)), kind, rate, repeat)
        there = self.folder.run_file(kind, variant, rate, repeat) is not None
        name = name_of(kind, variant, rate, repeat) + ", again" * there
        sent = self.slo if self.targets_sent else None
        driven = self.runs.drive(target, workload, name, timeout_s=self.patience_s, targets=sent)
        run = driven.run
        file = PointFile(
            arm=variant.arm,
            variant=variant.label,
            rate=rate,
            repeat=repeat,
            until_s=run.info.offered_until_s,
            health=run.health,
            cpu_s=driven.cpu_s,
            fault=self.runs.fault(driven, late_limit_for(self.slo)),
            client_nice=driven.client_nice,
            others_cores=driven.others_cores,
        )
        self.keep(kind, variant, file, run)
        return self._point(kind, variant, file)

    def keep(self, kind: Kind, variant: Variant, file: PointFile, run: Run) -> None:
        self.folder.keep(kind, variant, file, run)
        self._accounted.pop(self.folder.run_path(kind, variant, file.rate, file.repeat), None)

    def of(self, kind: Kind, variant: Variant, rate: float, repeat: int) -> Point | None:
        """A run with its figures; None if it was not made."""
        file = self.folder.run_file(kind, variant, rate, repeat)
        return None if file is None else self._point(kind, variant, file)

    def measured(self, variant: Variant) -> Iterator[Point]:
        """All measured runs of a variant."""
        for file in self.folder.points(variant):
            yield self._point("points", variant, file)

    def _point(self, kind: Kind, variant: Variant, file: PointFile) -> Point:
        path = self.folder.run_path(kind, variant, file.rate, file.repeat)
        if path not in self._accounted:
            records = self.folder.records(kind, variant, file)
            figures = account(
                records,
                self.slo,
                until_s=file.until_s,
                deployment=Deployment(units=self.runs.cores),
                definition=self.definition,
            )
            self._accounted[path] = Point(file=file, records=records, figures=figures)
        return self._accounted[path]


def name_of(kind: Kind, variant: Variant, rate: float, repeat: int) -> str:
    """Of a run, for a person."""
    which = "tuning" if kind == "tuning" else f"repeat {repeat + 1}"
    return f"{variant.arm} ({variant.label}) at {rate:g} requests/s, {which}"


def arrive_s(runs: Runs, kind: Kind, rate: float) -> float:
    """So long requests arrive in a run at that rate."""
    return runs.asked(rate, None, part=part_of(kind)).requests / rate


def part_of(kind: Kind) -> float:
    """Of a point's time."""
    return TUNING_PART if kind == "tuning" else 1.0


def with_own_text(workload: Workload, kind: Kind, rate: float, repeat: int) -> Workload:
    """The same lengths, and the same sharing among them, in words that no other run asks: a server that is asked at one
    rate after another must not know the prompts from before."""
    run = int(digest_of(kind, rate, repeat)[:10], 16)
    asks = (
        msgspec.structs.replace(
            ask, segments=tuple(Segment(seed=(one.seed << 40) + run, tokens=one.tokens) for one in ask.segments)
        )
        for ask in workload.asks
    )
    return msgspec.structs.replace(workload, asks=tuple(asks))


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
