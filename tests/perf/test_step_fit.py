"""The fit of a step's time: what was put in comes out, and nothing comes out below 0."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtpd.build.cost_profile import StepPoint, TransferPoint
from trtpd.perf.step_fit import TERMS, fit_steps, fit_transfer, nonnegative, predicted_s, work_of

SIZES = (32, 128, 512)


def point(seconds: float = 1.0, *, tokens: int = 0, prefix: int = 0, batch: int = 0, kv: int = 0) -> StepPoint:
    """One step with a prompt's `tokens` behind a prefix, and `batch` sequences with `kv` tokens each."""
    return StepPoint(
        kind="prefill" if tokens else "decode",
        tokens=tokens or kv,
        batch=1 if tokens else batch,
        prefix_tokens=prefix,
        beside=batch if tokens else 0,
        seconds=seconds,
        spread=0.0,
        runs=1,
        steps=1,
        prefill_steps=int(tokens > 0),
        prefill_tokens=tokens,
        prefill_pairs=float(tokens * (prefix + tokens // 2)),
        decode_steps=int(batch > 0),
        decode_sequences=batch,
        decode_kv_tokens=batch * kv,
    )


GRID = (
    [point(tokens=tokens, prefix=prefix) for tokens in SIZES for prefix in (0, 512)]
    + [point(batch=batch, kv=kv) for batch in (1, 4, 16) for kv in (64, 1024)]
    + [point(tokens=tokens, batch=batch, kv=256) for tokens in (32, 128) for batch in (1, 4)]
)


def costing(terms: dict[str, float]) -> list[StepPoint]:
    """The grid, each point taking what the terms say."""
    order = [terms[name] for name in TERMS]
    return [one.model_copy(update={"seconds": float(np.dot(order, work_of(one)))}) for one in GRID]


costs = st.floats(1e-4, 1e-2)


@settings(max_examples=25, deadline=None)
@given(fixed=costs, prefill_step=costs, decode_step=costs, sequence=costs, scale=st.floats(0.5, 2.0))
def test_the_terms_that_made_the_points_are_found_again(
    fixed: float, prefill_step: float, decode_step: float, sequence: float, scale: float
) -> None:
    terms = dict(
        zip(TERMS, (fixed, prefill_step, scale * 1e-3, scale * 1e-6, decode_step, sequence, scale * 1e-6), strict=True)
    )
    points = costing(terms)
    fit = fit_steps(points)
    assert fit is not None
    for name in TERMS:
        assert getattr(fit, name) == pytest.approx(terms[name], rel=1e-3), name
    assert fit.residuals.worst < 1e-6
    assert predicted_s(fit, points[0]) == pytest.approx(points[0].seconds)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5)), min_size=3, max_size=8),
    st.lists(st.floats(0, 3), min_size=3, max_size=3),
)
def test_no_other_choice_of_terms_that_are_not_negative_fits_better(
    rows: list[tuple[float, float, float]], other: list[float]
) -> None:
    work, target = np.array(rows), np.ones(len(rows))
    found = nonnegative(work, target)
    assert (found >= 0.0).all()
    assert np.sum((work @ found - target) ** 2) <= np.sum((work @ np.array(other) - target) ** 2) + 1e-6


def test_points_that_no_terms_explain_show_in_the_residuals() -> None:
    points = costing(dict.fromkeys(TERMS, 1e-4))
    points[0] = points[0].model_copy(update={"seconds": 2 * points[0].seconds})
    fit = fit_steps(points)
    assert fit is not None
    assert fit.residuals.worst > 0.2
    assert fit.residuals.p50 <= fit.residuals.p95 <= fit.residuals.worst


def test_with_points_of_one_kind_alone_there_is_no_fit() -> None:
    assert fit_steps([one for one in GRID if one.kind == "decode"]) is None
    assert fit_steps([]) is None


def test_a_transfer_is_a_fixed_part_and_a_rate() -> None:
    points = [
        TransferPoint(tokens=size, bytes=size * 1000, seconds=0.001 + size * 1000 / 2e9, spread=0.0, runs=1)
        for size in (32, 512, 4096)
    ]
    fit = fit_transfer(points)
    assert fit is not None
    assert (fit.fixed_s, fit.bytes_per_s) == (pytest.approx(0.001), pytest.approx(2e9))
    assert fit_transfer(points[:1]) is None


def test_a_transfer_whose_larger_sizes_took_no_longer_has_no_rate() -> None:
    points = [
        TransferPoint(tokens=size, bytes=size * 1000, seconds=0.001, spread=0.0, runs=1) for size in (32, 512, 4096)
    ]
    assert fit_transfer(points) is None
