"""The linear step model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpd.errors import InputError
from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core.cluster import Cluster
from trtpd.runtime.core.cost import Costs, LinearStepTime, StepWork
from trtpd.runtime.core.events import Hello
from trtpd.runtime.core.instance import Hold

MODEL = LinearStepTime(
    fixed_s=0.01, prefill_token_s=1e-4, prefill_pair_s=1e-8, decode_sequence_s=1e-3, decode_kv_token_s=1e-6
)
counts = st.integers(0, 4096)


def step_s(**work: int) -> float:
    nothing = {"n_prefill": 0, "prefill_tokens": 0, "prefill_kv_tokens": 0, "n_decode": 0, "decode_kv_tokens": 0}
    return MODEL.step_s(**{**nothing, **work})


def test_a_step_without_work_costs_nothing() -> None:
    assert step_s() == 0.0


def test_each_kind_of_work_has_its_rate() -> None:
    assert step_s(n_decode=4, decode_kv_tokens=2000) == pytest.approx(0.01 + 0.004 + 0.002)
    assert step_s(n_prefill=1, prefill_tokens=512, prefill_kv_tokens=256) == pytest.approx(
        0.01 + 0.0512 + 512 * 256 * 1e-8
    )


def test_a_prompt_twice_as_long_costs_more_than_twice() -> None:
    def prompt_s(tokens: int) -> float:
        return step_s(n_prefill=1, prefill_tokens=tokens, prefill_kv_tokens=tokens // 2) - MODEL.fixed_s

    assert prompt_s(4096) > 2 * prompt_s(2048)


@given(n=st.integers(1, 64), tokens=counts, kv=counts, more=counts)
def test_more_work_never_takes_less_time(n: int, tokens: int, kv: int, more: int) -> None:
    base = step_s(n_prefill=n, prefill_tokens=tokens, prefill_kv_tokens=kv, n_decode=n, decode_kv_tokens=kv)
    work = step_s(
        n_prefill=n, prefill_tokens=tokens + more, prefill_kv_tokens=kv, n_decode=n, decode_kv_tokens=kv + more
    )
    assert work >= base


def test_a_negative_cost_is_refused() -> None:
    with pytest.raises(InputError, match="fixed_s"):
        LinearStepTime(
            fixed_s=-1.0, prefill_token_s=0.0, prefill_pair_s=0.0, decode_sequence_s=0.0, decode_kv_token_s=0.0
        )


def test_a_step_with_both_kinds_of_work_costs_what_each_adds() -> None:
    model = replace(MODEL, prefill_step_s=0.004, decode_step_s=0.002)
    nothing = {"n_prefill": 0, "prefill_tokens": 0, "prefill_kv_tokens": 0, "n_decode": 0, "decode_kv_tokens": 0}
    alone = [model.step_s(**{**nothing, kind: 1}) for kind in ("n_prefill", "n_decode")]
    both = model.step_s(**{**nothing, "n_prefill": 1, "n_decode": 1})
    assert both == pytest.approx(sum(alone) - MODEL.fixed_s)


@given(tokens=st.integers(1, 4096), chunk_tokens=st.integers(1, 512))
def test_a_prompt_costs_its_steps(tokens: int, chunk_tokens: int) -> None:
    model = replace(MODEL, chunk_tokens=chunk_tokens)
    starts = range(0, tokens, chunk_tokens)
    steps = [
        model.step_s(
            n_prefill=1,
            prefill_tokens=min(chunk_tokens, tokens - start),
            prefill_kv_tokens=start + min(chunk_tokens, tokens - start) // 2,
            n_decode=0,
            decode_kv_tokens=0,
        )
        for start in starts
    ]
    assert model.prompt_s(tokens) == pytest.approx(sum(steps), rel=1e-2)


@pytest.mark.parametrize("wrong", [{"decode_step_s": float("inf")}, {"prefill_step_s": -1e-9}, {"chunk_tokens": 0}])
def test_a_term_that_can_not_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        replace(MODEL, **wrong)


def hello(fingerprint: str = "f") -> Hello:
    return WorkerSpec(name="d", role="decode", fingerprint=fingerprint).hello("1")


def test_measured_costs_are_of_one_build_and_those_of_another_are_learned() -> None:
    costs = Costs({"decode": MODEL}, fingerprint="f")
    assert costs.known(hello(), "decode")
    assert costs.decode_s(hello(), "decode", 0.0) == pytest.approx((0.011, 0.001))
    assert not costs.known(hello("g"), "decode")
    assert costs.decode_s(hello("g"), "decode", 0.0) == Costs().decode_s(hello("g"), "decode", 0.0)


def test_an_instance_that_is_slower_than_measured_is_seen_as_that() -> None:
    cluster = Cluster(Costs({"decode": MODEL}, fingerprint="f"))
    instance = cluster.register(hello())
    for _ in range(400):
        instance.reports += 1
        cluster.observe(instance, StepWork(n_decode=4), 3 * (0.01 + 0.004))
    assert instance.factor == pytest.approx(3.0, rel=0.05)


def steps_of(cluster: Cluster, names: dict[str, float], batches: list[int]) -> None:
    """Steps that take what MODEL says, and so many times that on each instance."""
    for name, factor in names.items():
        instance = cluster.instances[name]
        for n in batches:
            instance.context_tokens = 100 * n
            cluster.observe(instance, StepWork(n_decode=n), factor * step_s(n_decode=n, decode_kv_tokens=100 * n))
        instance.context_tokens = 0
    cluster.settle()


def decoders(count: int) -> Cluster:
    cluster = Cluster(Costs())
    for number in range(count):
        cluster.register(WorkerSpec(name=f"d{number}", role="decode").hello("1"))
    return cluster


def test_what_an_idle_instance_costs_is_learned_from_its_like() -> None:
    cluster = decoders(2)
    steps_of(cluster, {"d0": 1.0}, [1, 4, 8, 12, 16, 10, 5, 2] * 32)
    idle = cluster.instances["d1"]
    assert idle.table.one_s[idle.row] == pytest.approx(step_s(n_decode=1), rel=0.15)
    assert idle.table.each_s[idle.row] == pytest.approx(MODEL.decode_sequence_s, rel=0.15)


def test_a_batch_that_grows_does_not_make_its_instance_look_slow() -> None:
    cluster = decoders(1)
    for n in range(1, 33):
        steps_of(cluster, {"d0": 1.0}, [n] * 8)
    assert cluster.instances["d0"].factor == pytest.approx(1.0, rel=0.2)


def test_without_a_profile_a_slow_instance_is_told_from_its_like() -> None:
    cluster = decoders(3)
    for n in (3, 8, 5, 12, 7, 4) * 8:
        steps_of(cluster, {"d0": 1.0, "d1": 3.0}, [n])
    fast, slow, idle = (cluster.instances[f"d{number}"] for number in range(3))
    assert slow.factor / fast.factor == pytest.approx(3.0, rel=0.1)
    assert slow.table.one_s[slow.row] > 2.0 * idle.table.one_s[idle.row]


def test_where_enough_prompt_waits_is_seen_anew_as_soon_as_steps_turn_out_slower() -> None:
    cluster = Cluster(Costs())
    instance = cluster.register(WorkerSpec(name="p", role="prefill", prefill_tokens_per_s=40.0).hello("1"))
    hold = Hold(instance="p", request_id=1, attempt=1, side="prefill", blocks=1, pending_tokens=19)
    cluster.reserve(instance, hold)
    cluster.settle()
    assert instance.table.prefill_fits[instance.row] > 0.0
    work = StepWork()
    work.chunk(0, 8)
    cluster.observe(instance, work, 0.8)
    cluster.settle()
    assert instance.table.prefill_fits[instance.row] == -1.0
