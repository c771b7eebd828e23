"""Steps computed by several ranks, as threads of this process."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.runtime.engine import reference, tiny
from tests.runtime.engine.driver import Driver, prompt, request

from trtpd.build.manifest import EngineConfig, Precision
from trtpd.errors import InternalError
from trtpd.kv_transfer.layout import KVLayout
from trtpd.runtime.core.events import Rejected, Tokens
from trtpd.runtime.engine import emulated, openvino
from trtpd.runtime.engine.base import Sampling
from trtpd.runtime.engine.batching import StepLimits
from trtpd.runtime.engine.executor import DrawAt, Piece
from trtpd.runtime.engine.mpi import NAP_MOST_S, SPIN_S, nap_s
from trtpd.runtime.engine.ranks import LocalRanks
from trtpd.runtime.engine.steps import Step, StepWire

LAYOUT = KVLayout(num_layers=1, kv_heads=1, head_dim=2, tokens_per_block=4, dtype="f32")
LIMITS = StepLimits(max_step_tokens=40, chunk_tokens=40, max_batch=5)
IDS = list(prompt(75))


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8))
    start = draw(st.integers(0, 90))
    blocks = draw(st.lists(st.integers(0, 1000), min_size=LAYOUT.blocks_for(start + len(ids)), max_size=25))
    at = DrawAt(sampling=Sampling(), index=0) if draw(st.booleans()) else None
    return Piece(ids=ids, start=start, blocks=blocks, draw=at)


@given(st.lists(st.tuples(pieces(), st.integers(0, 2**62 - 1)), min_size=1, max_size=5))
def test_a_step_is_told_as_it_is(made):
    wire = StepWire(LAYOUT, LIMITS, max_seq_tokens=100)
    step = Step(*zip(*made, strict=True))
    told = StepWire(LAYOUT, LIMITS, max_seq_tokens=100)
    run = wire.pack(step)
    told.buffer[: len(run)] = run
    heard = told.unpack(len(run))
    assert list(heard.epochs) == list(step.epochs)
    assert heard.tokens == step.tokens
    for theirs, ours in zip(heard.pieces, step.pieces, strict=True):
        needed = LAYOUT.blocks_for(ours.end)
        assert (theirs.ids, theirs.start) == (ours.ids, ours.start)
        assert theirs.blocks == list(ours.blocks[:needed])
        assert (theirs.draw is None) == (ours.draw is None)


def settings(tp: int, precision: Precision = "f32", **changes: int) -> EngineConfig:
    arch = replace(tiny.architecture(), **changes)
    return tiny.config(arch, precision=precision, tp=tp)


def logits_of_ranks(config: EngineConfig, directory, steps: list[Step]) -> list[np.ndarray]:
    """Of each step, put together from every rank's part."""
    ranks = LocalRanks.make(config.tp)
    found: list[np.ndarray] = []

    def run(rank: LocalRanks) -> None:
        loaded = openvino._load_rank(config, directory, f"ranks-{rank.rank}-{next(tiny._names)}", "g", rank)
        for step in steps:
            parts = rank.gather(loaded.part.compute(step), loaded.widths)
            if parts is not None:
                assert [part.shape[1] for part in parts] == list(loaded.widths)
                found.append(np.concatenate(parts, axis=1))
        loaded.part.close()
        loaded.pool.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("precision", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(("tp", "heads", "kv_heads"), [(2, 4, 2), (2, 9, 3), (3, 9, 3), (4, 4, 2), (5, 6, 3)], ids=str)
def test_ranks_together_compute_what_the_reference_does(tp, heads, kv_heads, precision, tmp_path):
    config = settings(tp, precision, num_attention_heads=heads, num_key_value_heads=kv_heads)
    tensors = tiny.stored(tiny.weights(config.architecture), precision)
    tiny.save_ranks(tmp_path, tensors, config)
    at = DrawAt(sampling=Sampling(), index=0)
    steps = [
        Step([Piece(ids=IDS[:50], start=0, blocks=(5, 0, 3), draw=at)], [0]),
        Step([Piece(ids=IDS[50:], start=50, blocks=(5, 0, 3), draw=at)], [0]),
    ]
    found = np.concatenate(logits_of_ranks(config, tmp_path, steps))
    expected = reference.logits(config.architecture, tiny.read_back(tensors), IDS)[[49, 74]]
    tolerance = 1e-3 if precision == "f32" else 0.05 * expected.std()
    np.testing.assert_allclose(found, expected, atol=tolerance)


def test_sums_are_equal_on_all_ranks_and_in_one_order():
    ranks = LocalRanks.make(3)
    parts = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    totals = np.zeros_like(parts)
    threads = [threading.Thread(target=rank.sum, args=(parts[rank.rank], totals[rank.rank])) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (totals == (parts[0] + parts[1]) + parts[2]).all()


@pytest.fixture
def engine(tmp_path):
    config = settings(2)
    tiny.save_ranks(tmp_path, tiny.stored(tiny.weights(config.architecture), "f32"), config)
    engine = tiny.load_local(config, tmp_path)
    yield engine
    engine.shutdown()


def test_one_ranks_logits_that_are_no_numbers_fail_the_step_alone(engine, monkeypatch):
    driver = Driver(engine)
    expected = driver.run(request(1, prompt(20)))
    held = driver.submit(request(2, prompt(20), max_tokens=9))
    driver.until(lambda: len(driver.of(held, Tokens)) == 3)
    compute = openvino.OpenVINOPart.compute

    def spoilt(self, step):
        return compute(self, step) * (np.nan if threading.current_thread() is not threading.main_thread() else 1)

    monkeypatch.setattr(openvino.OpenVINOPart, "compute", spoilt)
    driver.step()
    monkeypatch.undo()
    assert "not a number" in driver.of(held, Rejected)[0].reason
    assert driver.run(request(3, prompt(20))) == expected


@pytest.mark.parametrize("sums", [0, 3, 5])
def test_a_graph_that_stops_halfway_on_the_first_rank_ends_the_group(engine, monkeypatch, sums):
    driver = Driver(engine)
    driver.submit(request(1, prompt(20)))
    driver.step()
    part = engine._executor._loaded.part
    part._sums_per_step = sums
    with pytest.raises(InternalError, match=rf"left a step after 4 of {sums} sums"):
        driver.step()


def test_a_sum_that_fails_ends_the_group():
    class Broken(LocalRanks):
        def sum(self, part, into):
            raise RuntimeError("truncated")

    (rank,) = LocalRanks.make(1)
    sums = openvino.Sums(Broken(0, rank._shared))
    with pytest.raises(InternalError, match="truncated"):
        sums(np.zeros(1), np.zeros(1))


def test_kv_that_differs_on_two_holders_of_a_head_gives_another_token():
    at = [DrawAt(sampling=Sampling(), index=0)]
    held = [(0,), (0,), (1,)]

    def token(*digests: int) -> int:
        (draw,) = emulated.draw_all(held, 50_000, [np.array([[word]], np.uint64) for word in digests], at)
        return draw.token

    sound = token(5, 5, 9)
    (alone,) = emulated.draw_all([(0, 1)], 50_000, [np.array([[14]], np.uint64)], at)
    assert alone.token == sound
    assert len({sound, token(5, 6, 9), token(6, 5, 8), token(5, 5, 8)}) >= 3


def test_a_rank_that_waits_longer_sleeps_longer_up_to_a_bound():
    naps = [nap_s(idle_s) for idle_s in (0.0, SPIN_S / 2, SPIN_S, 0.004, 0.01, 10.0)]
    assert naps[:2] == [0.0, 0.0]
    assert naps == sorted(naps)
    assert naps[-1] == NAP_MOST_S
    assert nap_s(0.008) == pytest.approx(0.001)
