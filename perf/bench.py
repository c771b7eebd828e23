"""`trtpd bench`: one workload against one running server, measured and accounted.

Look at the server, make the workload to fit it, drive it, look again, and refuse to report if the client was what
was slow.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from trtpd.perf.client import Client, ClientOptions, Run, no_progress
from trtpd.perf.client_health import ClientHealth, refuse_if_bottleneck
from trtpd.perf.environment import Environment, this_environment
from trtpd.perf.goodput import Deployment, Figures, account, attainment_over_scale
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.openai_transport import OpenAiTransport
from trtpd.perf.process_cpu import cpu_times, server_process
from trtpd.perf.records import Record
from trtpd.perf.slo import FixedSlo, Slo
from trtpd.perf.transport import Transport
from trtpd.perf.triton_transport import TritonTransport
from trtpd.perf.workload import Workload
from trtpd.runtime.serve.client import status

SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
PROMPT_TOLERANCE = 0.05
SERVERS_TARGETS = " (from the server's pipeline file where not given)"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server: `url` is Triton's gRPC address, or with `openai` the root of an OpenAI server. `extra` goes into each
    OpenAI request."""

    url: str
    openai: bool = False
    model: str = "pd"
    channels: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InputError for an address that can't be."""
        self.transport()

    def transport(self) -> Transport:
        if self.openai:
            return OpenAiTransport(self.url, model=self.model, extra=self.extra)
        return TritonTransport(self.url, model=self.model, channels=self.channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """`deployment` None: the CPUs of this host if the server runs here, else not known. `warm_up_s` None: a tenth of
    the run. `send_targets`: the requests carry their targets, so that the router can plan and refuse by them. Targets
    that `slo` leaves open are those of the server's pipeline file, if it has some."""

    target: Target
    wanted: Wanted
    slo: Slo = field(default_factory=FixedSlo)
    warm_up_s: float | None = None
    timeout_s: float = 120.0
    deployment: Deployment | None = None
    send_targets: bool = True
    targets_remark: str = ""


class ServerLook(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of itself around the run; counters, faults and events are those of the run."""

    about: dict[str, str]
    instances: dict[str, dict[str, Any]]
    counters: dict[str, int]
    faults: tuple[str, ...]
    events: tuple[str, ...] = ()


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """report.json of a benchmark. `requests`: of the workload, those that an interrupted run did not come to included.
    `cpu_s`: CPU seconds of each kind of process over `health.wall_s`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A benchmark with all it saw."""

    result: Result
    workload: Workload
    run: Run


def bench(options: BenchOptions, *, progress: Progress = no_progress) -> Measured:
    """Runs to the end of the workload, or until SIGINT, which ends it early with a report of what was seen so far.

    Raises InputError for a workload that can't be made, ServeError if the server can't be reached, BottleneckError
    instead of figures that would describe the client. Call it from the main thread.
    """
    before = _status(options.target)
    options = with_servers_targets(options, before)
    wanted = fitted(options.wanted, before)
    workload = make(wanted)
    environment = this_environment()
    run, cpu_s = drive(options, workload, progress)
    refuse_if_bottleneck(run.health, run.records)
    return Measured(
        result=result_of(options, workload, run, cpu_s, environment, _look(before, _status(options.target))),
        workload=workload,
        run=run,
    )


def fitted(wanted: Wanted, found: Mapping[str, Any] | None) -> Wanted:
    """Bounds lengths by what the server can hold, unless they are bounded already."""
    longest = None if found is None else found.get("max_seq_tokens")
    if longest is None or wanted.fit.max_total_tokens is not None:
        return wanted
    return replace(wanted, fit=replace(wanted.fit, max_total_tokens=int(longest)))


def with_servers_targets(options: BenchOptions, found: Mapping[str, Any] | None) -> BenchOptions:
    """The options with targets that are open filled in from the server's status."""
    told = (found or {}).get("slo") or {}
    slo = options.slo
    if not isinstance(slo, FixedSlo):
        return options
    ttft_s, tpot_s = (None if told.get(name) is None else told[name] / 1e3 for name in ("ttft_ms", "tpot_ms"))
    filled = FixedSlo(
        ttft_s=ttft_s if slo.ttft_s is None else slo.ttft_s, tpot_s=tpot_s if slo.tpot_s is None else slo.tpot_s
    )
    return options if filled == slo else replace(options, slo=filled, targets_remark=SERVERS_TARGETS)


def drive(options: BenchOptions, workload: Workload, progress: Progress) -> tuple[Run, dict[str, float]]:
    """One run, and the CPU that the server's processes used meanwhile."""
    root = server_process(options.target.url)

    async def live() -> tuple[Run, dict[str, float]]:
        targets = options.slo if options.send_targets else None
        client = Client(
            workload,
            options.target.transport(),
            ClientOptions(timeout_s=options.timeout_s, targets=targets),
            progress=progress,
        )
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, client.interrupt)
        try:
            earlier = cpu_times(root)
            run = await client.run()
            return run, cpu_times(root).since(earlier) if run.records else {}  # without a run, of no time at all
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    run, cpu_s = asyncio.run(live())
    return run, cpu_s | {"client": run.health.cpu_share * run.health.wall_s}


def result_of(
    options: BenchOptions,
    workload: Workload,
    run: Run,
    cpu_s: dict[str, float],
    environment: Environment,
    server: ServerLook | None,
) -> Result:
    """All figures of a run."""
    until_s = run.info.offered_until_s
    deployment = options.deployment or _this_host(options.target)
    figures = account(
        run.records,
        options.slo,
        until_s=until_s,
        warm_up_s=options.warm_up_s,
        deployment=deployment,
        seed=workload.seed,
    )
    scales = attainment_over_scale(run.records, options.slo, SCALES, warm_up_s=figures.warm_up_s)
    ratio = _prompt_ratio(run.records)
    return Result(
        workload=workload.name,
        seed=workload.seed,
        requests=len(workload.asks),
        notes=workload.notes,
        targets=f"{options.slo}{options.targets_remark}",
        slo=options.slo,
        figures=figures,
        health=run.health,
        cpu_s=cpu_s,
        server=server,
        attainment_over_scale=tuple(scales),
        prompt_tokens_served_per_asked=ratio,
        interrupted=run.info.interrupted,
        remarks=tuple(remarks(figures, run, ratio, environment)),
        environment=environment,
    )


def remarks(figures: Figures, run: Run, prompt_ratio: float | None, environment: Environment) -> list[str]:
    """What a reader must know before he believes the figures."""
    found = []
    if run.info.interrupted:
        found.append(f"Interrupted after {run.info.offered_until_s:.1f} s; what was under way then is unmeasured.")
    for name, drift in figures.drift.items():
        if drift.flagged:
            found.append(
                f"{name.upper()} drifted: the last third's median is {drift.ratio.value:.2f} times the first's "
                f"({drift.ratio.low:.2f} to {drift.ratio.high:.2f}). This was no steady state."
            )
    if prompt_ratio is not None and abs(prompt_ratio - 1.0) > PROMPT_TOLERANCE:
        found.append(f"The server counted {prompt_ratio:.2f} times the prompt tokens asked for (another tokenizer).")
    if environment.load_average > 0.5 * environment.cpus_usable:
        found.append(f"The load average was {environment.load_average:g} when the run began: other work ran here.")
    if figures.offered < 100:
        found.append(f"{figures.offered} requests are few for a p99; see its interval.")
    return found


def _this_host(target: Target) -> Deployment | None:
    if server_process(target.url) is None:
        return None
    return Deployment(units=len(os.sched_getaffinity(0)), unit="core")


def _prompt_ratio(records: tuple[Record, ...]) -> float | None:
    told = [(r.served_prompt_tokens, r.prompt_tokens) for r in records if r.served_prompt_tokens is not None]
    asked = sum(prompt for _, prompt in told)
    return sum(served for served, _ in told if served is not None) / asked if asked else None


def _status(target: Target) -> dict[str, Any] | None:
    """None for a server or a model that has no such query."""
    return None if target.openai or target.model != "pd" else status(target.url)


def _look(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> ServerLook | None:
    if before is None or after is None:
        return None
    earlier = before["counters"]
    counters = {name: value - earlier.get(name, 0) for name, value in after["counters"].items()}
    return ServerLook(
        about={name: str(after[name]) for name in ("model", "fingerprint", "trtpd", "max_seq_tokens") if name in after},
        instances=dict(after["instances"]),
        counters={name: value for name, value in sorted(counters.items()) if value},
        faults=_new(before, after, "faults"),
        events=_new(before, after, "events"),
    )


def _new(before: Mapping[str, Any], after: Mapping[str, Any], notes: str) -> tuple[str, ...]:
    """What has been noted since; the same words as before only as often as they are there more often."""
    known = Counter(note["what"] for note in before.get(notes, ()))
    found = []
    for note in after.get(notes, ()):
        if known[note["what"]]:
            known[note["what"]] -= 1
        else:
            found.append(note["what"])
    return tuple(found)
