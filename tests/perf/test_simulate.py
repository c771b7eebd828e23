"""The simulator: the same trace twice, the right tokens under faults, and predictions that follow its inputs."""

from __future__ import annotations

import random

import pytest

from trtpd.perf.outcome import Outcome
from trtpd.perf.scenario import Faults, Kill, Network, SimRequest, Slow
from trtpd.perf.simulate import Simulation
from trtpd.perf.slo import FixedSlo
from trtpd.perf.worker_spec import WorkerSpec, true_token
from trtpd.runtime.core.cost import LinearStepTime
from trtpd.runtime.core.events import Emit
from trtpd.runtime.core.router import RouterCore

MODEL = LinearStepTime(
    fixed_s=0.004, prefill_token_s=2e-4, prefill_pair_s=1e-8, decode_sequence_s=1e-3, decode_kv_token_s=1e-7
)
PAIR = (
    WorkerSpec(name="p0", role="prefill", prefill_tokens_per_s=4000.0),
    WorkerSpec(name="d0", role="decode"),
)
POOLS = (
    *(WorkerSpec(name=f"p{n}", role="prefill", kv_blocks=256, prefill_tokens_per_s=4000.0) for n in range(2)),
    *(WorkerSpec(name=f"d{n}", role="decode", kv_blocks=256) for n in range(2)),
    WorkerSpec(name="m0", role="mixed", kv_blocks=128, prefill_tokens_per_s=4000.0),
)
EVERYTHING = Faults(
    kills=tuple(
        Kill(instance=name, at_s=at_s)
        for name, at_s in [("d0", 3.0), ("p0", 5.0), ("d1", 9.0), ("m0", 9.5), ("p0", 12.0), ("p1", 12.2)]
    ),
    slow=(Slow(instance="d1", from_s=2.0, to_s=8.0, factor=3.0),),
    transfer_failure_rate=0.1,
    drop_rate=0.02,
)


def mixed_load(count: int, seed: int, *, rate: float = 8.0) -> list[SimRequest]:
    """Prompts of all sizes; some clients leave, some texts meet a stop string."""
    rng, now_s, requests = random.Random(seed), 0.1, []
    for _ in range(count):
        now_s += rng.expovariate(rate)
        most = rng.choice([1, 8, 32, 64])
        requests.append(
            SimRequest(
                at_s=now_s,
                prompt_tokens=rng.choice([20, 200, 800]),
                max_tokens=most,
                output_tokens=rng.randint(1, most),
                ttft_s=2.0,
                tpot_s=0.1,
                leaves_after_s=rng.uniform(0.0, 2.0) if rng.random() < 0.1 else None,
                stops_at_index=3 if rng.random() < 0.1 else None,
            )
        )
    return requests


def run(requests, *, workers=POOLS, faults=None, seed=0, **more) -> Simulation:
    simulation = Simulation(
        core=RouterCore(seed=seed),
        workers=workers,
        model=MODEL,
        requests=requests,
        faults=faults,
        seed=seed,
        **{"check_every_event": True, **more},
    )
    simulation.run()
    return simulation


def one(prompt_tokens: int = 400, output_tokens: int = 20, **more) -> SimRequest:
    return SimRequest(
        at_s=1.0, prompt_tokens=prompt_tokens, max_tokens=output_tokens, output_tokens=output_tokens, **more
    )


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    traces: list[list[str]] = [[], [], []]
    for trace, seed in zip(traces, (7, 7, 8), strict=True):
        run(mixed_load(60, seed=1), faults=EVERYTHING, seed=seed, trace=trace)
    assert traces[0] == traces[1]
    assert traces[0] != traces[2]
    assert len(traces[0]) > 1000


@pytest.mark.parametrize("seed", range(3))
def test_under_faults_every_request_ends_and_no_token_is_wrong_lost_or_doubled(seed: int) -> None:
    requests = mixed_load(120, seed=seed)
    simulation = run(requests, faults=EVERYTHING, seed=seed)
    for outcome, request in zip(simulation.outcomes, requests, strict=True):
        count = len(outcome.tokens)
        assert outcome.tokens == [true_token(outcome.request_id, index) for index in range(count)]
        assert outcome.state in ("finished", "cancelled")
        if outcome.state == "finished" and request.stops_at_index is None:
            assert count == request.output_tokens
    assert simulation.core.snapshot()["counters"]["losses"] == len(EVERYTHING.kills)
    for node in simulation.nodes.values():
        assert node.worker is not None
        assert not node.worker.sequences
    assert not any(view["in_flight"] + view["closing"] for view in simulation.core.snapshot()["instances"])


