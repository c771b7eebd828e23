"""What a soak found: the growth of everything that was watched, and one verdict."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trtpd.errors import InputError
from trtpd.perf.environment import Environment
from trtpd.perf.growth import Growth, growth
from trtpd.perf.soak_watch import Sample, read_samples

REPORT, SAMPLES = "report.json", "samples.csv"
MIB = float(1 << 20)
LEVEL_SHARE = 0.01
"""Of what is held on average: growth below this part an hour is within the limit, whatever the absolute limit."""

LIMITS: dict[str, float] = {
    "rss_bytes": MIB,
    "private_bytes": MIB,
    "fds": 2.0,
    "threads": 2.0,
    "shm_files": 0.5,
    "shm_bytes": MIB,
    "run_files": 0.5,
}
"""Growth an hour that is let pass. What has none is shown and not judged: requests and the blocks they hold, which go
up and down with the load (they are held to 0 whenever the load pauses), latency and CPU, which other work on the
machine changes, logs, and what fills up to a bound by plan (cached blocks)."""


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """The growth of one thing that one process or instance holds."""

    who: str
    what: str
    judged: bool
    growth: Growth


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """What the server still held (requests, blocks, leases) once nothing was under way, by name; nothing is right."""

    at_s: float
    held: dict[str, int]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """report.json. `requests` in all, by what became of them in `outcomes`; `checked` of them token by token."""

    environment: Environment
    seconds: float
    warm_up_s: float
    interrupted: bool
    capacity_per_s: float
    rate_per_s: float
    requests: int
    outcomes: dict[str, int]
    tokens: int
    checked: int
    faults: list[str]
    pauses: list[Pause]
    processes_changed: list[str]
    status_misses: int
    growth: list[Watched]
    verdict: str


def judge(samples: Sequence[Sample], warm_up_s: float) -> list[Watched]:
    """Each column by itself, over the samples after the warm-up in which it is there."""
    late = [sample for sample in samples if sample.at_s >= warm_up_s]
    columns = sorted({column for sample in late for column in sample.values})
    found = []
    for who, what in columns:
        seen = [(sample.at_s, sample.values[who, what]) for sample in late if (who, what) in sample.values]
        at_s, values = [one[0] for one in seen], [one[1] for one in seen]
        limit = max(LIMITS.get(what, 0.0), LEVEL_SHARE * sum(values) / len(values))
        found.append(
            Watched(who=who, what=what, judged=what in LIMITS, growth=growth(at_s, values, limit_per_hour=limit))
        )
    return found


def verdict_of(
    growths: Sequence[Watched], *, faults: Sequence[str], pauses: Sequence[Pause], changes: Sequence[str]
) -> str:
    """The worst of all: wrong answers, something held in a pause, a process that came or went, then growth."""
    if faults:
        return "wrong"
    if any(pause.held for pause in pauses):
        return "held"
    if changes:
        return "processes changed"
    verdicts = {one.growth.verdict for one in growths if one.judged}
    return next((worst for worst in ("grows", "unclear", "one step", "too short") if worst in verdicts), "flat")


def judged_again(folder: Path, warm_up_s: float) -> Report:
    """The report in `folder`, with other minutes left out at the beginning. Raises InputError if it can't be read."""
    try:
        report = msgspec.json.decode((folder / REPORT).read_bytes(), type=Report)
        samples = read_samples(folder / SAMPLES)
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{folder}: no soak's report and samples ({error}); give the folder of a former one"
        ) from error
    if warm_up_s >= report.seconds:
        raise InputError(
            f"{folder}: this soak lasted {report.seconds / 60:.1f} min; leave out less than that, not "
            f"{warm_up_s / 60:g} min"
        )
    growths = judge(samples, warm_up_s)
    verdict = verdict_of(growths, faults=report.faults, pauses=report.pauses, changes=report.processes_changed)
    return msgspec.structs.replace(report, warm_up_s=warm_up_s, growth=growths, verdict=verdict)


def growth_table(report: Report) -> list[str]:
    """Lines of text: what was done, then all that is not flat, then the rest."""
    outcomes = ", ".join(f"{number} {kind}" for kind, number in sorted(report.outcomes.items()))
    lines = [
        f"verdict: {report.verdict}{' (interrupted)' if report.interrupted else ''}",
        f"{report.seconds / 60:.1f} min at {report.rate_per_s:.2f} requests a second of {report.capacity_per_s:.2f}; "
        f"judged after {report.warm_up_s / 60:.1f} min",
        f"{report.requests} requests: {outcomes}; {report.tokens} tokens, {report.checked} answers compared",
        f"held in {len(report.pauses)} pauses: {[pause.held for pause in report.pauses if pause.held] or 'nothing'}; "
        f"processes that changed: {'; '.join(report.processes_changed) or 'none'}; looks without a status: "
        f"{report.status_misses}",
        *report.faults,
        f"{'who':<24} {'what':<20} {'level':>10} {'per hour':>10} {'95 %':>23} {'2nd half':>10} {'limit':>8}  verdict",
    ]
    order = sorted(report.growth, key=lambda one: (not one.judged, one.growth.verdict == "flat", one.who, one.what))
    return lines + [_line(one) for one in order]


def _line(one: Watched) -> str:
    found, what, scale = one.growth, one.what, 1.0
    if what.endswith("_bytes"):
        what, scale = what.removesuffix("_bytes") + ", MiB", MIB
    level, per_hour, low, high, later, limit = (
        round(value / scale, 4) + 0.0  # no -0.000
        for value in (
            found.level, found.per_hour, found.low, found.high, found.later_per_hour, found.limit_per_hour
        )
    )  # fmt: skip
    return (
        f"{one.who:<24} {what:<20} {level:>10.2f} {per_hour:>+10.3f} {f'{low:+.3f} to {high:+.3f}':>23} "
        f"{later:>+10.3f} {limit:>8.2f}  {_verdict_words(found, scale) if one.judged else '(not judged)'}"
    )


def _verdict_words(found: Growth, scale: float) -> str:
    if found.verdict != "one step" or found.step_at_s is None:
        return found.verdict
    return f"one step of {found.step / scale:.2f} after {found.step_at_s / 60:.1f} min, else flat"


def write(report: Report, folder: Path) -> None:
    """report.json, report.txt and growth.csv. Raises InputError if they can't be written."""
    try:
        (folder / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        (folder / "report.txt").write_text("\n".join(growth_table(report)) + "\n")
        with (folder / "growth.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("who", "what", "judged", *Growth.__struct_fields__))
            for one in report.growth:
                rows.writerow((one.who, one.what, one.judged, *msgspec.structs.astuple(one.growth)))
    except OSError as error:
        raise InputError(f"{folder}: the report can't be written ({error.strerror})") from error
