"""The outside instrument: NVIDIA's perf_analyzer over gRPC streaming, its figures beside ours.

Both ask requests of the same lengths, in the same order, of the same server at the same loads, in turn (so that a
machine that drifts drifts for both). A workload's own instants and turns of sessions are left aside: the tool knows
closed loops and Poisson arrivals of requests that stand alone, so that is what both get. The text is new in each run: a
prefix cache would answer whoever asks second. Users of a closed loop have their requests dealt to them as perf_analyzer
deals them, so that as many are under way at its end in both. Its first requests come all at once, in an order that is
chance, and are left out of both. Each figure is the median of the runs' medians; instruments_agree.py compares them.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trtpd.build.decoding import plain_json
from trtpd.errors import InputError, ServeError
from trtpd.perf.arrivals import Arrivals, check_rate
from trtpd.perf.instruments_agree import RunLatencies
from trtpd.perf.perf_analyzer_tool import Tool
from trtpd.perf.prompt_text import Renderer, Segment
from trtpd.perf.workload import Workload, closed_loop

MOST_USERS = 4096

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One of the two; `rate` is Poisson."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.concurrency is not None else f"{self.rate:g} requests/s"

    @property
    def opening(self) -> int:
        """How many requests come at once when a run begins."""
        return self.concurrency or 0

    def flags(self) -> list[str]:
        if self.concurrency is not None:
            return ["--concurrency-range", str(self.concurrency)]
        return ["--request-rate-range", f"{self.rate:g}", "--request-distribution", "poisson"]

    def check(self, requests: int) -> None:
        """Raises InputError for a load that can't be, or that would leave nothing of so many requests to measure."""
        if self.rate is not None:
            check_rate(self.rate)
        if self.opening > MOST_USERS:
            raise InputError(f"{self}: at most {MOST_USERS} users; neither instrument keeps up with more")
        if self.opening >= requests:
            raise InputError(
                f"{self} of {requests} requests: all of them come at once when it begins, and those are left out; give "
                f"more --requests than {self.opening}, or a lower --concurrency"
            )


def with_new_text(workload: Workload, run: int) -> Workload:
    """The same lengths and instants, in words that no other `run` has; what requests share within a run, they share."""
    asks = (
        msgspec.structs.replace(
            ask, segments=tuple(Segment(seed=one.seed + (run << 64), tokens=one.tokens) for one in ask.segments)
        )
        for ask in workload.asks
    )
    return msgspec.structs.replace(workload, asks=tuple(asks))


def at_load(workload: Workload, load: Load) -> Workload:
    """The same requests as both instruments ask them at a load: each alone, at the load's instants."""
    asks = tuple(msgspec.structs.replace(ask, after=None, think_s=0.0) for ask in closed_loop(workload.asks))
    if load.rate is None:
        return dealt(msgspec.structs.replace(workload, asks=asks, concurrency=load.concurrency))
    instants = Arrivals().instants(len(asks), load.rate, np.random.default_rng([workload.seed, 2]))
    timed = (msgspec.structs.replace(ask, at_s=round(float(at_s), 6)) for ask, at_s in zip(asks, instants, strict=True))
    return msgspec.structs.replace(workload, asks=tuple(timed), concurrency=None)


def dealt(workload: Workload) -> Workload:
    """As perf_analyzer deals its inputs out: of n users in a closed loop the first asks request 0, n, 2n and so on, one
    after the other, whoever else is free; sessions are requests like any other. An open loop stays as it is."""
    users = workload.concurrency
    if users is None:
        return workload
    asks = (
        msgspec.structs.replace(ask, after=number - users if number >= users else None, think_s=0.0)
        for number, ask in enumerate(workload.asks)
    )
    return msgspec.structs.replace(workload, asks=tuple(asks))


def input_data(workload: Workload, model: str) -> bytes:
    """perf_analyzer's --input-data: the workload's requests in order, tensors as `model` takes them."""
    renderer = Renderer()
    rows: list[dict[str, list[object]]] = []
    for ask in workload.asks:
        text: list[object] = [renderer.text(ask.segments)]
        if model.startswith("prefill_"):
            rows.append({"text_input": text})
        elif model.startswith("decode_"):
            rows.append({"kv_tokens": [ask.prompt_tokens], "max_tokens": [ask.max_tokens]})
        else:
            rows.append({"text_input": text, "max_tokens": [ask.max_tokens], "end_id": [-1], "stream": [True]})
    return msgspec.json.encode({"data": rows})


OURS = (
    "-m", "-u", "-i", "-a", "-b", "-l", "-p", "-r", "-s", "-t", "--async", "--sync", "--streaming", "--service-kind",
    "--input-data", "--shape", "--profile-export-file", "--concurrency-range", "--periodic-concurrency-range",
    "--request-count", "--warmup-request-count", "--request-rate-range", "--request-distribution",
    "--request-intervals", "--request-period", "--schedule", "--fixed-schedule", "--num-of-sequences",
    "--sequence-length", "--sequence-length-variation", "--sequence-id-range", "--start-sequence-id",
    "--measurement-mode", "--measurement-interval", "--measurement-request-count", "--stability-percentage",
    "--latency-threshold", "--max-trials", "--binary-search",
)  # fmt: skip
"""Arguments from which its load, its requests and its export follow."""


