"""A profile as tables and lines: every point beside what the fit says of it, and the fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trtpd.build.cost_profile import CostProfile, EngineCosts, Residuals, StepFit, TransferCosts
from trtpd.perf.profile_points import cell_of
from trtpd.perf.step_fit import POINTS_LEAST, SIZES_LEAST, points_of_each_kind, predicted_s, transfer_s

MS, US = 1e3, 1e6

HEADINGS = ("of", "measured", "ms", "fit ms", "error", "spread", "runs")


class Row(NamedTuple):
    """One line of the table."""

    of: str
    cell: str
    measured: str
    fitted: str
    error: str
    spread: str
    runs: str


def rows(profile: CostProfile) -> list[Row]:
    """Every point, engines first."""
    found = [row for role, costs in profile.engines.items() for row in _engine_rows(role, costs)]
    return found + [row for path, costs in profile.transfers.items() for row in _transfer_rows(path, costs)]


def _engine_rows(role: str, costs: EngineCosts) -> Iterator[Row]:
    for point in costs.points:
        fitted = None if costs.fit is None else predicted_s(costs.fit, point)
        yield _row(role, cell_of(point).name, point.seconds, fitted, point.spread, point.runs)


def _transfer_rows(path: str, costs: TransferCosts) -> Iterator[Row]:
    for point in costs.points:
        fitted = None if costs.fit is None else transfer_s(costs.fit, point.bytes)
        name = f"{point.tokens} tokens, {point.bytes / 1e6:.1f} MB"
        yield _row(path, name, point.seconds, fitted, point.spread, point.runs)


def _row(of: str, cell: str, seconds: float, fitted: float | None, spread: float, runs: int) -> Row:
    return Row(
        of=of,
        cell=cell,
        measured=f"{seconds * MS:.2f}",
        fitted="-" if fitted is None else f"{fitted * MS:.2f}",
        error="-" if fitted is None else f"{fitted / seconds - 1.0:+.1%}",
        spread=f"{spread:.1%}",
        runs=str(runs),
    )


def lines(profile: CostProfile) -> list[str]:
    """The fits in words, and what was not measured."""
    found = []
    for role, costs in profile.engines.items():
        together = any(point.beside for point in costs.points)
        words = _too_few(costs) if costs.fit is None else _step_words(costs.fit, together=together)
        found.append(f"{role}: {words}")
    for path, transfer in profile.transfers.items():
        fit = transfer.fit
        if fit is None:
            sizes = len({point.bytes for point in transfer.points})
            words = "no rate: larger hand-offs took no longer"
            if sizes < SIZES_LEAST:
                words = f"no rate: {sizes} size was measured, and it needs {SIZES_LEAST}"
        else:
            words = f"{fit.fixed_s * MS:.2f} ms + {fit.bytes_per_s / 1e9:.2f} GB/s; {_residual_words(fit.residuals)}"
        found.append(f"{path}: {words}")
    return found + [f"{name}: not measured, {why}" for name, why in profile.unavailable.items()]


def _too_few(costs: EngineCosts) -> str:
    there = " and ".join(f"{count} of {kind}" for kind, count in points_of_each_kind(costs.points).items())
    return f"no fit: {there} measured, and it needs {POINTS_LEAST} of each"


def _step_words(fit: StepFit, *, together: bool) -> str:
    """`together`: work of both kinds in one step was measured."""
    saved = f"both in one step save {fit.fixed_s * MS:.1f} ms; " if together else ""
    return (
        f"prefill step {(fit.fixed_s + fit.prefill_step_s) * MS:.1f} ms + {fit.prefill_token_s * US:.0f} us a token + "
        f"{fit.prefill_pair_s * US:.4f} us a token and one it attends to; decode step "
        f"{(fit.fixed_s + fit.decode_step_s) * MS:.1f} ms + {fit.decode_sequence_s * MS:.2f} ms a sequence + "
        f"{fit.decode_kv_token_s * US:.2f} us a token of KV; "
        f"{saved}{_residual_words(fit.residuals)}"
    )


def _residual_words(found: Residuals) -> str:
    return f"error p50 {found.p50:.1%}, p95 {found.p95:.1%}, worst {found.worst:.1%} over {found.points} points"
