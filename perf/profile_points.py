"""From the runs of a cell to the point that is kept of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trtpd.build.cost_profile import StepFit, StepPoint, TransferPoint
from trtpd.errors import EngineError
from trtpd.perf.engine_runs import DECODE_STEPS
from trtpd.perf.measured import Cell, Measured, TimedStep


def step_point(cell: Cell, runs: Sequence[Measured]) -> StepPoint:
    """The median run, with what its steps held. Raises EngineError if nothing was timed."""
    if not all(run.steps and run.seconds > 0.0 for run in runs):
        raise EngineError(f"{cell.name}: the engine told of no step that took time")
    seconds = statistics.median(run.seconds for run in runs)
    steps = min(runs, key=lambda run: abs(run.seconds - seconds)).steps
    prefills, decodes = [step for step in steps if step.n_prefill], [step for step in steps if step.n_decode]
    return StepPoint(
        kind="decode" if cell.kind == "decode" else "prefill",
        tokens=cell.tokens,
        batch=cell.batch,
        prefix_tokens=cell.prefix_tokens,
        beside=cell.beside,
        context_tokens=cell.context_tokens,
        seconds=seconds,
        spread=_spread([run.seconds for run in runs], seconds),
        runs=len(runs),
        steps=len(steps),
        prefill_steps=len(prefills),
        prefill_tokens=sum(step.prefill_tokens for step in steps),
        prefill_pairs=sum(_pairs(step) for step in prefills),
        decode_steps=len(decodes),
        decode_sequences=sum(step.n_decode for step in steps),
        decode_kv_tokens=sum(step.decode_kv_tokens for step in steps),
    )


def _pairs(step: TimedStep) -> float:
    """Of a new token and one it attends to, as LinearStepTime counts them."""
    return step.prefill_tokens * step.prefill_kv_tokens / step.n_prefill


def transfer_point(cell: Cell, runs: Sequence[Measured], *, moved_bytes: int) -> TransferPoint:
    seconds = statistics.median(run.seconds for run in runs)
    spread = _spread([run.seconds for run in runs], seconds)
    return TransferPoint(tokens=cell.tokens, bytes=moved_bytes, seconds=seconds, spread=spread, runs=len(runs))


def _spread(seconds: Sequence[float], median_s: float) -> float:
    return (max(seconds) - min(seconds)) / median_s


def cell_of(point: StepPoint | TransferPoint) -> Cell:
    """The cell that a point is of."""
    if isinstance(point, TransferPoint):
        return Cell(kind="transfer", tokens=point.tokens, batch=1)
    return Cell(
        kind=point.kind,
        tokens=point.tokens,
        batch=point.batch,
        prefix_tokens=point.prefix_tokens,
        beside=point.beside,
        context_tokens=point.context_tokens,
    )


def expected_s(fit: StepFit, cell: Cell) -> float:
    """About what one run of a cell takes, by what was fitted so far."""
    if cell.kind == "decode":
        kv_tokens = cell.batch * cell.tokens
        step_s = fit.fixed_s + fit.decode_step_s + fit.decode_sequence_s * cell.batch
        return DECODE_STEPS * (step_s + fit.decode_kv_token_s * kv_tokens)
    each = fit.prefill_token_s + fit.prefill_pair_s * (cell.prefix_tokens + cell.tokens / 2)
    return fit.fixed_s + fit.prefill_step_s + cell.batch * cell.tokens * each
