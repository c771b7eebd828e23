"""The meter of engines, on an engine whose steps take a known time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from trtpd_testing.emulated_build import engine_config

from trtpd.errors import CapacityError
from trtpd.perf.measured import Cell
from trtpd.perf.profile import EngineMeter
from trtpd.runtime.engine import emulated
from trtpd.runtime.engine.base import Engine

_names = itertools.count()


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def metered() -> Iterator[tuple[EngineMeter, Engine]]:
    time, name = Time(), f"test-meter-{next(_names)}"
    config = engine_config("mixed", prefill_tokens_per_s=1000.0, decode_step_ms=10.0)
    engine = emulated.load(config, Path(), pool_name=name, generation="g", sleep=time.sleep, clock=time)
    yield EngineMeter(engine, clock=time), engine
    engine.shutdown()


def test_a_prefill_costs_its_tokens(metered: tuple[EngineMeter, Engine]) -> None:
    meter, _ = metered
    assert meter(Cell(kind="prefill", tokens=48, batch=2)) == pytest.approx(0.096, rel=0.2)


def test_a_decode_step_costs_a_step(metered: tuple[EngineMeter, Engine]) -> None:
    meter, _ = metered
    assert meter(Cell(kind="decode", tokens=20, batch=3)) == pytest.approx(0.010, rel=0.2)


def test_nothing_is_left_in_the_engine_after_a_measurement(metered: tuple[EngineMeter, Engine]) -> None:
    meter, engine = metered
    free = engine.poll(0.0).load.kv_blocks_free
    for kind in ("prefill", "decode", "prefill"):
        meter(Cell(kind=kind, tokens=33, batch=2))
    engine.check_integrity()
    assert engine.poll(0.0).load.kv_blocks_free == free


def test_a_cell_that_does_not_fit_is_refused(metered: tuple[EngineMeter, Engine]) -> None:
    meter, _ = metered
    with pytest.raises(CapacityError, match="KV blocks"):
        meter(Cell(kind="decode", tokens=200, batch=4))
