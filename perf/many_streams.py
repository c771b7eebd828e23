"""Thousands of slow streams from one client process against emulated engines behind real Triton.

    python -m trtpd.perf.many_streams [--json] [--streams 2000] [--channels 1] [--decodes 8] [--model DIR]

Each stream gets a token a second. They open one after the other over OPENING_S, and all are open at once for the last
third of the run. What is asked is the client's lateness: how long after its instant a request left, and how long after
its instant the event loop woke, which bounds the error of every arrival. CPU is that of each process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from trtpd.errors import TrtpdError
from trtpd.perf.client import Client, ClientOptions, Run
from trtpd.perf.client_health import late_limit_s
from trtpd.perf.process_cpu import cpu_times
from trtpd.perf.prompt_text import Segment
from trtpd.perf.records import Record
from trtpd.perf.served import Served, served_tiny
from trtpd.perf.triton_transport import TritonTransport
from trtpd.perf.workload import Ask, Workload

OPENING_S = 20.0
TOKENS = 30
PROMPT_TOKENS = 16
STEP_S = 1.0
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyStreams:
    """`late_*`: of requests behind their instants, `lag_*`: of the event loop, `limit_ms`: the most at which a report
    over these requests would be made. `cores`: CPU seconds per second of each kind of process."""

    streams: int
    most_at_once: int
    ended: dict[str, int]
    tpot_p50_ms: float
    late_p50_ms: float
    late_p99_ms: float
    late_largest_ms: float
    lag_p99_ms: float
    lag_largest_ms: float
    limit_ms: float
    responses_per_s: float
    client_us_per_response: float
    cores: dict[str, float]


def pipeline(model: Path, *, streams: int, decodes: int) -> dict[str, Any]:
    """A batch holds all streams even if the router gives some instances twice their part."""
    batch = 2 * streams // decodes
    return {
        "model": str(model),
        "engine": "emulated",
        "pools": {
            "prefill": {"kv_tokens": 65536, "max_batch": 64},
            "decode": {"instances": decodes, "kv_tokens": 64 * batch, "max_batch": batch},
        },
        "kv": {"max_seq_tokens": 512},
        "scheduler": {"deadline_s": 300, "max_queue": 8192},
        "emulated": {
            "prefill_tokens_per_s": 1e5,
            "step_ms": 0.1,
            "decode_step_ms": 1e3 * STEP_S,
            "decode_sequence_ms": 0,
            "decode_kv_token_us": 0,
        },
    }


def workload(streams: int) -> Workload:
    """Evenly spaced requests, each with a prompt of its own."""
    asks = tuple(
        Ask(
            segments=(Segment(seed=number, tokens=PROMPT_TOKENS),),
            max_tokens=TOKENS,
            kind="stream",
            at_s=OPENING_S * number / streams,
        )
        for number in range(streams)
    )
    return Workload(name="many_streams", seed=0, asks=asks)


def most_at_once(records: Sequence[Record]) -> int:
    """How many were under way at the fullest instant."""
    edges = sorted(
        edge for one in records if one.sent_s and one.ended_s for edge in ((one.sent_s, 1), (one.ended_s, -1))
    )
    return max(accumulate(change for _, change in edges), default=0)


def drive(server: Served, streams: int, channels: int) -> ManyStreams:
    """Raises ServeError if the server can't be reached."""
    client = Client(
        workload(streams), TritonTransport(server.grpc, channels=channels), ClientOptions(timeout_s=TIMEOUT_S)
    )
    before = cpu_times(server.root)
    run = asyncio.run(client.run())
    return found_of(run, cpu_times(server.root).since(before), streams)


def found_of(run: Run, cpu_s: dict[str, float], streams: int) -> ManyStreams:
    health = run.health
    tpots = sorted(one.tpot_s for one in run.records if one.tpot_s is not None) or [0.0]
    cores = {label: seconds / health.wall_s for label, seconds in cpu_s.items()} | {"client": health.cpu_share}
    return ManyStreams(
        streams=streams,
        most_at_once=most_at_once(run.records),
        ended=dict(Counter(f"{one.state}:{one.reason}" for one in run.records)),
        tpot_p50_ms=round(tpots[len(tpots) // 2] * 1e3, 1),
        late_p50_ms=round(health.late_p50_s * 1e3, 2),
        late_p99_ms=round(health.late_p99_s * 1e3, 2),
        late_largest_ms=round(health.late_largest_s * 1e3, 2),
        lag_p99_ms=round(health.lag_p99_s * 1e3, 2),
        lag_largest_ms=round(health.lag_largest_s * 1e3, 2),
        limit_ms=round(late_limit_s(run.records) * 1e3, 2),
        responses_per_s=round(health.responses / health.wall_s, 1),
        client_us_per_response=round(1e6 * health.cpu_share * health.wall_s / max(health.responses, 1), 1),
        cores={label: round(share, 3) for label, share in sorted(cores.items()) if share >= 0.0005},
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="many_streams", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--streams", type=int, default=2000, help="streams open at once in the end")
    parser.add_argument("--channels", type=int, default=1, help="connections of the client")
    parser.add_argument("--decodes", type=int, default=8, help="decode instances")
    parser.add_argument("--model", type=Path, help="folder whose tokenizer is used; SmolLM2 where none is given")
    options = parser.parse_args(argv)
    if min(options.streams, options.channels, options.decodes) < 1 or options.streams < options.decodes:
        parser.error("--channels and --decodes must be at least 1, --streams at least --decodes")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        planned = partial(pipeline, streams=options.streams, decodes=options.decodes)
        with served_tiny("many-streams", planned, model=options.model) as server:
            found = drive(server, options.streams, options.channels)
    except TrtpdError as error:
        print(f"many_streams: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(asdict(found)))
        return 0
    cores = ", ".join(f"{label} {share:.2f}" for label, share in found.cores.items())
    print(
        f"{found.most_at_once} of {found.streams} streams at once, {found.tpot_p50_ms:.0f} ms a token; ended: "
        f"{found.ended}\n"
        f"requests left {found.late_p50_ms:.2f} ms late (p99 {found.late_p99_ms:.2f}, largest "
        f"{found.late_largest_ms:.2f}); the loop woke {found.lag_p99_ms:.2f} ms late at p99 (largest "
        f"{found.lag_largest_ms:.2f}); a report allows {found.limit_ms:.1f}\n"
        f"{found.responses_per_s:.0f} responses a second, {found.client_us_per_response:.0f} us of the client each; "
        f"cores: {cores}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
