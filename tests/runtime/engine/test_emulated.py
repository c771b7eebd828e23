from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tests.runtime.engine import tiny
from tests.runtime.engine.driver import GREEDY, SEEDED, Driver, hand_over, prompt, request

from trtpd.build.spec import EmulatedSpec
from trtpd.errors import EngineError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.kv_transfer.pool import SharedPool
from trtpd.runtime.engine import emulated
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.emulated import EmulatedPart, StepCosts
from trtpd.runtime.engine.executor import DrawAt, Piece
from trtpd.runtime.engine.group import StepExecutor

COSTS = StepCosts(
    prefill_tokens_per_s=1000.0, decode_step_ms=10.0, step_ms=1.0, decode_sequence_ms=2.0, decode_kv_token_us=10.0
)
PREFILL = Piece(ids=prompt(100), start=0, blocks=(0, 1, 2, 3), draw=None)
DECODE = Piece(ids=(5,), start=99, blocks=(0, 1, 2, 3), draw=None)


@pytest.mark.parametrize(
    ("pieces", "seconds"),
    [([PREFILL], 0.101), ([DECODE], 0.014), ([DECODE, DECODE], 0.017), ([DECODE, PREFILL], 0.114)],
)
def test_a_step_costs_its_prompt_tokens_and_its_decodes(pieces, seconds):
    assert COSTS.step_s(pieces) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("emulated_costs", "message"),
    [
        ({"prefill_tokens_per_s": 1.0}, "decode_step_ms"),
        ({"prefill_tokens_per_s": 1.0, "decode_step_ms": 1.0, "speed": 2.0}, "unknown \\['speed'\\]"),
        ({"prefill_tokens_per_s": 0.0, "decode_step_ms": 1.0}, "speed"),
        ({"prefill_tokens_per_s": 1.0, "decode_step_ms": -1.0}, "negative"),
    ],
)
def test_wrong_costs_are_refused(emulated_costs, message):
    with pytest.raises(EngineError, match=message):
        StepCosts.of(emulated_costs)


def test_an_engine_sleeps_what_its_steps_cost():
    slept: list[float] = []
    settings = tiny.config(tiny.architecture(), engine="emulated")
    engine = emulated.load(
        settings, Path(), pool_name="test-costs", generation="g", sleep=slept.append, clock=lambda: 0.0
    )
    Driver(engine).run(request(1, prompt(40), max_tokens=3))
    engine.shutdown()
    assert slept == pytest.approx([0.032, 0.008, 0.01, 0.01])


def test_what_a_step_took_is_not_slept_again():
    slept: list[float] = []
    seconds = itertools.count()
    settings = tiny.config(tiny.architecture(), engine="emulated")
    engine = emulated.load(
        settings, Path(), pool_name="test-took", generation="g", sleep=slept.append, clock=lambda: float(next(seconds))
    )
    Driver(engine).run(request(1, prompt(20), max_tokens=1))
    engine.shutdown()
    assert slept == [0.0]


def test_a_build_of_an_emulated_pipeline_has_costs_it_takes():
    assert StepCosts.of(EmulatedSpec().model_dump()).prefill_tokens_per_s == 8000.0


def test_a_sleeping_step_ends_when_the_engine_is_closed():
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=2, tokens_per_block=4, dtype="f32")
    pool = SharedPool.create("test-sleep", layout, 4, generation="g")
    part = EmulatedPart(pool, COSTS)
    threading.Timer(0.05, part.close).start()
    part._sleep_until_closed(60.0)
    pool.close()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_tokens_survive_a_hand_over_in_every_kv_type(dtype, sampling):
    settings = tiny.config(tiny.architecture(), engine="emulated", kv_dtype=dtype, tokens_per_block=8)
    settings = replace(settings, profile=replace(tiny.PROFILE, kv_blocks=64))
    source, sink = (Driver(tiny.load_emulated(settings)) for _ in range(2))
    what = request(1, prompt(50), sampling=sampling)
    assert hand_over(source, sink, what) == source.run(replace(what, attempt=2))
    for driver in (source, sink):
        driver.engine.shutdown()


