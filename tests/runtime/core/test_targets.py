"""Admission by targets: refused only when load makes a request miss them."""

from __future__ import annotations

import pytest
from trtpd_testing.router_rig import Rig, decode, mixed, only, prefill, to_decoding, tokens

from trtpd.perf.scenario import Faults, SimRequest, Slow
from trtpd.perf.simulate import Simulation
from trtpd.runtime.core.cost import LinearStepTime
from trtpd.runtime.core.events import Refuse, Submit
from trtpd.runtime.core.instance import Hold
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.ranks import places_s
from trtpd.runtime.core.router import RouterCore


def test_what_load_would_make_late_is_refused_and_told_when_to_come_back() -> None:
    rig = Rig(mixed(kv_blocks=100_000, prefill_tokens_per_s=1000.0))
    for request_id in range(1, 4):
        assert only(rig.arrive(request_id, prompt=400), Submit) if request_id < 3 else rig.arrive(3, prompt=400) == []
    refuse = only(rig.arrive(4, prompt=400, ttft_s=1.5), Refuse)
    assert (refuse.code, refuse.retry_after_s) == ("saturated", 1.2)
    assert "expected in 1.60 s, its target is 1.50 s" in refuse.message


def test_what_an_idle_deployment_could_not_do_in_time_either_is_served() -> None:
    rig = Rig(mixed(prefill_tokens_per_s=100.0))
    assert only(rig.arrive(prompt=400, ttft_s=0.5), Submit).request_id == 1


def test_what_is_late_anyway_is_refused_when_load_makes_it_later_by_the_factor() -> None:
    rig = Rig(mixed(kv_blocks=100_000, prefill_tokens_per_s=100.0), policy=Policy(late_factor=2.0))
    rig.arrive(1, prompt=400)
    assert rig.arrive(2, prompt=450, ttft_s=0.5) == []
    assert only(rig.arrive(3, prompt=400, ttft_s=0.5), Refuse).code == "saturated"


def test_without_refusal_by_targets_the_queue_takes_it() -> None:
    rig = Rig(mixed(kv_blocks=100_000, prefill_tokens_per_s=100.0), policy=Policy(refuse_late=False))
    rig.arrive(1, prompt=400)
    assert rig.arrive(2, prompt=400, ttft_s=0.5) == []


STEP = LinearStepTime(
    fixed_s=0.01, prefill_token_s=1e-3, prefill_pair_s=0.0, decode_sequence_s=0.01, decode_kv_token_s=0.0
)


def measured(rig: Rig, policy: Policy | None = None) -> None:
    """The same rig with a profile of its decode engine."""
    rig.core = RouterCore(policy, step_times={"decode": STEP})
    for name in rig.specs:
        rig.hello(name)


def test_a_batch_is_not_filled_beyond_what_keeps_a_newcomers_target() -> None:
    rig = Rig(prefill(), decode(max_batch=64))
    measured(rig)
    to_decoding(rig, 1, tpot_s=0.035)
    to_decoding(rig, 2, tpot_s=0.035)
    assert rig.arrive(3, tpot_s=0.035) == []
    assert only(rig.arrive(4, tpot_s=0.5), Submit).request_id == 4


def test_one_that_waits_for_its_turn_in_a_full_batch_is_not_overtaken() -> None:
    rig = Rig(prefill(), decode(max_batch=2))
    measured(rig)
    to_decoding(rig, 1, out=200, tpot_s=0.1)
    to_decoding(rig, 2, out=200, tpot_s=0.1)
    assert rig.arrive(3, out=10, tpot_s=0.1) == []
    assert rig.arrive(4, out=10) == []
    submitted = [c.request_id for c in rig.step("d0", tokens(1, finish="stop")) if isinstance(c, Submit)]
    assert submitted[0] == 3


def test_a_short_wait_for_a_place_that_the_target_allows_does_not_keep_a_prompt_back() -> None:
    rig = Rig(prefill(), decode(max_batch=2))
    measured(rig)
    to_decoding(rig, 1, out=200, tpot_s=0.1)
    to_decoding(rig, 2, out=6, tpot_s=0.1)
    assert only(rig.arrive(3, out=200, tpot_s=0.1), Submit).request_id == 3


def test_before_steps_are_known_no_more_is_begun_than_a_batch_takes() -> None:
    rig = Rig(prefill(max_batch=64), decode(max_batch=2))
    begun = [rig.arrive(request_id, prompt=10, tpot_s=0.1) != [] for request_id in (1, 2, 3)]
    assert begun == [True, True, False]


@pytest.mark.parametrize(
    ("writing", "waiting", "places", "found"),
    [
        ([5.0], [], 2, [5.0]),
        ([5.0, 1.0], [], 2, [1.0, 5.0]),
        ([5.0, 1.0], [2.0, 1.0], 2, [4.0, 5.0]),
        ([1.0, 2.0, 3.0], [], 2, [2.0, 3.0]),
        ([1.0, 2.0, 3.0], [4.0], 2, [3.0, 6.0]),
    ],
)
def test_places_come_free_when_answers_end_and_who_waits_takes_them_first(
    writing: list[float], waiting: list[float], places: int, found: list[float]
) -> None:
    rig = Rig(decode())
    instance = rig.core._books.cluster.instances["d0"]
    for number, left in enumerate([*writing, *waiting]):
        hold = Hold(instance="d0", request_id=number, attempt=1, side="decode", blocks=1, left_tokens=left)
        hold.writes = number < len(writing)
        instance.holds[hold.key] = hold
    assert places_s(instance, 1.0, places) == found


def test_a_target_that_even_an_idle_batch_misses_holds_nobody_up() -> None:
    rig = Rig(prefill(), decode(max_batch=64))
    measured(rig)
    to_decoding(rig, 1, tpot_s=0.001)
    assert only(rig.arrive(2, tpot_s=0.001), Submit).request_id == 2


@pytest.mark.parametrize(("slow", "avoided"), [(1.0, False), (3.0, True)])
def test_a_slowed_machine_is_seen_by_its_steps(slow: float, avoided: bool) -> None:
    requests = [SimRequest(at_s=0.5 * n, prompt_tokens=50, max_tokens=60, output_tokens=60) for n in range(80)]
    faults = Faults(slow=(Slow(instance="d0", from_s=0.0, to_s=1e9, factor=slow),))
    simulation = Simulation(
        core=RouterCore(),
        workers=[prefill(), decode("d0"), decode("d1")],
        model=LinearStepTime(
            fixed_s=0.02, prefill_token_s=1e-3, prefill_pair_s=0.0, decode_sequence_s=1e-3, decode_kv_token_s=0.0
        ),
        requests=requests,
        faults=faults,
    )
    simulation.run()
    views = {view["name"]: view for view in simulation.core.snapshot()["instances"]}
    ratio = views["d0"]["slowness"] / views["d1"]["slowness"]
    assert (ratio > 1.8) is avoided
    chosen = [o.timeline.attempts[-1].decode for o in simulation.outcomes[20:] if o.timeline]
    assert (chosen.count("d0") < 0.3 * len(chosen)) is avoided
