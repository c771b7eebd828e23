"""What a comparison holds: its plan, its runs, and what its tuning chose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from trtpd.perf.client_health import ClientHealth
from trtpd.perf.environment import Environment
from trtpd.perf.goodput import Figures
from trtpd.perf.records import Record
from trtpd.perf.slo import LengthSlo


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two comparisons the same one. An outside arm may join later.

    `targets_sent`: with the requests, to our own arms · `requests`: all that shapes them but rate, number and the run's
    own seed · `settings`: the build's, without pools · `variants`: what each is made of. These three are None in a plan
    of an older trtpd, which did not note them.
    """

    fingerprint: str
    workload: str
    seed: int
    point_s: float
    cores: tuple[int, ...]
    chunks: tuple[int, ...]
    definition: str = "trtpd"
    targets_sent: bool = False
    requests: dict[str, object] | None = None
    settings: dict[str, object] | None = None
    variants: dict[str, object] | None = None


class Aside(msgspec.Struct, frozen=True, kw_only=True):
    """A run beside the loaded ones (on the unloaded server, or of interference), without its records. `fault`: why its
    figures are not to be trusted, though it was made twice."""

    fault: str
    health: ClientHealth
    others_cores: float


class PointFile(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one variant. `fault`: why its figures must not be used. `client_nice`: the client's priority.
    `others_cores`: what other work on the machine took meanwhile; None where that was not looked at."""

    arm: str
    variant: str
    rate: float
    repeat: int
    until_s: float
    health: ClientHealth
    cpu_s: dict[str, float]
    fault: str = ""
    client_nice: int = 0
    others_cores: float | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What the tuning of an arm found: the variant taken, the share served within targets (mean over scales of them) of
    all that were tried, and what was not tried since the search had no reason to. `unusable`: variants that are not
    ranked since their runs were disturbed, and how. `origin`: the comparison it was taken from, if it was another."""

    arm: str
    variant: str
    tried: dict[str, float]
    untried: tuple[str, ...] = ()
    unusable: dict[str, str] = {}
    origin: str = ""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run that the comparison has a place for. "served nothing": none within the targets. `reason`:
    why it was left out or not run. `variant`: "" before the arm's is chosen."""

    arm: str
    variant: str
    rate: float
    repeat: int
    state: Literal["measured", "served nothing", "left out", "not run"]
    reason: str = ""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How the command came to its end. `next_step`: what did not fit into the budget any more, with its time.
    `rest_s`: what remains takes so long at least. `tuning_runs`: those that are there of each arm that is not tuned
    yet. `folder`: where all that was measured is."""

    how: Literal["complete", "budget", "interrupted"] = "complete"
    folder: str = ""
    budget_s: float = 0.0
    spent_s: float = 0.0
    next_step: str = ""
    next_needs_s: float = 0.0
    rest_s: float = 0.0
    tuning_runs: dict[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A run with its records, and figures by the comparison's targets."""

    file: PointFile
    records: tuple[Record, ...]
    figures: Figures

    @property
    def definition(self) -> str:
        """The comparison's, of goodput."""
        return self.figures.definition

    @property
    def good_per_s(self) -> float | None:
        """By the comparison's definition; None where that has a goal and it was missed."""
        good = self.figures.goodput[self.definition].per_s
        return None if good is None else good.value


def first_round(points: Iterable[Point]) -> dict[float, float]:
    """Goodput by rate of an arm's first round, of the runs that can be used. Where the goal was missed nothing is
    gained."""
    return {p.file.rate: p.good_per_s or 0.0 for p in points if p.file.repeat == 0 and not p.file.fault}


def top_rate(points: Iterable[Point]) -> float | None:
    """The rate of most goodput in the first round; None where none can be used."""
    goods = first_round(points)
    return max(goods, key=lambda rate: goods[rate], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything there is so far. `rates`: those that were given, or that some arm was measured at. `skipped`: what
    was not measured, and why. `late_limit_s`: see client_health. `patience_s`: after so long a client gives up. `runs`:
    what became of each. `asides`: runs beside the loaded ones, by what they were. `tuned_on`: what requests the tuning
    had."""

    plan: Plan
    slo: LengthSlo
    rates: tuple[float, ...]
    choices: tuple[Choice, ...]
    points: tuple[Point, ...]
    interference: dict[str, tuple[Record, ...]]
    environment: Environment
    notes: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    late_limit_s: float = 0.0
    patience_s: float = 0.0
    asides: dict[str, Aside] = field(default_factory=dict)
    tuned_on: str = ""
    runs: tuple[RunState, ...] = ()
    end: End = field(default_factory=End)

    @property
    def complete(self) -> bool:
        """All steps were made."""
        return self.end.how == "complete"