@pytest.mark.parametrize("damage", ["swapped", "stale", "one value"])
def test_damaged_kv_gives_another_token(damage):
    layout = KVLayout(num_layers=2, kv_heads=2, head_dim=2, tokens_per_block=4, dtype="f32")
    pool = SharedPool.create("test-damage", layout, 4, generation="g")
    executor = one_executor(pool)
    at = DrawAt(sampling=Sampling(), index=0)
    executor.run([Piece(ids=(1, 2, 3, 4, 5, 6, 7, 8), start=0, blocks=(0, 1, 2), draw=None)])
    step = Piece(ids=(9,), start=8, blocks=(0, 1, 2), draw=at)
    before = executor.run([step])
    assert executor.run([step]) == before
    for array in (*pool.keys, *pool.values):
        if damage == "swapped":
            array[[0, 1]] = array[[1, 0]]
        elif damage == "stale":
            array[1] = 0
    if damage == "one value":
        pool.values[1][1, 1, 3, 1] += np.float32(1)
    assert executor.run([step]) != before
    executor.close()
    pool.close()


def decode_steps(executor: StepExecutor, blocks: tuple[int, ...], start: int, count: int) -> list[int]:
    at = DrawAt(sampling=Sampling(), index=0)
    drawn = []
    for position in range(start, start + count):
        (draw,) = executor.run([Piece(ids=(position % 7,), start=position, blocks=blocks, draw=at)])
        assert draw is not None
        drawn.append(draw.token)
    return drawn


def one_executor(pool: SharedPool) -> StepExecutor:
    part = EmulatedPart(pool, COSTS, sleep=lambda seconds: None)
    return StepExecutor(emulated.loaded(part, pool, vocab_size=50_000))


def test_kv_overwritten_behind_a_running_sequence_changes_its_tokens():
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=2, tokens_per_block=4, dtype="f32")
    pool = SharedPool.create("test-overwritten", layout, 16, generation="g")
    executor, blocks = one_executor(pool), tuple(range(16))
    executor.run([Piece(ids=prompt(12), start=0, blocks=blocks, draw=None)])
    decode_steps(executor, blocks, 12, 4)
    sound = decode_steps(one_executor(pool), blocks, 16, 8)
    pool.keys[0][1, 0, 0, 0] += np.float32(1)
    assert decode_steps(executor, blocks, 16, 8) != sound
    executor.close()
    pool.close()


def test_a_freed_block_given_to_another_sequence_starts_it_anew():
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=2, tokens_per_block=4, dtype="f32")
    pool = SharedPool.create("test-anew", layout, 16, generation="g")
    executor, blocks = one_executor(pool), tuple(range(8))
    at = DrawAt(sampling=Sampling(), index=0)
    executor.run([Piece(ids=prompt(9), start=0, blocks=blocks, draw=at)])
    pool.bump(blocks)
    fresh = one_executor(pool)
    for one in (executor, fresh):
        one.run([Piece(ids=prompt(9)[::-1], start=0, blocks=blocks, draw=None)])
    step = [Piece(ids=(3,), start=9, blocks=blocks, draw=at)]
    assert executor.run(step) == fresh.run(step)
    for one in (executor, fresh):
        one.close()
    pool.close()


def test_a_step_reads_as_much_of_a_long_sequence_as_of_a_short_one(monkeypatch):
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=2, tokens_per_block=4, dtype="f32")
    pool = SharedPool.create("test-reads", layout, 128, generation="g")
    read: list[int] = []
    whole = EmulatedPart._digests

    def counting(self: EmulatedPart, wanted: Sequence[tuple[int, int, int]]) -> list[int]:
        read.extend(tokens for _, _, tokens in wanted)
        return whole(self, wanted)

    monkeypatch.setattr(EmulatedPart, "_digests", counting)
    reads = {}
    for tokens in (8, 400):
        executor, blocks = one_executor(pool), tuple(range(128))
        executor.run([Piece(ids=prompt(tokens), start=0, blocks=blocks, draw=None)])
        decode_steps(executor, blocks, tokens, 1)
        read.clear()
        decode_steps(executor, blocks, tokens + 1, 4)
        reads[tokens] = sum(read)
        executor.close()
    assert reads[400] == reads[8]
    pool.close()
