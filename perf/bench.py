"""`trtpd bench`: one workload against one running server, measured and accounted.

Look at the server, make the workload to fit it, drive it, look again, and refuse to report if the client was what
was slow.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from trtpd.errors import TrtpdError
from trtpd.perf.bench_folder import keep, load
from trtpd.perf.bench_plan import clamped, how_long
from trtpd.perf.bench_result import About, Measured, ServerLook, Taken, measured_of
from trtpd.perf.client import Client, ClientOptions, Run, no_progress
from trtpd.perf.client_health import BottleneckError, refuse_if_bottleneck
from trtpd.perf.environment import Environment, this_environment
from trtpd.perf.goodput import Deployment
from trtpd.perf.make_workload import Wanted, make
from trtpd.perf.openai_transport import OpenAiTransport
from trtpd.perf.process_cpu import cpu_times, server_process, usable_cores
from trtpd.perf.server_watch import WatchedTransport, listener
from trtpd.perf.slo import FixedSlo, Slo
from trtpd.perf.transport import Transport
from trtpd.perf.triton_transport import TritonTransport
from trtpd.perf.workload import Workload
from trtpd.runtime.serve.client import status

SERVERS_TARGETS = " (from the server's pipeline file where not given)"

Progress = Callable[[str, int, int], None]
Say = Callable[[str], None]


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
    """`deployment` None: the CPUs that the server may use if it runs here, else not known. `warm_up_s` None: a tenth of
    the run. `definition`: of goodput, for what is said first. `command`: what the user typed.

    `send_targets`: the requests carry their targets, so that the router can plan and refuse by them. Targets
    that `slo` leaves open are those of the server's pipeline file, if it has some."""

    target: Target
    wanted: Wanted
    slo: Slo = field(default_factory=FixedSlo)
    warm_up_s: float | None = None
    timeout_s: float = 120.0
    deployment: Deployment | None = None
    definition: str = "trtpd"
    send_targets: bool = True
    targets_remark: str = ""
    command: str = ""


def bench(
    options: BenchOptions,
    *,
    progress: Progress = no_progress,
    folder: Path | None = None,
    say: Say = lambda text: None,
) -> Measured:
    """Runs to the end of the workload, or until SIGINT, or until the server has surely gone: these end it early with a
    report of what was seen so far. What was seen is kept in `folder`, also where it is not reported. `say` is told
    beforehand how long it will take.

    Raises InputError for a workload that can't be made or a model that the server doesn't have, ServeError if the
    server can't be reached, BottleneckError instead of figures that would describe the client. Call it from the main
    thread.
    """
    target = options.target
    before = _status(target)
    options = with_servers_targets(options, before)
    wanted, note = clamped(fitted(options.wanted, before))
    workload = make(wanted)
    for text in (note, how_long(workload, options.timeout_s)):
        if text:
            say(text)
    environment, here = this_environment(), _this_host(target)
    watched = WatchedTransport(target.transport(), listener(target.url), patient=not workload.open_loop)
    run, cpu_s = drive(options, workload, progress, watched)
    about = _about(options, run, cpu_s, environment, options.deployment or here)
    about = msgspec.structs.replace(about, server_away_s=watched.away_since_s, server_gone=watched.gone)
    try:
        server, fault = _look(before, _status(options.target)), ""
    except TrtpdError as error:  # a server that went meanwhile takes no measured request along
        server, fault = None, str(error)
    about = msgspec.structs.replace(about, server=server, server_fault=fault)
    try:
        refuse_if_bottleneck(run.health, run.records)
    except BottleneckError as error:
        if folder is None:
            raise
        refused = f"{error}; what was seen is in {folder}"
        keep(folder, Taken(about=msgspec.structs.replace(about, refused=refused), workload=workload, run=run))
        raise BottleneckError(refused) from error
    taken = Taken(about=about, workload=workload, run=run)
    if folder is not None:
        keep(folder, taken)
    return measured_of(taken)


def bench_again(folder: Path, change: Callable[[About], About] = lambda about: about, *, command: str = "") -> Measured:
    """Figures of a run that was kept there, by other targets, warm-up or deployment if `change` sets such. `command`:
    what the user typed.

    Raises InputError for a folder that holds none, BottleneckError for a run that was refused: other targets don't
    make its client a faster one.
    """
    taken = load(folder)
    if taken.about.refused:
        raise BottleneckError(taken.about.refused)
    return measured_of(replace(taken, about=change(taken.about)), again=command)


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


def drive(
    options: BenchOptions, workload: Workload, progress: Progress, watched: WatchedTransport | None = None
) -> tuple[Run, dict[str, float]]:
    """One run, and the CPU that the server's processes used meanwhile. `watched`, if given, is asked in place of the
    target, and ends the run when the server has gone."""
    root = server_process(options.target.url)

    async def live() -> tuple[Run, dict[str, float]]:
        targets = options.slo if options.send_targets else None
        client = Client(
            workload,
            watched or options.target.transport(),
            ClientOptions(timeout_s=options.timeout_s, targets=targets),
            progress=progress,
        )
        if watched is not None:
            watched.watch(client)
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


def _about(
    options: BenchOptions, run: Run, cpu_s: dict[str, float], environment: Environment, deployment: Deployment | None
) -> About:
    return About(
        slo=options.slo,
        targets_remark=options.targets_remark,
        warm_up_s=options.warm_up_s,
        deployment=deployment,
        definition=options.definition,
        command=options.command,
        arguments=_arguments(options),
        health=run.health,
        cpu_s=cpu_s,
        environment=environment,
    )


def _arguments(options: BenchOptions) -> tuple[str, ...]:
    """Of `trtpd bench`: which server is asked, and how."""
    target, deployment = options.target, options.deployment
    words = ["--openai" if target.openai else "--url", target.url]
    words += ["--model", target.model] if target.model else []
    words += ["--extra-body", json.dumps(dict(target.extra))] if target.extra else []
    words += ["--channels", str(target.channels)] if target.channels != 1 else []
    words += ["--timeout-s", f"{options.timeout_s:.12g}"]
    words += [] if options.send_targets else ["--keep-targets"]
    if deployment is not None:
        words += ["--gpus" if deployment.unit == "GPU" else "--cores", str(deployment.units)]
    return tuple(words)


def _this_host(target: Target) -> Deployment | None:
    """The CPUs that the server may use, not those of this client."""
    cores = usable_cores(server_process(target.url))
    return None if cores is None else Deployment(units=cores, unit="core")


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