def check_extra(extra: Sequence[str]) -> None:
    """Raises InputError for an argument to perf_analyzer that would have it measure something else than we do."""
    for argument in extra:
        if argument.partition("=")[0] in OURS:
            raise InputError(
                f"{argument} behind --: trtpd sets what perf_analyzer asks and how often, so that both ask the same; "
                "use --workload, --requests, --concurrency, --rates, --model and --url"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Analyzer:
    """Runs the tool against one model. Its files go into `folder`. `extra` are arguments of the user's own. `data` is
    the file its inputs are written to before a run."""

    tool: Tool
    url: str
    model: str
    data: Path
    folder: Path
    timeout_s: float = 600.0
    extra: Sequence[str] = field(default_factory=tuple)

    def command(self, load: Load, requests: int, export: Path) -> list[str]:
        """One load, a given number of requests, no hunt for stability: ours can't do that either."""
        return [
            *self.tool.command,
            *("-m", self.model, "-u", self.url, "-i", "grpc", "--streaming", "--async"),
            *("--input-data", str(self.data), *load.flags()),
            *("--request-count", str(requests), "--stability-percentage", "999"),
            *("--profile-export-file", str(export)),
            *self.extra,
        ]

    def run(self, load: Load, requests: int, name: str) -> RunLatencies:
        """Raises ServeError with the tool's own words if it fails or takes longer than `timeout_s`."""
        export = self.folder / f"{name}.json"
        export.unlink(missing_ok=True)  # the tool refuses to write over one
        command = self.command(load, requests, export)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise ServeError(f"perf_analyzer did not end within {self.timeout_s:g} s at {load}") from error
        (self.folder / f"{name}.log").write_text(done.stdout + done.stderr)
        if done.returncode != 0 or not export.is_file():
            raise ServeError(f"perf_analyzer failed ({done.returncode}) at {load}: {_why(done.stdout, done.stderr)}")
        return read_export(export, opening=load.opening, asked=requests, data=self.data)


def _why(stdout: str, stderr: str) -> str:
    """The tool's own line of what went wrong, which stands before or behind its help; without one, its last words."""
    said = [line.strip() for line in (stdout + "\n" + stderr).splitlines() if line.strip()]
    errors = [line for line in said if line.lower().startswith("error:")]
    return errors[-1] if errors else " ".join(said[-3:]) or "no word"


def read_export(path: Path, *, opening: int = 0, asked: int = 0, data: Path | None = None) -> RunLatencies:
    """Of the first experiment in a profile export. Raises ServeError for a file of another shape. `opening`: see
    latencies. What it does not hold of the `asked` requests did not finish. `data`: the inputs that were given, by
    which a request's number is known."""
    try:
        document = plain_json(path.read_bytes())
        experiment = document["experiments"][0]
        requests = [_instants(request) for request in experiment["requests"]]
        numbers = _numbers(experiment["requests"], data)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        fault = f"it has no {error.args[0]}" if isinstance(error, KeyError) else "it is of another shape"
        raise ServeError(f"{path}: not a profile export of perf_analyzer ({fault})") from error
    empty = sum(not at_s for _, at_s in requests)
    return latencies(
        requests,
        opening=opening,
        unfinished={"no answer": empty, "not in the export": asked - len(requests)},
        numbers=numbers,
    )


def _numbers(requests: Sequence[Mapping[str, Any]], data: Path | None) -> list[int] | None:
    """Of each request, in the inputs: by what it asked; of some that ask the same the first one sent is the first. None
    where the export doesn't tell."""
    if data is None or not all(isinstance(request.get("request_inputs"), dict) for request in requests):
        return None
    left: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, row in enumerate(plain_json(data.read_bytes())["data"]):
        left[_asked({name: values[0] for name, values in row.items()})].append(number)
    found = [0] * len(requests)
    for at in sorted(range(len(requests)), key=lambda at: int(requests[at]["timestamp"])):
        numbers = left.get(_asked(requests[at]["request_inputs"]))
        if not numbers:
            return None
        found[at] = numbers.pop(0)
    return found


def _asked(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(inputs.get(name)) for name in ("text_input", "kv_tokens", "max_tokens"))


def _instants(request: Mapping[str, Any]) -> tuple[float, list[float]]:
    """When it was sent and when responses with output came, in seconds. The empty last response is none."""
    stamps = request["response_timestamps"]
    outputs = request.get("response_outputs")
    if outputs is not None and len(outputs) == len(stamps):
        stamps = [stamp for stamp, output in zip(stamps, outputs, strict=True) if output]
    return request["timestamp"] / 1e9, [stamp / 1e9 for stamp in stamps]


def latencies(
    requests: Sequence[tuple[float, Sequence[float]]],
    *,
    opening: int = 0,
    unfinished: Mapping[str, int] | None = None,
    numbers: Sequence[int] | None = None,
) -> RunLatencies:
    """From (sent, arrivals) of each request that was sent, by the same rule for both instruments. The `opening` that
    were sent first are left out, and those without arrivals: they have not finished, as the `unfinished` say.
    `numbers`: of the requests in the workload, None: in the order in which they were sent."""
    order = sorted(range(len(requests)), key=lambda at: requests[at][0])
    of = {at: place if numbers is None else numbers[at] for place, at in enumerate(order)}
    answered = {of[at]: requests[at] for at in order[opening:] if requests[at][1]}
    ttft = {number: at_s[0] - sent_s for number, (sent_s, at_s) in answered.items()}
    gaps = {number: tuple(b - a for a, b in pairwise(at_s)) for number, (_, at_s) in answered.items()}
    ttft_p50, ttft_p99 = _quantiles(list(ttft.values()))
    itl_p50, itl_p99 = _quantiles([gap for found in gaps.values() for gap in found])
    return RunLatencies(
        requests=len(answered),
        ttft_p50_s=ttft_p50,
        ttft_p99_s=ttft_p99,
        itl_p50_s=itl_p50,
        itl_p99_s=itl_p99,
        unfinished={why: count for why, count in (unfinished or {}).items() if count > 0},
        ttft_s=ttft,
        gaps_s=gaps,
    )


def _quantiles(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    p50, p99 = np.percentile(values, (50, 99))
    return float(p50), float(p99)
