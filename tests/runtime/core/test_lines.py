"""Short prompts and long ones wait in lines of their own where the engine computes shorter ones first."""

from __future__ import annotations

import random

import pytest
from trtpd_testing.router_rig import Rig, chunk, decode, offered, only, prefill

from trtpd.perf.scenario import SimRequest
from trtpd.perf.simulate import Simulation
from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core.cost import LinearStepTime
from trtpd.runtime.core.degrade import Rung
from trtpd.runtime.core.events import Capabilities, Submit
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.router import RouterCore
from trtpd.runtime.engine.batching import OVERTAKEN

IN_ORDER = Capabilities(shorter_first=False)
MODEL = LinearStepTime(
    fixed_s=0.0, prefill_token_s=4e-3, prefill_pair_s=0.0, decode_sequence_s=0.02, decode_kv_token_s=0.0
)


def test_a_short_prompt_is_given_to_an_instance_that_computes_a_long_one_and_a_second_long_one_is_not() -> None:
    rig = Rig(prefill(), decode())
    assert only(rig.arrive(1, prompt=900), Submit).request_id == 1
    assert rig.arrive(2, prompt=900) == []
    assert only(rig.arrive(3, prompt=100), Submit).request_id == 3
    assert "about 0.1 s" in rig.core.timeline(3).attempts[0].why


def test_long_prompts_that_wait_keep_no_short_one_back_however_many_they_are_and_however_long_they_wait() -> None:
    rig = Rig(prefill(), decode())
    for request_id in range(1, 81):
        rig.arrive(request_id, prompt=900)
    rig.now_s += 20.0
    assert only(rig.arrive(99, prompt=100), Submit).request_id == 99


def test_long_prompts_that_leave_the_way_to_shorter_ones_do_so_however_many_they_are() -> None:
    rig = Rig(prefill(), decode(), policy=Policy(refuse_late=False, queue_s=1e5, dwell_down_s=1e5, dwell_up_s=1e5))
    rig.arrive(1, prompt=900)
    rig.core._books.ladder.rung = Rung.LONG_WAIT
    for request_id in range(2, 22):
        assert rig.arrive(request_id, prompt=1100) == []
    assert only(rig.arrive(99, prompt=100), Submit).request_id == 99


def test_a_long_prompt_goes_on_as_soon_as_the_long_one_before_it_is_nearly_computed_whatever_is_short_there() -> None:
    rig = Rig(prefill(), decode())
    rig.arrive(1, prompt=900)
    rig.arrive(2, prompt=900)
    for request_id in range(3, 8):
        rig.arrive(request_id, prompt=200)
    said = rig.step("p0", offered(1), chunk(600, 1))
    assert [command.request_id for command in said if isinstance(command, Submit)] == [2]


def test_an_engine_that_computes_in_order_is_given_no_short_prompt_behind_a_long_one() -> None:
    rig = Rig(prefill(capabilities=IN_ORDER), decode())
    rig.arrive(1, prompt=900)
    assert rig.arrive(2, prompt=100) == []


def test_a_short_prompt_is_expected_as_soon_as_the_short_ones_before_it_allow() -> None:
    """Nine long prompts wait, 0.9 s each: a short one that must be there within 1 s is taken on, a long one within 5 s
    is not; and no short one where engines compute in order."""

    def refused(capabilities: Capabilities, prompt: int, ttft_s: float) -> bool:
        rig = Rig(prefill(capabilities=capabilities), decode())
        for request_id in range(1, 10):
            rig.arrive(request_id, prompt=900)
        return bool(rig.arrive(10, prompt=prompt, ttft_s=ttft_s)) and rig.core.timeline(10) is None

    assert not refused(Capabilities(), 100, 1.0)
    assert refused(Capabilities(), 900, 5.0)
    assert refused(IN_ORDER, 100, 1.0)


def firsts_s(capabilities: Capabilities) -> dict[int, list[float]]:
    """Seconds to the first token by length of the prompt, of a prefill instance that is busy nine tenths of the time:
    one prompt in five has 700 tokens (2.8 s), the others 100."""
    rng, at_s, requests = random.Random(3), 0.0, []
    for _ in range(200):
        at_s += rng.expovariate(1.02)
        prompt = 700 if rng.random() < 0.2 else 100
        requests.append(SimRequest(at_s=at_s, prompt_tokens=prompt, max_tokens=20, output_tokens=20, timeout_s=1e5))
    workers = [
        WorkerSpec(
            name=role,
            role=role,
            kv_blocks=2048,
            max_step_tokens=128,
            chunk_tokens=128,
            prefill_tokens_per_s=250.0,
            capabilities=capabilities,
        )
        for role in ("prefill", "decode")
    ]
    calm = Policy(patience_s=1e6, queue_s=1e5)  # nothing is prefilled on decode, and nothing refused
    simulation = Simulation(core=RouterCore(calm), workers=workers, model=MODEL, requests=requests)
    simulation.run()
    found: dict[int, list[float]] = {100: [], 700: []}
    for request, outcome in zip(requests, simulation.outcomes, strict=True):
        assert outcome.ttft_s is not None
        found[request.prompt_tokens].append(outcome.ttft_s)
    return {length: sorted(seconds) for length, seconds in found.items()}


def test_shorter_first_spares_short_prompts_most_of_their_wait_and_costs_long_ones_no_more_than_they_may() -> None:
    in_order, shorter = firsts_s(IN_ORDER), firsts_s(Capabilities())
    middle = {length: len(seconds) // 2 for length, seconds in shorter.items()}
    assert shorter[100][middle[100]] < 0.35 * in_order[100][middle[100]]
    assert shorter[700][middle[700]] < in_order[700][middle[700]] + OVERTAKEN * 2.8


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_of_short_prompts_starves_no_long_one(seed: int) -> None:
    """Short prompts alone would fill the instance: the long one still ends within what it may be overtaken by."""
    rng, at_s = random.Random(seed), 0.0
    requests = [SimRequest(at_s=1.0, prompt_tokens=1000, max_tokens=2, output_tokens=2, timeout_s=300.0)]
    while at_s < 60.0:
        at_s += rng.expovariate(2.4)
        requests.append(SimRequest(at_s=at_s, prompt_tokens=100, max_tokens=2, output_tokens=2, timeout_s=300.0))
    workers = [
        WorkerSpec(
            name=role, role=role, kv_blocks=2048, max_step_tokens=128, chunk_tokens=128, prefill_tokens_per_s=250
        )
        for role in ("prefill", "decode")
    ]
    calm = Policy(patience_s=1e6, queue_s=1e5)
    simulation = Simulation(core=RouterCore(calm), workers=workers, model=MODEL, requests=requests)
    simulation.run()
    ttft_s = simulation.outcomes[0].ttft_s
    assert ttft_s is not None
    assert ttft_s < (OVERTAKEN + 1) * 1000 * 4e-3 + 2.0
