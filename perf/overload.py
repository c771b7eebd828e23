"""Overload, live: 1 x capacity, then 3 x, then calm, on emulated engines: `python -m trtpd.perf.overload [--json]`.

Two prefill and two decode instances, so slow that two cores carry them with room to spare: what is measured is the
router under more requests than its instances can take. Capacity is that of the decode instances at a full batch, by
the cost model they emulate.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trtpd.errors import TrtpdError
from trtpd.perf.live_load import LivePhase, PhaseResult, Sample, by_phase, drive, lost, settle, workload
from trtpd.perf.records import Record, save_records
from trtpd.perf.served import served_tiny
from trtpd.perf.slo import FixedSlo

SLO = FixedSlo(ttft_s=2.0, tpot_s=0.1)
PROMPT_TOKENS, OUTPUT_TOKENS = 300, 40
BATCH, STEP_MS, SEQUENCE_MS = 16, 40.0, 1.5
DECODES = 2
ANSWER_TARGET_S = 0.05
CALM_RATE = 0.3
SETTLE_S = 12.0


def capacity_per_s() -> float:
    """Requests a second that the decode instances write answers for."""
    step_s = (STEP_MS + SEQUENCE_MS * BATCH) / 1e3
    return DECODES * BATCH / step_s / (OUTPUT_TOKENS - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """How long refused requests waited for their answer, as the client saw it; `within`: the share that got it within
    ANSWER_TARGET_S."""

    count: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    within: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """`kept`: goodput at 3 x over that at 1 x. `rungs`: the ladder's, each as long as it lasted. Memory by kind of
    process: before the load, at most, and in the end, in MiB."""

    capacity_per_s: float
    phases: list[PhaseResult]
    kept: float
    refusals: Refusals
    rungs: list[int]
    climbs: int
    memory_mib: dict[str, tuple[float, float, float]]
    lost: dict[str, int]
    status_misses: int


def pipeline(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "engine": "emulated",
        "pools": {
            "prefill": {"instances": 2, "kv_tokens": 32768},
            "decode": {"instances": DECODES, "kv_tokens": 32768, "max_batch": BATCH},
        },
        "kv": {"max_seq_tokens": 1024},
        "streaming": {"interval_tokens": 8},
        "emulated": {
            "prefill_tokens_per_s": 4000,
            "step_ms": 2,
            "decode_step_ms": STEP_MS - 2,
            "decode_sequence_ms": SEQUENCE_MS,
            "decode_kv_token_us": 0,
        },
    }


def phases(once_s: float, thrice_s: float, calm_s: float) -> list[LivePhase]:
    lengths = {"prompt": (PROMPT_TOKENS, PROMPT_TOKENS), "output": (OUTPUT_TOKENS // 2, 3 * OUTPUT_TOKENS // 2)}
    rate = capacity_per_s()
    return [
        LivePhase(name="1x", seconds=once_s, rate=rate, **lengths),
        LivePhase(name="3x", seconds=thrice_s, rate=3.0 * rate, **lengths),
        LivePhase(name="calm", seconds=calm_s, rate=CALM_RATE * rate, **lengths),
    ]


def refusals(records: Sequence[Record]) -> Refusals:
    waited = [
        record.ended_s - record.sent_s
        for record in records
        if record.state == "refused" and record.ended_s is not None and record.sent_s is not None
    ]
    if not waited:
        return Refusals(count=0, p50_ms=None, p90_ms=None, p99_ms=None, within=None)
    p50, p90, p99 = (round(float(value) * 1e3, 1) for value in np.percentile(waited, (50, 90, 99)))
    within = sum(seconds <= ANSWER_TARGET_S for seconds in waited) / len(waited)
    return Refusals(count=len(waited), p50_ms=p50, p90_ms=p90, p99_ms=p99, within=round(within, 4))


def climbs(rungs: Sequence[int]) -> int:
    """How often the ladder left its lowest rung."""
    return sum(before == 0 and after > 0 for before, after in pairwise(rungs))


def memory(samples: Sequence[Sample]) -> dict[str, tuple[float, float, float]]:
    kinds = sorted({kind for sample in samples for kind in sample.rss_bytes})
    found = {}
    for kind in kinds:
        held = [sample.rss_bytes[kind] / 2**20 for sample in samples if kind in sample.rss_bytes]
        found[kind] = (round(held[0], 1), round(max(held), 1), round(held[-1], 1))
    return found


def measure(turns: Sequence[LivePhase], *, model: Path | None = None, records: Path | None = None) -> Overload:
    """Builds, serves and drives it; what its clients saw goes to `records`. Raises TrtpdError."""
    with served_tiny("overload", pipeline, model=model) as server:
        run, during = drive(server, workload("overload", turns, 1), SLO)
        after = settle(server, SETTLE_S)
    if records is not None:
        save_records(records, run.info, run.records)
    samples = [*during.samples, *after.samples]
    found = by_phase(run.records, turns, SLO)
    once, thrice = found[0].goodput_per_s, found[1].goodput_per_s
    rungs = [rung for rung, _ in groupby(sample.rung for sample in samples)]
    return Overload(
        capacity_per_s=round(capacity_per_s(), 2),
        phases=found,
        kept=round(thrice / once, 3) if once else 0.0,
        refusals=refusals(run.records),
        rungs=rungs,
        climbs=climbs([0, *rungs]),
        memory_mib=memory(samples),
        lost=lost(run.records),
        status_misses=during.misses + after.misses,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="overload", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--once-s", type=float, default=40.0, help="seconds at 1 x capacity")
    parser.add_argument("--thrice-s", type=float, default=120.0, help="seconds at 3 x")
    parser.add_argument("--calm-s", type=float, default=15.0, help="seconds of calm behind it")
    parser.add_argument("--model", type=Path, help="folder whose tokenizer is used; SmolLM2 where none is given")
    parser.add_argument("--records", type=Path, help="file for what became of each request")
    options = parser.parse_args(argv)
    if min(options.once_s, options.thrice_s, options.calm_s) <= 0.0:
        parser.error("--once-s, --thrice-s and --calm-s must be above 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        turns = phases(options.once_s, options.thrice_s, options.calm_s)
        found = measure(turns, model=options.model, records=options.records)
    except TrtpdError as error:
        print(f"overload: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(asdict(found)))
        return 0
    for phase in found.phases:
        print(
            f"{phase.name:>5}: {phase.goodput_per_s:.2f} good of {phase.offered_per_s:.2f} a second; {phase.verdicts}"
        )
    waits = found.refusals
    print(
        f"goodput at 3 x over 1 x: {found.kept:.2f}; lost: {found.lost or 'none'}\n"
        f"refusals: {waits.count}, answered in {waits.p50_ms} ms (p90 {waits.p90_ms}, p99 {waits.p99_ms}); "
        f"within {ANSWER_TARGET_S * 1e3:g} ms: {waits.within}\n"
        f"ladder: {found.rungs}, {found.climbs} climbs; memory MiB (before, most, after): {found.memory_mib}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
