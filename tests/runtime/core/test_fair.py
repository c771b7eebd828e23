"""Shares of tenants, classes, and what a full queue does."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from trtpd_testing.router_rig import Rig, mixed, only, tokens

from trtpd.runtime.core.events import Arrived, Finish, Refuse, Submit
from trtpd.runtime.core.fair import Backlog
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.requests import Request


def waiting(request_id: int, tenant: str = "", priority: int = 0, at_s: float = 0.0, prompt: int = 100) -> Request:
    arrived = Arrived(
        request_id=request_id, prompt_tokens=prompt, max_tokens=10, deadline_s=99.0, tenant=tenant, priority=priority
    )
    return Request(arrived, "m", at_s)


def served(backlog: Backlog, count: int, *, starved_before_s: float = -1.0) -> list[Request]:
    order = []
    for _ in range(count):
        request = backlog.queues["m"].next(1, starved_before_s=starved_before_s)[0]
        backlog.remove(request, served=True)
        order.append(request)
    return order


def test_a_tenant_that_sends_much_does_not_delay_one_that_sends_little() -> None:
    backlog = Backlog({})
    for number in range(50):
        backlog.add(waiting(number, "loud"), 100.0)
    served(backlog, 10)
    backlog.add(waiting(99, "quiet"), 100.0)
    assert 99 in [request.id for request in served(backlog, 2)]


def test_a_tenant_that_was_silent_has_saved_nothing_up() -> None:
    backlog = Backlog({})
    for number in range(40):
        backlog.add(waiting(number, "steady"), 100.0)
    served(backlog, 20)
    for number in range(100, 120):
        backlog.add(waiting(number, "late"), 100.0)
    shares = Counter(request.arrived.tenant for request in served(backlog, 20))
    assert abs(shares["steady"] - shares["late"]) <= 1


@settings(deadline=None, max_examples=25)
@given(
    weights=st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2),
    costs=st.lists(st.integers(1, 50), min_size=1, max_size=5),
)
def test_backlogged_tenants_share_by_weight_and_none_starves(weights: dict[str, float], costs: list[int]) -> None:
    backlog = Backlog(weights)
    for number in range(100):
        for place, tenant in enumerate(sorted(weights)):
            backlog.add(waiting(3 * number + place, tenant), float(costs[number % len(costs)]))
    given_: Counter[str] = Counter()
    for request in served(backlog, 90):
        given_[request.arrived.tenant] += 1
    normal = {tenant: given_[tenant] / weights[tenant] for tenant in weights}
    # A share is off by at most the one request each that may be ahead, at the smallest weight.
    slack = 2.0 * max(costs) / min(costs) / min(weights.values()) + 2.0
    assert max(normal.values()) - min(normal.values()) <= slack
    assert all(given_[tenant] for tenant in weights)


def test_a_higher_class_goes_first_but_not_before_one_that_starves() -> None:
    backlog = Backlog({})
    backlog.add(waiting(1, priority=-1, at_s=0.0), 1.0)
    backlog.add(waiting(2, priority=1, at_s=8.0), 1.0)
    assert [r.id for r in backlog.queues["m"].next(2, starved_before_s=-5.0)] == [2, 1]
    assert [r.id for r in backlog.queues["m"].next(2, starved_before_s=3.0)] == [1, 2]


def full(*, queue_limit: int = 4) -> Rig:
    """One instance with one request on it, the queue full of one tenant's."""
    rig = Rig(mixed(kv_blocks=8), policy=Policy(queue_limit=queue_limit, refuse_late=False))
    rig.arrive(1, prompt=200)
    for number in range(2, 2 + queue_limit):
        rig.arrive(number, prompt=200, tenant="loud")
    return rig


def test_a_full_queue_gives_a_place_to_a_tenant_that_has_less_than_its_share() -> None:
    rig = full()
    said = rig.arrive(10, prompt=200, tenant="quiet")
    finish = only(said, Finish)
    assert (finish.request_id, finish.state, finish.reason) == (5, "refused", "saturated")
    assert finish.retry_after_s is not None
    assert only(rig.arrive(11, prompt=200, tenant="loud"), Refuse).code == "saturated"


def test_a_full_queue_gives_a_place_to_a_higher_class() -> None:
    rig = full()
    assert only(rig.arrive(10, prompt=200, tenant="loud", priority=1), Finish).request_id == 5
    said = rig.step("m0", tokens(0, 10, finish="length"))
    assert only(said, Submit).request_id == 10


def test_what_finds_no_place_in_time_is_told_so() -> None:
    rig = Rig(mixed(kv_blocks=8), policy=Policy(queue_s=5.0, refuse_late=False))
    rig.arrive(1, prompt=200)
    rig.arrive(2, prompt=200)
    rig.now_s += 5.0
    finish = only(rig.arrive(3, prompt=200), Finish)
    assert (finish.request_id, finish.state) == (2, "refused")
    assert "no place within 5 s" in finish.message
