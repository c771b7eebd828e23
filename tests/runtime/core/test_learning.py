"""What the router learns: how long answers get, what is cached where, what is offered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core.cluster import Cluster
from trtpd.runtime.core.cost import Costs, LinearStepTime
from trtpd.runtime.core.lengths import Lengths
from trtpd.runtime.core.prefix import Prefixes
from trtpd.runtime.core.ranks import CAUTION
from trtpd.runtime.core.rebalance import Pools, Rebalancer
from trtpd.runtime.core.watch import decode_rate, mean_decode_rate

POOLS = Pools(prefill=3, decode=3, prefill_tokens_per_s=1000.0, decode_tokens_per_s=1000.0)
FOUR = replace(POOLS, prefill=2, decode=4)


@given(seen=st.lists(st.integers(1, 5000), max_size=50), done=st.integers(0, 3000), most=st.integers(1, 4000))
def test_what_is_expected_of_an_answer_lies_within_what_it_may_have(seen: list[int], done: int, most: int) -> None:
    lengths = Lengths()
    for tokens in seen:
        lengths.note(tokens)
    left = lengths.left(done, most)
    assert (1.0 <= left <= most - done) if most > done else left == 0.0


def test_answers_seen_count_more_than_what_is_allowed() -> None:
    lengths = Lengths()
    for _ in range(200):
        lengths.note(20)
    assert lengths.left(0, 4000) < 80
    assert lengths.left(100, 4000) > 1000, "none was seen to get so long, so nothing is known"


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(1, 30), max_size=8), st.sampled_from(["sent", "gone"])),
        max_size=40,
    )
)
def test_the_record_of_prompt_blocks_is_bounded_and_whole(steps: list[tuple[str, list[int], str]]) -> None:
    prefixes = Prefixes()
    for name, blocks, what in steps:
        if what == "sent":
            prefixes.sent(name, blocks, most_blocks=10)
        else:
            prefixes.evicted(name, blocks)
        assert prefixes.blocks_of(name) <= 10
        assert prefixes.check_integrity()
    prefixes.forget("a")
    assert prefixes.check_integrity()


def test_the_longest_beginning_is_found_and_forgotten_with_its_instance() -> None:
    prefixes = Prefixes()
    prefixes.sent("a", range(1, 9), most_blocks=100)
    prefixes.sent("b", range(1, 5), most_blocks=100)
    assert prefixes.hits((1, 2, 3, 4, 5, 6, 99)) == {"a": 6, "b": 3}
    prefixes.forget("a")
    assert prefixes.hits((1, 2, 3, 4, 5, 6)) == {"b": 4}


def offered(rebalancer: Rebalancer, *, prompt: int, output: float, seconds: float, start_s: float = 0.0) -> list[str]:
    """So many tokens of each kind a second; returns what was proposed."""
    found = []
    for tenth in range(int(seconds * 10)):
        now_s = start_s + tenth / 10
        rebalancer.offered.note(now_s, prompt // 10, output / 10, in_time=True)
        proposal = rebalancer.propose(now_s, POOLS, backlog_tokens=0)
        if proposal is not None:
            found.append(f"{proposal.kind} {proposal.role}")
    return found


@pytest.mark.parametrize(
    ("prompt", "output", "proposed"),
    [
        (3500, 500.0, ["switch prefill"]),
        (500, 3500.0, ["switch decode"]),
        (1000, 1000.0, []),
        (2500, 2500.0, []),
        (5000, 5000.0, ["add"]),
    ],
)
def test_a_role_is_switched_for_an_imbalance_that_lasts_and_more_is_asked_for_when_both_are_short(
    prompt: int, output: float, proposed: list[str]
) -> None:
    found = offered(Rebalancer(after_s=20.0, gain=1.15), prompt=prompt, output=output, seconds=59.0)
    assert [said[: len(wanted)] for said, wanted in zip(found, proposed, strict=False)] == proposed
    assert bool(found) is bool(proposed)


def test_a_load_that_swings_faster_than_a_switch_pays_proposes_nothing() -> None:
    rebalancer, found = Rebalancer(after_s=20.0, gain=1.15), []
    for turn in range(10):
        heavy = turn % 2 == 0
        found += offered(
            rebalancer,
            prompt=3000 if heavy else 500,
            output=500.0 if heavy else 3000.0,
            seconds=10.0,
            start_s=10.0 * turn,
        )
    assert found == []


def test_a_switch_that_was_made_brings_the_next_one_sooner_and_one_that_was_not_does_not() -> None:
    def second_after(then: Pools) -> float:
        rebalancer, said_s, pools = Rebalancer(after_s=20.0, gain=1.15), [], FOUR
        for tenth in range(1000):
            rebalancer.offered.note(tenth / 10, 700, 10.0, in_time=True)
            if rebalancer.propose(tenth / 10, pools, backlog_tokens=0) is not None:
                said_s.append(tenth / 10)
                pools = then
            if len(said_s) == 2:
                break
        return said_s[1] - said_s[0]

    assert second_after(FOUR) == pytest.approx(20.0)
    assert second_after(replace(FOUR, prefill=3, decode=3)) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("tpot_s", "batch"),
    [(0.25 * CAUTION, 24.0), (0.095 * CAUTION, 11.0), (0.045 * CAUTION, 1.0), (0.001, 1.0), (None, 10.0)],
)
def test_what_decode_can_do_is_reckoned_by_the_targets_that_requests_have(tpot_s: float | None, batch: float) -> None:
    """Steps of 45 ms for one sequence and 5 ms for each further one."""
    model = LinearStepTime(
        fixed_s=0.04, prefill_token_s=0.0, prefill_pair_s=0.0, decode_sequence_s=0.005, decode_kv_token_s=0.0
    )
    spec = WorkerSpec(name="d", role="decode", kv_blocks=1000, max_batch=24, prefill_tokens_per_s=1000.0)
    instance = Cluster(Costs({"decode": model})).register(spec.hello("1"))
    assert decode_rate(instance, tpot_s) == pytest.approx(batch / (0.04 + 0.005 * batch))


def test_what_decode_can_do_is_the_mean_of_those_that_serve() -> None:
    """One that was slow and is lost says nothing of the others."""
    model = LinearStepTime(
        fixed_s=0.04, prefill_token_s=0.0, prefill_pair_s=0.0, decode_sequence_s=0.005, decode_kv_token_s=0.0
    )
    cluster = Cluster(Costs({"decode": model}))
    slow, good = (
        cluster.register(WorkerSpec(name=name, role="decode", max_batch=24).hello("1")) for name in ("d0", "d1")
    )
    slow.factor = 4.0
    slow.table.refresh(slow, 0.0)
    whole = decode_rate(good, 0.1)
    assert mean_decode_rate(good.table, 0.1) == pytest.approx((whole + decode_rate(slow, 0.1)) / 2)
    cluster.lose(slow)
    cluster.settle()
    assert mean_decode_rate(good.table, 0.1) == pytest.approx(whole)
