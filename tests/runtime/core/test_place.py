"""Where requests go, and who waits for whom when they don't fit."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtpd_testing.router_rig import (
    Rig,
    begun,
    decode,
    done,
    drained,
    mixed,
    offered,
    only,
    prefill,
    sealed,
    to_decoding,
    tokens,
)

from trtpd.errors import InputError
from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core import place
from trtpd.runtime.core.cluster import Cluster
from trtpd.runtime.core.events import Arrived, InstanceEvent, LinkDown, Load, Pull, Role, Step, Submit, Tokens
from trtpd.runtime.core.instance import Hold, Side
from trtpd.runtime.core.links import Links
from trtpd.runtime.core.place import Rules
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.requests import Request
from trtpd.runtime.core.score import Weights, Work


def test_load_counts_when_it_is_sent_and_not_when_it_is_reported() -> None:
    rig = Rig(*(prefill(f"p{number}") for number in range(4)), decode())
    used = [only(rig.arrive(request_id), Submit).instance for request_id in range(1, 5)]
    assert sorted(used) == ["p0", "p1", "p2", "p3"]


def test_a_short_queue_on_a_slow_instance_loses_to_a_longer_one_on_a_fast_one() -> None:
    rig = Rig(prefill("p0", prefill_tokens_per_s=100.0), prefill("p1", prefill_tokens_per_s=1000.0), decode())
    assert [only(rig.arrive(n, prompt=50), Submit).instance for n in range(1, 4)] == ["p1", "p1", "p1"]


def test_decode_goes_where_less_kv_is_promised() -> None:
    rig = Rig(prefill(), decode("d0", kv_blocks=64), decode("d1", kv_blocks=640))
    rig.arrive()
    assert only(rig.step("p0", offered()), Pull).instance == "d1"


def test_decode_is_not_filled_beyond_the_peak_of_what_was_placed_there() -> None:
    rig = Rig(prefill(), decode(kv_blocks=10, tokens_per_block=16))
    to_decoding(rig, 1, prompt=16, out=80)
    assert rig.arrive(2, prompt=16, out=80) == []
    assert only(rig.arrive(3, prompt=16, out=48), Submit).request_id == 3


def test_kv_used_by_others_is_not_promised() -> None:
    rig = Rig(mixed(kv_blocks=10, tokens_per_block=16))
    rig.step("m0", free=4)
    assert rig.arrive(1, prompt=64, out=16) == []
    assert only(rig.step("m0", free=5), Submit).request_id == 1


def test_builds_are_never_paired_across() -> None:
    rig = Rig(prefill(fingerprint="a"), decode(fingerprint="b"))
    submit = only(rig.arrive(), Submit)
    assert submit.kind == "context_and_generation"


def test_an_engine_that_moves_its_kv_itself_is_paired_with_its_like_only() -> None:
    rig = Rig(prefill(transports=("opaque",)), decode("d0", transports=("shm",)))
    assert only(rig.arrive(1), Submit).kind == "context_and_generation"
    rig = Rig(prefill(transports=("opaque",)), decode("d0", transports=("shm",)), decode("d1", transports=("opaque",)))
    rig.arrive(1)
    assert only(rig.step("p0", offered()), Pull).instance == "d1"


def test_a_pair_and_a_mixed_instance_compete_by_score() -> None:
    rig = Rig(prefill(prefill_tokens_per_s=100.0), decode(), mixed(prefill_tokens_per_s=1000.0))
    assert only(rig.arrive(1), Submit).instance == "m0"
    rig = Rig(prefill(prefill_tokens_per_s=1000.0), decode(), mixed(prefill_tokens_per_s=100.0))
    assert only(rig.arrive(1), Submit).instance == "p0"


def test_ties_are_drawn_from_the_seed() -> None:
    def draw(seed: int) -> list[str]:
        rig = Rig(*(mixed(f"m{number}") for number in range(5)), seed=seed)
        return [only(rig.arrive(n), Submit).instance for n in range(1, 6)]

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(5)}) > 1


def test_requests_are_served_in_the_order_they_came() -> None:
    rig = Rig(mixed(kv_blocks=4))
    for request_id in (1, 2, 3):
        rig.arrive(request_id)
    assert only(rig.step("m0", tokens(0, 10, finish="length")), Submit).request_id == 2


def test_a_small_request_may_overtake_a_large_one_but_not_for_ever() -> None:
    rig = Rig(mixed(kv_blocks=10, tokens_per_block=16), policy=Policy(overtake_s=1.0))
    rig.arrive(1, prompt=64, out=16)
    rig.arrive(2, prompt=120, out=30)
    assert only(rig.arrive(3, prompt=8, out=8), Submit).request_id == 3
    rig.now_s += 1.5
    assert rig.arrive(4, prompt=8, out=8) == []
    said = rig.step("m0", tokens(0, 8, request_id=3, finish="length"))
    assert not any(isinstance(command, Submit) for command in said)
    said = rig.step("m0", tokens(0, 16, request_id=1, finish="length"))
    assert only(said, Submit).request_id == 2


def test_an_offer_that_waits_takes_room_before_any_new_request() -> None:
    rig = Rig(prefill(), decode("d0", kv_blocks=4), decode("d1", kv_blocks=4))
    rig.arrive(1)
    first = only(rig.step("p0", offered(1)), Pull).instance
    other = {"d0": "d1", "d1": "d0"}[first]
    rig.arrive(2)
    assert only(rig.step("p0", offered(2)), Pull).instance == other
    rig.arrive(3)
    assert rig.step("p0", sealed(1)) != []
    assert rig.lost(first) == []
    rig.step("p0", sealed(2))
    rig.step(other, begun(2), done(2))
    pull = rig.step(other, tokens(1, 9, request_id=2, finish="length"))[-1]
    assert isinstance(pull, Pull)
    assert (pull.request_id, pull.instance) == (1, other)


@pytest.mark.parametrize(
    "name", ["ttft_s", "tpot_s", "kv_s", "batch_s", "transfer_s", "disturb_s", "fallback_s", "prefix_s"]
)
def test_a_negative_weight_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=name):
        Weights(**{name: -0.1})


@pytest.mark.parametrize(("name", "value"), [("queue_limit", 0), ("retry_budget", -1), ("quarantine_s", 0.0)])
def test_a_policy_that_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        Policy(**{name: value})


def test_a_node_that_looks_idle_because_its_sessions_are_long_is_not_taken_for_idle() -> None:
    rig = Rig(prefill(), decode("d0", max_batch=64), decode("d1", max_batch=64))
    for request_id in range(1, 200):
        to_decoding_somewhere(rig, request_id, out=4)
        rig.step(*ended(rig, request_id))
    rig.tell(LinkDown(source="p0", sink="d1"))
    to_decoding_somewhere(rig, 301, out=900)
    rig.tell(LinkDown(source="p0", sink="d0"))
    rig.now_s += 5.1
    assert only(rig.arrive(302, out=4), Submit).instance == "p0"
    timeline = rig.core.timeline(302)
    assert timeline is not None
    assert timeline.attempts[0].decode == "d1"


def to_decoding_somewhere(rig: Rig, request_id: int, *, out: int) -> None:
    rig.arrive(request_id, out=out)
    rig.step("p0", offered(request_id), sealed(request_id))
    timeline = rig.core.timeline(request_id)
    assert timeline is not None
    rig.step(str(timeline.attempts[0].decode), begun(request_id), done(request_id))
    rig.step("p0", drained(request_id))


def ended(rig: Rig, request_id: int) -> tuple[str, Tokens]:
    timeline = rig.core.timeline(request_id)
    assert timeline is not None
    return str(timeline.attempts[0].decode), tokens(1, 3, request_id=request_id, finish="length")


def test_a_prompt_goes_where_its_beginning_is_cached_but_not_behind_a_longer_queue() -> None:
    rig = Rig(prefill("p0"), prefill("p1"), decode(kv_blocks=10_000))
    hashes = tuple(range(1, 17))
    first = only(rig.arrive(1, prompt=520, block_hashes=hashes), Submit).instance
    rig.tell(cached(rig, first, sealed(1, finish="stop"), drained(1)))
    assert only(rig.arrive(2, prompt=530, block_hashes=hashes), Submit).instance == first
    other = {"p0": "p1", "p1": "p0"}[first]
    assert only(rig.arrive(3, prompt=540, block_hashes=hashes), Submit).instance == other


def cached(rig: Rig, name: str, *events: InstanceEvent) -> Step:
    load = Load(kv_blocks_free=rig.specs[name].kv_blocks, cached_blocks=16)
    return Step(instance=name, generation=rig.generations[name], events=events, load=load)


def test_a_short_prompt_stays_on_decode_where_moving_costs_more_than_it_saves() -> None:
    local = Policy(local_tokens=64, handoff_s=0.01)
    assert only(Rig(prefill(), decode(), policy=local).arrive(prompt=20), Submit).instance == "d0"
    assert only(Rig(prefill(), decode(), policy=local).arrive(prompt=100), Submit).instance == "p0"
    assert only(Rig(prefill(), decode()).arrive(prompt=20), Submit).instance == "p0"


def test_a_place_on_the_same_host_is_preferred_for_a_hand_off() -> None:
    rig = Rig(prefill(host="a"), decode("d0", host="b"), decode("d1", host="a"))
    rig.arrive(prompt=200)
    timeline = rig.core.timeline(1)
    assert timeline is not None
    assert timeline.attempts[0].decode == "d1"


instances = st.lists(
    st.builds(
        WorkerSpec,
        name=st.uuids().map(str),
        role=st.sampled_from(["prefill", "decode", "mixed"]),
        kv_blocks=st.integers(1, 40),
        max_seq_tokens=st.integers(16, 400),
        max_batch=st.integers(1, 4),
        tokens_per_block=st.sampled_from([8, 16]),
        fingerprint=st.sampled_from(["a", "b"]),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(specs=instances, data=st.data(), prompt=st.integers(1, 200), out=st.integers(1, 100))
def test_every_choice_is_feasible(specs: list[WorkerSpec], data: st.DataObject, prompt: int, out: int) -> None:
    cluster = Cluster()
    for number, spec in enumerate(specs):
        instance = cluster.register(spec.hello("1"))
        blocks = data.draw(st.integers(0, spec.kv_blocks))
        cluster.reserve(instance, Hold(instance=spec.name, request_id=number, attempt=1, side="local", blocks=blocks))
        cluster.report(instance, Load(kv_blocks_free=data.draw(st.integers(0, spec.kv_blocks))))
        if data.draw(st.booleans()):
            cluster.drain(instance)
    request = Request(Arrived(request_id=99, prompt_tokens=prompt, max_tokens=out, deadline_s=9.0), "m", 0.0)
    work = Work(prompt_tokens=prompt, total_tokens=prompt + out, left_tokens=out / 2, tpot_s=None, hits={})
    rules = Rules(weights=Weights(), links=Links(0.003))
    choice = place.choose(request, cluster, work=work, rules=rules)
    if not isinstance(choice, place.Choice):
        return
    source, sink = choice.prefill, choice.decode
    whole = source if sink is None else sink
    assert whole.committed_blocks + whole.blocks_for(prompt + out) <= whole.hello.kv_blocks
    assert prompt + out <= whole.hello.max_seq_tokens
    assert source.has_room(source.blocks_for(prompt))
    assert source.usable(0.0)
    assert whole.usable(0.0)
    if sink is not None:
        assert (source.hello.role, sink.hello.role) == ("prefill", "decode")
        assert source.group_key == sink.group_key


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 1 << 30), prompt=st.integers(1, 300), out=st.integers(1, 200))
def test_whom_a_request_stays_away_from_changes_nothing_if_it_is_not_there(seed: int, prompt: int, out: int) -> None:
    """The short way (the best of all fit) and the long one (the best of those that fit) find the same."""
    rng, cluster = random.Random(seed), Cluster()
    for number in range(60):
        role: Role = "prefill" if number % 2 else "decode"
        spec = WorkerSpec(
            name=str(number), role=role, kv_blocks=20, tokens_per_block=16, max_batch=2, host=f"h{number % 7}"
        )
        instance = cluster.register(spec.hello("1"))
        for request_id in range(rng.randint(0, 4)):
            side: Side = "prefill" if role == "prefill" else "decode"
            hold = Hold(instance=spec.name, request_id=request_id, attempt=1, side=side, blocks=rng.randint(0, 6))
            hold.left_tokens, hold.pending_tokens = rng.uniform(0.0, 90.0), rng.choice((0, 400))
            cluster.reserve(instance, hold)
    work = Work(prompt_tokens=prompt, total_tokens=prompt + out, left_tokens=out / 2, tpot_s=0.05, hits={})
    request = Request(Arrived(request_id=99, prompt_tokens=prompt, max_tokens=out, deadline_s=9.0), "m", 0.0)
    rules = Rules(weights=Weights(), links=Links(0.003))
    short = place.choose(request, cluster, work=work, rules=rules)
    request.avoid["nobody"] = 9.0
    assert place.choose(request, cluster, work=work, rules=rules) == short
