"""A soak: hours at a steady load through real Triton, on emulated engines, and whether anything grows meanwhile.

    python -m trtpd.perf.soak [--minutes 60] [--warm-up 10] [--load 0.7] [--every 10] [--output DIR]
    python -m trtpd.perf.soak --again --warm-up 20 --output DIR

The engines are so slow that the whole deployment uses a small part of one core: the verdict is about what grows
(memory, file descriptors, threads, shared memory, KV blocks), not about latency. First the deployment's capacity is
measured, then it is loaded with a part of it; some requests are cancelled, some share beginnings, and answers are
compared with those the idle server gave. Now and then the load pauses: nothing may be held then. Ctrl-C (or SIGTERM)
ends it early with the report so far. DIR gets report.json, report.txt, growth.csv and samples.csv;
`--again` judges those of a former soak with another warm-up.
Exit status 0 only if all was flat, right and let go of; one step of an allocator is not: watch longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpd.errors import TrtpdError
from trtpd.perf.environment import Environment, this_environment
from trtpd.perf.served import Served, served_tiny
from trtpd.perf.soak_load import Mix, SoakLoad
from trtpd.perf.soak_report import SAMPLES, Pause, Report, growth_table, judge, judged_again, verdict_of, write
from trtpd.perf.soak_watch import Watch, held, read_samples
from trtpd.perf.triton_transport import TritonTransport
from trtpd.runtime.serve.client import status

PREFILLS, DECODES, RANKS, BATCH = 2, 2, 2, 12
STEP_MS = 100.0
CALIBRATION_S = 45.0
SETTLE_S = 30.0
PAUSE_EVERY_S = 600.0
LEAST_PAUSES = 3
MIX = Mix()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`load`: the part of the capacity that is asked for. The first `warm_up_s` are not judged. `again`: nothing is
    run."""

    seconds: float
    warm_up_s: float
    every_s: float
    load: float
    output: Path
    seed: int
    model: Path | None
    again: bool


def pipeline(model: Path) -> dict[str, Any]:
    """Two pools of slow instances; those of decode are groups of ranks, so that every kind of process is there."""
    return {
        "model": str(model),
        "engine": "emulated",
        "pools": {
            "prefill": {"instances": PREFILLS, "kv_tokens": 8192, "chunk_tokens": 128},
            "decode": {"instances": DECODES, "tp": RANKS, "kv_tokens": 8192, "max_batch": BATCH},
        },
        "kv": {"max_seq_tokens": 512},
        "scheduler": {"max_queue": 1024},
        "streaming": {"interval_tokens": 4},
        "emulated": {
            "prefill_tokens_per_s": 2000,
            "step_ms": 2,
            "decode_step_ms": STEP_MS,
            "decode_sequence_ms": 0,
            "decode_kv_token_us": 0,
        },
    }


def soak(options: Options) -> Report:
    """All of it. Raises TrtpdError if the deployment can't be built, served or reached."""
    options.output.mkdir(parents=True, exist_ok=True)
    environment = this_environment()
    with served_tiny("soak", pipeline, model=options.model, log=options.output / "serve.log") as server:
        return asyncio.run(_run(server, options, environment))


async def _run(server: Served, options: Options, environment: Environment) -> Report:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    transport = TritonTransport(server.grpc)
    await transport.open()
    try:
        load = SoakLoad(transport, MIX, seed=options.seed)
        await load.learn()
        capacity_per_s = await load.capacity_per_s(users=2 * DECODES * BATCH, seconds=CALIBRATION_S)
        rate = options.load * capacity_per_s
        _say(f"capacity {capacity_per_s:.2f} requests a second; {rate:.2f} a second from now on")
        await _settled(server)
        watch = Watch(server, options.output / SAMPLES, every_s=options.every_s, more=load.recent)
        began_s = time.monotonic()
        with watch:
            pauses = await _drive(server, load, rate, options.seconds, stop)
        lasted_s = time.monotonic() - began_s
    finally:
        await transport.close()
    growths = judge(read_samples(options.output / SAMPLES), options.warm_up_s)
    faults = load.seen.faults + ([f"the watch ended: {watch.fault}"] if watch.fault else [])
    return Report(
        environment=environment,
        seconds=round(lasted_s, 1),
        warm_up_s=options.warm_up_s,
        interrupted=stop.is_set(),
        capacity_per_s=round(capacity_per_s, 3),
        rate_per_s=round(rate, 3),
        requests=load.seen.requests,
        outcomes=dict(load.seen.outcomes),
        tokens=load.seen.tokens,
        checked=load.seen.checked,
        faults=faults,
        pauses=pauses,
        processes_changed=watch.changes,
        status_misses=watch.misses,
        growth=growths,
        verdict=verdict_of(growths, faults=faults, pauses=pauses, changes=watch.changes),
    )


async def _drive(server: Served, load: SoakLoad, rate: float, seconds: float, stop: asyncio.Event) -> list[Pause]:
    """The load in parts, and what is held behind each."""
    pauses: list[Pause] = []
    began_s = time.monotonic()
    part_s = min(PAUSE_EVERY_S, seconds / LEAST_PAUSES)
    while not stop.is_set() and (left_s := seconds - (time.monotonic() - began_s)) > 0.0:
        await load.drive(rate, min(part_s, left_s), stop)
        held_now = await _settled(server)
        pauses.append(Pause(at_s=round(time.monotonic() - began_s, 1), held=held_now))
    return pauses


async def _settled(server: Served) -> dict[str, int]:
    """What the idle server still holds; waits for up to SETTLE_S until that is nothing."""
    until_s = time.monotonic() + SETTLE_S
    while (left := held(await asyncio.to_thread(status, server.grpc))) and time.monotonic() < until_s:
        await asyncio.sleep(0.5)
    return left


def _say(what: str) -> None:
    print(f"soak: {what}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the load lasts")
    parser.add_argument("--warm-up", type=float, default=10.0, help="minutes at its beginning that are not judged")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--load", type=float, default=0.7, help="part of the measured capacity that is asked for")
    parser.add_argument("--output", type=Path, default=Path("soak"), help="folder for the report")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="folder whose tokenizer is used; SmolLM2 where none is given")
    parser.add_argument("--again", action="store_true", help="run nothing: judge what DIR has of a former soak")
    given = parser.parse_args(argv)
    if given.warm_up < 0.0 or (given.warm_up >= given.minutes and not given.again):
        parser.error("--warm-up must be at least 0 and less than --minutes")
    if given.every <= 0.0 or not 0.0 < given.load <= 2.0:
        parser.error("--every must be above 0, --load above 0 and at most 2")
    return Options(
        seconds=60.0 * given.minutes,
        warm_up_s=60.0 * given.warm_up,
        every_s=given.every,
        load=given.load,
        output=given.output,
        seed=given.seed,
        model=given.model,
        again=given.again,
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        report = judged_again(options.output, options.warm_up_s) if options.again else soak(options)
        write(report, options.output)
    except TrtpdError as error:
        print(f"soak: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(growth_table(report)))
    _say(f"{json.dumps(str(options.output / 'report.json'))} has all of it")
    return 0 if report.verdict == "flat" else 1


if __name__ == "__main__":
    sys.exit(main())