def test_an_undisturbed_request_takes_what_the_step_model_says() -> None:
    simulation = run([one(400, 20)], workers=PAIR, network=Network(message_s=0.0, transfer_fixed_s=0.0))
    prefill_s = MODEL.step_s(n_prefill=1, prefill_tokens=400, prefill_kv_tokens=200, n_decode=0, decode_kv_tokens=0)
    decode_s = [
        MODEL.step_s(n_prefill=0, prefill_tokens=0, prefill_kv_tokens=0, n_decode=1, decode_kv_tokens=400 + step)
        for step in range(19)
    ]
    outcome = simulation.outcomes[0]
    transfer_s = 400 * 23040 / Network().bytes_per_s
    assert outcome.ttft_s == pytest.approx(prefill_s)
    assert outcome.ended_s == pytest.approx(1.0 + prefill_s + transfer_s + sum(decode_s))


def test_long_prompts_are_copied_while_they_are_computed() -> None:
    slow_link = Network(bytes_per_s=200e6)
    simulation = run([one(2000, 2)], workers=PAIR, network=slow_link)
    timeline = simulation.outcomes[0].timeline
    assert timeline is not None
    attempt = timeline.attempts[0]
    assert attempt.bytes_moved == 2000 * 23040
    assert attempt.exposed_s < 0.9 * attempt.bytes_moved / slow_link.bytes_per_s


def test_a_slow_decode_instance_shows_in_the_time_per_token() -> None:
    faults = Faults(slow=(Slow(instance="d0", from_s=0.0, to_s=99.0, factor=3.0),))
    fast = run([one()], workers=PAIR).outcomes[0].tpot_s
    slow = run([one()], workers=PAIR, faults=faults).outcomes[0].tpot_s
    assert fast is not None
    assert slow is not None
    assert slow > 2.0 * fast


def test_a_decode_death_in_mid_stream_is_a_pause_and_not_a_failure() -> None:
    kills = (Kill(instance="d0", at_s=1.2, back_after_s=1.0),)
    simulation = run([one(400, 60)], workers=PAIR, faults=Faults(kills=kills))
    outcome = simulation.outcomes[0]
    assert outcome.state == "finished"
    assert len(outcome.tokens) == 60
    assert outcome.timeline is not None
    assert [attempt.outcome for attempt in outcome.timeline.attempts] == ["decode_lost", "delivered"]


def test_the_summary_sorts_requests_by_what_became_of_them() -> None:
    requests = [
        one(ttft_s=5.0),
        one(ttft_s=0.001),
        one(leaves_after_s=0.01),
        one(100_000),
        one(2000, 4000, timeout_s=1.0),
    ]
    kinds = run(requests, workers=PAIR).summary().kinds
    assert kinds == {"cancelled": 1, "failed:deadline": 1, "good": 1, "late": 1, "refused:invalid_argument": 1}


def test_overload_is_refused_and_what_is_admitted_is_served() -> None:
    requests = [
        SimRequest(at_s=0.1 + 0.002 * n, prompt_tokens=400, max_tokens=40, output_tokens=40, timeout_s=30.0)
        for n in range(1500)
    ]
    summary = run(requests, workers=PAIR, check_every_event=False).summary()
    assert set(summary.kinds) <= {"good", "refused:saturated", "failed:deadline"}
    assert summary.kinds["good"] > 100
    assert summary.kinds["refused:saturated"] > 100


@pytest.mark.slow
def test_a_long_run_with_faults_leaves_nothing_behind() -> None:
    names = [spec.name for spec in POOLS]
    kills = tuple(Kill(instance=names[n % 5], at_s=7.0 * n + 5.0) for n in range(100))
    faults = Faults(kills=kills, transfer_failure_rate=0.05, drop_rate=0.01)
    requests = mixed_load(4000, seed=11, rate=6.0)
    simulation = run(requests, faults=faults, seed=11, check_every_event=False)
    simulation.core.check_integrity()
    assert {outcome.state for outcome in simulation.outcomes} <= {"finished", "cancelled", "failed", "refused"}
    assert not any(view["in_flight"] + view["closing"] for view in simulation.core.snapshot()["instances"])


def test_several_tokens_at_once_have_no_pace_and_are_unmeasured_by_a_target_for_it():
    def outcome(*bursts):
        found, first = Outcome(request_id=1, arrived_s=0.0), 0
        for at_s, ids in bursts:
            found.emitted(Emit(request_id=1, first_index=first, ids=ids, log_probs=()), at_s)
            first += len(ids)
        found.state = "finished"
        return found

    at_once, apart = outcome((0.5, (1, 2, 3))), outcome((0.5, (1,)), (0.7, (2, 3)))
    assert at_once.tpot_s is None
    assert apart.tpot_s == pytest.approx(0.1)
    assert at_once.kind(FixedSlo(ttft_s=1.0, tpot_s=0.2)) == "unmeasured"
    assert at_once.kind(FixedSlo(ttft_s=0.4, tpot_s=0.2)) == "late"
    assert at_once.kind(FixedSlo(ttft_s=1.0)) == "good"
    assert outcome((0.5, (1,))).kind(FixedSlo(tpot_s=0.2)) == "good"
