"""What a comparison holds: its plan, its runs, and what its tuning chose."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from trtpd.perf.client_health import ClientHealth
from trtpd.perf.environment import Environment
from trtpd.perf.goodput import Figures
from trtpd.perf.records import Record
from trtpd.perf.slo import LengthSlo


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two comparisons the same one. An outside arm may join later."""

    fingerprint: str
    workload: str
    seed: int
    point_s: float
    cores: tuple[int, ...]
    chunks: tuple[int, ...]


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
    all that were tried, and what was not tried since the search had no reason to."""

    arm: str
    variant: str
    tried: dict[str, float]
    untried: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A run with its records, and figures by the comparison's targets."""

    file: PointFile
    records: tuple[Record, ...]
    figures: Figures

    @property
    def good_per_s(self) -> float:
        good = self.figures.goodput["trtpd"].per_s
        return good.value if good is not None else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything there is so far. `rates`: those that some arm was measured at. `skipped`: what was not measured, and
    why. `late_limit_s`: see client_health. `patience_s`: after so long a client gives up. `complete`: all steps were
    made."""

    plan: Plan
    slo: LengthSlo
    rates: tuple[float, ...]
    choices: tuple[Choice, ...]
    points: tuple[Point, ...]
    interference: dict[str, tuple[Record, ...]]
    environment: Environment
    complete: bool
    notes: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    late_limit_s: float = 0.0
    patience_s: float = 0.0
