"""Steps as the meter tells them, on an engine whose steps take a known time, and the grid it is asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from trtpd_testing.emulated_build import engine_config

from trtpd.build.manifest import EngineConfig, RoleName
from trtpd.errors import CapacityError, EngineError
from trtpd.perf.measured import Cell
from trtpd.perf.profile_grid import FIRST_OWN, Grid
from trtpd.perf.profile_points import cell_of, step_point
from trtpd.perf.step_fit import POINTS_LEAST, fit_steps
from trtpd.perf.step_meter import StepMeter
from trtpd.runtime.core.events import Capabilities
from trtpd.runtime.engine import emulated
from trtpd.runtime.engine.base import Engine

_names = itertools.count()
COSTS: dict[str, Any] = {
    "prefill_tokens_per_s": 1000.0,
    "step_ms": 1.0,
    "decode_step_ms": 10.0,
    "decode_sequence_ms": 0.5,
    "decode_kv_token_us": 5.0,
}
Metered = Callable[..., tuple[StepMeter, Engine]]


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def config_of(role: RoleName = "mixed", *, prefix_cache: bool = False) -> EngineConfig:
    return engine_config(role, kv_blocks=256, prefix_cache=prefix_cache, **COSTS)


@pytest.fixture
def metered() -> Iterator[Metered]:
    engines: list[Engine] = []

    def make(config: EngineConfig) -> tuple[StepMeter, Engine]:
        time, name = Time(), f"test-steps-{next(_names)}"
        engine = emulated.load(config, Path(), pool_name=name, generation="g", sleep=time.sleep, clock=time)
        engines.append(engine)
        return StepMeter(engine, clock=time), engine

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.mark.parametrize("cached", [True, False], ids=["from a cache", "computed"])
def test_a_prefill_behind_a_prefix_is_told_without_the_prefix(metered: Metered, cached: bool) -> None:
    meter, _ = metered(config_of(prefix_cache=cached))
    for _ in range(2):
        found = meter(Cell(kind="prefill", tokens=24, batch=1, prefix_tokens=64))
        assert [(step.prefill_tokens, step.prefill_kv_tokens) for step in found.steps] == [(16, 72), (8, 84)]
        assert found.seconds == pytest.approx(0.026)


def test_prompts_of_one_step_are_told_together(metered: Metered) -> None:
    meter, _ = metered(config_of())
    (step,) = meter(Cell(kind="prefill", tokens=12, batch=2)).steps
    assert (step.n_prefill, step.prefill_tokens, step.prefill_kv_tokens) == (2, 24, 12)
    assert step.seconds == pytest.approx(0.025)


def test_a_decode_step_is_told_with_the_kv_it_attends_to(metered: Metered) -> None:
    meter, _ = metered(config_of())
    (step,) = meter(Cell(kind="decode", tokens=40, batch=3)).steps
    assert step.n_decode == 3
    assert step.seconds == pytest.approx(0.011 + 3 * 0.0005 + step.decode_kv_tokens * 5e-6, rel=1e-3)


def test_a_prefill_beside_decoding_sequences_is_told_with_them(metered: Metered) -> None:
    meter, _ = metered(config_of())
    found = meter(Cell(kind="prefill", tokens=32, batch=1, beside=4, context_tokens=30))
    assert [(step.n_prefill, step.prefill_tokens, step.n_decode) for step in found.steps] == [(1, 16, 4), (1, 16, 4)]


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
@pytest.mark.parametrize("cached", [True, False])
def test_every_cell_of_a_grid_can_be_measured_and_the_fit_finds_what_the_engine_costs(
    metered: Metered, role: RoleName, cached: bool
) -> None:
    config = config_of(role, prefix_cache=cached)
    meter, engine = metered(config)
    free = engine.poll(0.0).load.kv_blocks_free
    cells = Grid(config).cells()
    points = [step_point(cell, [meter(cell)]) for cell in cells]
    assert [cell_of(point) for point in points] == cells
    engine.check_integrity()
    assert engine.poll(0.0).load.kv_blocks_free == free
    fit = fit_steps(points)
    assert fit is not None
    assert fit.residuals.worst < 0.02
    assert fit.prefill_token_s == pytest.approx(0.001, rel=0.02)
    assert fit.fixed_s + fit.decode_step_s == pytest.approx(0.011, rel=0.05)


def test_a_grid_begins_with_the_roles_own_work_and_asks_nothing_twice() -> None:
    kinds: dict[RoleName, str] = {"prefill": "prefill", "decode": "decode", "mixed": "prefill"}
    for role, kind in kinds.items():
        cells = Grid(config_of(role)).cells()
        assert cells[0].kind == kind
        assert len(set(cells)) == len(cells)
        assert any(cell.beside for cell in cells) is (role != "prefill")


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_a_run_that_is_cut_short_soon_has_a_fit(metered: Metered, role: RoleName) -> None:
    meter, _ = metered(config := config_of(role))
    points = [step_point(cell, [meter(cell)]) for cell in Grid(config).cells()[: FIRST_OWN + POINTS_LEAST]]
    fit = fit_steps(points)
    assert fit is not None
    assert fit.residuals.worst < 0.02


@pytest.mark.parametrize(("kv_blocks", "max_seq_tokens"), [(8, 256), (64, 24), (4, 20)])
def test_a_grid_fits_the_smallest_engine(metered: Metered, kv_blocks: int, max_seq_tokens: int) -> None:
    config = msgspec.structs.replace(
        engine_config("mixed", kv_blocks=kv_blocks, **COSTS), max_seq_tokens=max_seq_tokens
    )
    meter, _ = metered(config)
    for cell in Grid(config).cells():
        assert meter(cell).seconds > 0.0


class Untold:
    """An engine that doesn't say how far a prompt is, nor what a step took."""

    capabilities = Capabilities(chunk_events=False)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_an_engine_that_does_not_tell_its_steps_is_measured_by_the_clock() -> None:
    time = Time()
    engine = emulated.load(config_of(), Path(), pool_name="test-untold", generation="g", sleep=time.sleep, clock=time)
    try:
        meter = StepMeter(cast(Engine, Untold(engine)), clock=time)
        (prompt,) = meter(Cell(kind="prefill", tokens=40, batch=1)).steps
        assert (prompt.prefill_tokens, prompt.prefill_kv_tokens) == (40, 20)
        assert prompt.seconds == pytest.approx(0.043)
        (step,) = meter(Cell(kind="decode", tokens=40, batch=3)).steps
        assert step.seconds == pytest.approx(0.0125 + step.decode_kv_tokens * 5e-6, rel=0.1)
        engine.check_integrity()
    finally:
        engine.shutdown()


def test_a_cell_that_does_not_fit_is_refused(metered: Metered) -> None:
    meter, _ = metered(config_of())
    with pytest.raises(CapacityError, match="sequences of"):
        meter(Cell(kind="prefill", tokens=200, batch=1, prefix_tokens=64))


def test_a_cell_of_which_nothing_was_told_is_no_point() -> None:
    from trtpd.perf.measured import Measured

    with pytest.raises(EngineError, match="no step"):
        step_point(Cell(kind="decode", tokens=8, batch=1), [Measured(seconds=0.0)])
