"""What a benchmark leaves behind, and all figures made from it: at once, or again later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from trtpd.perf.client import Run
from trtpd.perf.client_health import ClientHealth, late_limit_s
from trtpd.perf.environment import Environment
from trtpd.perf.goodput import Deployment, Figures, account, attainment_over_scale
from trtpd.perf.records import Record
from trtpd.perf.slo import Slo
from trtpd.perf.workload import Workload

SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
PROMPT_TOLERANCE = 0.05


class ServerLook(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of itself around the run; counters, faults and events are those of the run."""

    about: dict[str, str]
    instances: dict[str, dict[str, Any]]
    counters: dict[str, int]
    faults: tuple[str, ...]
    events: tuple[str, ...] = ()


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What must be known of a run beside its requests. `command` made it; with `arguments` another `trtpd bench` asks
    the same server in the same way. `warm_up_s` None: a tenth of the run. `server` None: not asked, or
    `server_fault` says why it gave no answer. `server_away_s`: when it went away for good, if it did; `server_gone`:
    the run was ended for that. `refused`: why nothing of it is reported."""

    slo: Slo
    targets_remark: str
    warm_up_s: float | None
    deployment: Deployment | None
    command: str
    arguments: tuple[str, ...]
    health: ClientHealth
    cpu_s: dict[str, float]
    environment: Environment
    server: ServerLook | None = None
    server_fault: str = ""
    server_away_s: float | None = None
    server_gone: bool = False
    definition: str = "trtpd"
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A run with all it saw, not yet accounted for."""

    about: About
    workload: Workload
    run: Run


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """report.json of a benchmark. `requests`: of the workload, those that a run which ended early did not come to
    included. `late_limit_s`: how late its client may have been (p99). `server_away_s`: see About.
    `cpu_s`: CPU seconds of each kind of process over `health.wall_s`. `command` made the run, `again` these figures
    of it if they were made later; `replay`, where the workload is kept, asks the same once more by these targets."""

    workload: str
    seed: int
    requests: int
    notes: tuple[str, ...]
    targets: str
    slo: Slo
    figures: Figures
    health: ClientHealth
    cpu_s: dict[str, float]
    server: ServerLook | None
    attainment_over_scale: tuple[tuple[float, float | None], ...]
    prompt_tokens_served_per_asked: float | None
    interrupted: bool
    remarks: tuple[str, ...]
    environment: Environment
    late_limit_s: float
    server_away_s: float | None = None
    server_gone: bool = False
    command: str = ""
    again: str = ""
    replay: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A benchmark with its figures."""

    result: Result
    taken: Taken

    @property
    def workload(self) -> Workload:
        return self.taken.workload

    @property
    def run(self) -> Run:
        return self.taken.run


def measured_of(taken: Taken, *, again: str = "") -> Measured:
    """All figures of a run; `again`: the command that asked for them later.

    Raises InputError for a warm-up that leaves nothing.
    """
    about, workload, run = taken.about, taken.workload, taken.run
    figures = account(
        run.records,
        about.slo,
        until_s=run.info.offered_until_s,
        warm_up_s=about.warm_up_s,
        deployment=about.deployment,
        seed=workload.seed,
        definition=about.definition,
    )
    scaled = attainment_over_scale(
        run.records, about.slo, SCALES, warm_up_s=figures.warm_up_s, definition=about.definition
    )
    result = Result(
        workload=workload.name,
        seed=workload.seed,
        requests=len(workload.asks),
        notes=workload.notes,
        targets=f"{about.slo}{about.targets_remark}",
        slo=about.slo,
        figures=figures,
        health=run.health,
        cpu_s=about.cpu_s,
        server=about.server,
        attainment_over_scale=tuple(scaled),
        prompt_tokens_served_per_asked=_prompt_ratio(run.records),
        interrupted=run.info.interrupted and not about.server_gone,
        remarks=tuple(remarks(figures, taken)),
        environment=about.environment,
        late_limit_s=late_limit_s(run.records),
        server_away_s=about.server_away_s,
        server_gone=about.server_gone,
        command=about.command,
        again=again,
    )
    return Measured(result=result, taken=taken)


def remarks(figures: Figures, taken: Taken) -> list[str]:
    """What a reader must know before he believes the figures."""
    run = taken.run
    found = []
    if taken.about.server_away_s is not None:
        found.append(away_remark(taken, taken.about.server_away_s))
    elif taken.about.server_fault:
        found.append(f"The server could not be asked about itself after the run: {taken.about.server_fault}.")
    if run.info.interrupted and not taken.about.server_gone:
        found.append(f"Interrupted after {run.info.offered_until_s:.1f} s; what was under way then is unmeasured.")
    if figures.no_rate:
        found.append(figures.no_rate)
    found += drift_remarks(figures)
    found += token_remarks([record for record in run.records if record.scheduled_s >= figures.warm_up_s])
    ratio = _prompt_ratio(run.records)
    if ratio is not None and abs(ratio - 1.0) > PROMPT_TOLERANCE:
        found.append(f"The server counted {ratio:.2f} times the prompt tokens asked for (another tokenizer).")
    found += taken.about.environment.load_remarks
    if figures.ttft is not None and figures.ttft.p99.high is None:
        found.append(f"{figures.ttft.count} answers are too few to bound a p99 from above.")
    return found


def away_remark(taken: Taken, since_s: float) -> str:
    """What became of the requests of a server that went away."""
    records, asked = taken.run.records, len(taken.workload.asks)
    lost = sum(record.state == "failed" and (record.ended_s or 0.0) >= since_s for record in records)
    text = (
        f"The server went away at {since_s:.1f} s, and connections to it were refused from then on: {lost} requests "
        "failed"
    )
    if not taken.about.server_gone:
        return f"{text}."
    return (
        f"{text}. So the run was ended at {taken.run.info.offered_until_s:.1f} s; the {asked - len(records)} requests "
        "that were not due by then were never offered and count nowhere."
    )


def shortfall(result: Result) -> str:
    """Why a run is not what was asked for, in one line; empty if it is."""
    figures = result.figures
    if result.server_away_s is not None:
        return f"the server went away at {result.server_away_s:.1f} s of the run"
    if figures.offered == 0:
        return (
            f"no request was counted: all {figures.cut} were due in the warm-up of {figures.warm_up_s:g} s; give a "
            "shorter --warm-up-s, or more --requests"
        )
    if figures.completion is not None and figures.completion.value == 0.0:
        became = ", ".join(f"{verdict} {count}" for verdict, count in figures.verdicts.items())
        return f"no request was served: {became}"
    return ""


def drift_remarks(figures: Figures) -> list[str]:
    """What changed in the course of the run."""
    found = []
    for name, drift in figures.drift.items():
        if drift.flagged and name == "attainment":
            points = drift.change.times(100.0).around(lambda one: f"{one:+.0f}")
            found.append(
                f"Attainment drifted: {drift.first:.0%} of the first third of the requests were served well and "
                f"{drift.last:.0%} of the last ({points} points). This was no steady state."
            )
        elif drift.flagged:
            found.append(
                f"{name.upper()} drifted: the last third's median is {drift.change.value:.2f} times the first's "
                f"({drift.change.around(lambda one: f'{one:.2f}')}). This was no steady state."
            )
    return found


def token_remarks(records: list[Record]) -> list[str]:
    """What is not known of tokens and their instants."""
    finished = [record for record in records if record.state == "finished"]
    guessed = sum(record.tokens_guessed for record in finished)
    whole = sum(record.in_one_response for record in finished)
    found = []
    if guessed:
        found.append(
            f"The server did not count the tokens of {guessed} of {len(finished)} answers (no usage): each response "
            "with text counts as one token there, so tokens/s, TPOT and ITL are those of responses."
        )
    if whole:
        found.append(
            f"{whole} of {len(finished)} answers came in one response: they have no pace, and where there is a TPOT "
            "target they are unmeasured."
        )
    return found


def _prompt_ratio(records: tuple[Record, ...]) -> float | None:
    told = [(r.served_prompt_tokens, r.prompt_tokens) for r in records if r.served_prompt_tokens is not None]
    asked = sum(prompt for _, prompt in told)
    return sum(served for served, _ in told if served is not None) / asked if asked else None
