"""How far apart two instances are, and what that does to a placement."""

from __future__ import annotations

from typing import Any

import pytest
from trtpd_testing.router_rig import Rig, decode, offered, only, prefill

from trtpd.runtime.core.distance import LINK_BYTES_PER_S, link_between, transfer_s
from trtpd.runtime.core.events import Hello, Pull
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.score import Weights

LINKS = (("g0", "self"), ("g1", "nvlink"), ("g2", "system"), ("g3", "warp"))


def hello(*gpus: str, host: str = "a", **more: Any) -> Hello:
    return prefill(gpus=gpus, host=host, bytes_per_token=1000, **more).hello("1")


@pytest.mark.parametrize(
    ("sink", "link"),
    [
        (hello("g0"), "self"),
        (hello("g1"), "nvlink"),
        (hello("g1", "g2"), "system"),
        (hello("g1", host="b"), "network"),
        (hello(), None),
        (hello("g3"), None),
        (hello("g1", "not listed"), None),
    ],
)
def test_the_worst_link_between_two_instances_counts(sink: Hello, link: str | None) -> None:
    assert link_between(hello("g0", gpu_links=LINKS), sink) == link


def test_what_is_not_known_costs_nothing() -> None:
    assert transfer_s(hello(), hello("g1"), 1000) == 0.0
    assert transfer_s(hello("g0"), hello("g1"), 1000) == 0.0


def test_ranks_send_side_by_side() -> None:
    one = transfer_s(hello("g0", gpu_links=LINKS), hello("g1"), 1000)
    assert one == 1000 * 1000 / LINK_BYTES_PER_S["nvlink"]
    two = hello("g0", "g4", gpu_links=(("g1", "nvlink"), ("g5", "nvlink")))
    assert transfer_s(two, hello("g1", "g5"), 1000) == one / 2


@pytest.mark.parametrize(("near", "far"), [("d0", "d1"), ("d1", "d0")])
def test_among_equals_decode_is_the_one_nearer_to_prefill(near: str, far: str) -> None:
    source = prefill(gpus=("g0",), gpu_links=(("g1", "nvlink"), ("g2", "system")), bytes_per_token=10**6)
    rig = Rig(source, decode(near, gpus=("g1",)), decode(far, gpus=("g2",)))
    rig.arrive()
    assert only(rig.step("p0", offered()), Pull).instance == near


def test_a_policy_may_ignore_distance() -> None:
    source = prefill(gpus=("g0",), gpu_links=(("g1", "nvlink"), ("g2", "system")), bytes_per_token=10**9)
    sinks = decode("d0", gpus=("g1",), kv_blocks=64), decode("d1", gpus=("g2",), kv_blocks=640)
    rig = Rig(source, *sinks, policy=Policy(weights=Weights(transfer_s=0.0)))
    rig.arrive()
    assert only(rig.step("p0", offered()), Pull).instance == "d1"
