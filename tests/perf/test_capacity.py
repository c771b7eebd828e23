"""What a cluster can serve, reckoned from its step times alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trtpd.perf.capacity import Demand, demand
from trtpd.perf.scenario import Faults, Kill, SimRequest, Slow
from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core.cost import LinearStepTime

MODEL = LinearStepTime(
    fixed_s=0.01, prefill_token_s=1e-4, prefill_pair_s=0.0, decode_sequence_s=1e-3, decode_kv_token_s=0.0
)
WORKERS = tuple(
    WorkerSpec(name=f"{role}_{n}", role=role, kv_blocks=1024, max_batch=20)
    for role in ("prefill", "decode")
    for n in range(2)
)
REQUESTS = tuple(SimRequest(at_s=n / 10, prompt_tokens=500, max_tokens=64, output_tokens=41) for n in range(100))


def asked(requests=REQUESTS, workers=WORKERS, *, faults: Faults | None = None, tpot_s: float = 1.0) -> Demand:
    return demand(requests, workers, MODEL, seconds=10.0, tpot_s=tpot_s, faults=faults or Faults())


def test_an_instance_can_do_what_its_steps_allow() -> None:
    found = asked()
    assert found.prefill == pytest.approx(100 * 0.06 / 20.0)
    assert found.decode == pytest.approx(100 * 40 / (2 * 20 / 0.03 * 10.0))


def test_a_batch_is_no_larger_than_its_target_and_its_kv_allow() -> None:
    assert asked(tpot_s=0.021).decode == pytest.approx(100 * 40 / (2 * 11 / 0.021 * 10.0))
    small = tuple(replace(spec, kv_blocks=18 * 5) for spec in WORKERS)
    assert asked(workers=small).decode == pytest.approx(100 * 40 / (2 * 5 / 0.015 * 10.0))


def test_what_is_killed_counts_as_away_and_what_is_slowed_as_slow() -> None:
    killed = asked(faults=Faults(kills=(Kill(instance="prefill_0", at_s=9.0),)))
    assert killed.prefill == pytest.approx(2 * asked().prefill)
    slowed = asked(faults=Faults(slow=(Slow(instance="prefill_0", from_s=9.0, to_s=10.0, factor=3.0),)))
    assert slowed.prefill == pytest.approx(asked().prefill * 2 / (1 + 1 / 3))


def test_a_shared_beginning_costs_nothing_where_there_are_caches() -> None:
    requests = tuple(replace(request, block_hashes=tuple(range(15))) for request in REQUESTS)
    caches = tuple(replace(spec, cache_blocks=64) for spec in WORKERS)
    assert asked(requests).prefill == asked().prefill
    assert asked(requests, caches).prefill == pytest.approx(100 * (0.01 + 20e-4) / 20.0)


def test_nothing_asked_is_nothing() -> None:
    assert asked(()).most == 0.0
