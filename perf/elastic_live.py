"""One run of elastic pools through Triton, on emulated engines: whether P:D follows the load and every request ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpd.perf.live_load import LivePhase, PhaseResult, Sample, by_phase, drive, lost, workload
from trtpd.perf.served import served_tiny
from trtpd.perf.slo import FixedSlo

SLO = FixedSlo(ttft_s=4.0, tpot_s=0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRun:
    """`split`: prefill:decode instances that are ready, at each instant (seconds) at which it changed."""

    requests: int
    phases: list[PhaseResult]
    split: list[tuple[float, str]]
    lost: dict[str, int]


def pipeline(model: Path, *, prefill: int = 3, decode: int = 3) -> dict[str, Any]:
    """Six slow instances, so that the machine's cores carry them all."""
    return {
        "model": str(model),
        "engine": "emulated",
        "pools": {
            "elastic": True,
            "prefill": {"instances": prefill, "kv_tokens": 32768, "chunk_tokens": 512, "max_step_tokens": 1024},
            "decode": {"instances": decode, "kv_tokens": 32768, "max_batch": 24},
        },
        "kv": {"max_seq_tokens": 4096},
        "streaming": {"interval_tokens": 8},
        "emulated": {
            "prefill_tokens_per_s": 1500,
            "step_ms": 2,
            "decode_step_ms": 40,
            "decode_sequence_ms": 5,
            "decode_kv_token_us": 0,
        },
    }


def phases(phase_s: float) -> list[LivePhase]:
    """Prompts want 5:1 and chats 1:5 of the pipeline above."""
    prompts = LivePhase(name="prompts", seconds=phase_s, rate=3.6, prompt=(1200, 2000), output=(4, 12))
    chats = LivePhase(name="chats", seconds=phase_s, rate=5.0, prompt=(30, 90), output=(100, 200))
    return [prompts, chats, prompts]


def measure(phase_s: float, *, model: Path | None = None) -> ElasticRun:
    """Builds, serves and drives it. Raises TrtpdError."""
    turns = phases(phase_s)
    with served_tiny("elastic", pipeline, model=model) as server:
        run, watcher = drive(server, workload("elastic", turns, 1), SLO)
    return ElasticRun(
        requests=len(run.records),
        phases=by_phase(run.records, turns, SLO),
        split=split_of(watcher.samples),
        lost=lost(run.records),
    )


def split_of(samples: Sequence[Sample]) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    for sample in samples:
        now = f"{sample.roles.get('prefill', 0)}:{sample.roles.get('decode', 0)}"
        if not found or found[-1][1] != now:
            found.append((sample.at_s, now))
    return found
