"""Placement finds what a look at every instance and every pair would find, whatever state the instances are in."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtpd_testing.plain_place import Plain

from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core import place
from trtpd.runtime.core.cluster import Cluster
from trtpd.runtime.core.cost import Costs, LinearStepTime
from trtpd.runtime.core.degrade import Rung
from trtpd.runtime.core.events import Arrived, Capabilities, Load
from trtpd.runtime.core.instance import Hold, Instance, Side
from trtpd.runtime.core.links import Links
from trtpd.runtime.core.requests import Request
from trtpd.runtime.core.score import Weights, Work

MODEL = LinearStepTime(
    fixed_s=0.004, prefill_token_s=2e-4, prefill_pair_s=1e-8, decode_sequence_s=1e-3, decode_kv_token_s=1e-7
)


def spec_of(
    rng: random.Random, number: int, roles: list[str], hosts: int, *, gpus: bool, shorter_first: bool
) -> WorkerSpec:
    more: dict[str, Any] = {"gpus": (f"g{number}",)} if gpus else {}
    return WorkerSpec(
        name=str(number),
        role=rng.choice(roles),  # type: ignore[arg-type]
        kv_blocks=rng.choice((4, 20, 60)),
        tokens_per_block=16,
        max_batch=rng.randint(1, 6),
        host=f"h{rng.randrange(hosts)}",
        fingerprint=rng.choice("aaab"),
        prefill_tokens_per_s=rng.choice((500.0, 1000.0)),
        capabilities=Capabilities(shorter_first=shorter_first),
        bytes_per_token=rng.choice((1000, 2_000_000)),
        **more,
    )


def fill(rng: random.Random, cluster: Cluster, instance: Instance, most_holds: int) -> None:
    """What runs there, some of it moving, in an instance that may be slow or on its way out."""
    for request_id in range(rng.randint(0, most_holds)):
        side: Side = {"prefill": "prefill", "decode": "decode", "mixed": "local"}[instance.hello.role]  # type: ignore[assignment]
        hold = Hold(instance=instance.name, request_id=request_id, attempt=1, side=side, blocks=rng.randint(0, 4))
        hold.left_tokens, hold.context_tokens = rng.uniform(0.0, 90.0), rng.randint(1, 60)
        hold.pending_tokens = 0 if side == "decode" else rng.choice((0, 0, 100, 700))
        hold.short = hold.pending_tokens <= 100
        cluster.reserve(instance, hold)
        cluster.moving(hold, moves=rng.random() < 0.3)
    instance.factor = rng.choice((1.0, 1.0, 1.0, 3.0))
    blocks_free = rng.randint(instance.hello.kv_blocks // 2, instance.hello.kv_blocks)
    cluster.report(instance, Load(kv_blocks_free=blocks_free, step_s=rng.choice((0.0, 0.2))))
    if rng.random() < 0.1:
        cluster.drain(instance)


def state(rng: random.Random, count: int, *, gpus: bool) -> Cluster:
    cluster = Cluster(Costs({"prefill": MODEL, "decode": MODEL} if rng.random() < 0.5 else None), rng=rng)
    roles = rng.choice((["prefill", "decode"], ["prefill", "decode", "mixed"], ["decode", "mixed"]))
    shorter_first = rng.random() < 0.7
    hosts, most_holds = rng.choice((1, 3, 40)), rng.choice((0, 1, 5))
    for number in range(count):
        spec = spec_of(rng, number, roles, hosts, gpus=gpus, shorter_first=shorter_first)
        fill(rng, cluster, cluster.register(spec.hello("1")), most_holds)
    for _ in range(rng.choice((0, 0, 5, 200))):
        cluster.links_down[str(rng.randrange(count)), str(rng.randrange(count))] = rng.choice((0.0, 9.0))
    return cluster


def question(rng: random.Random, count: int) -> tuple[Request, Work, place.Rules]:
    prompt, out = rng.choice((5, 40, 200, 600)), rng.randint(1, 120)
    request = Request(Arrived(request_id=99, prompt_tokens=prompt, max_tokens=out, deadline_s=9.0), "m", 0.0)
    request.avoid = {str(rng.randrange(count)): rng.choice((-1.0, 9.0)) for _ in range(rng.choice((0, 0, 3)))}
    request.transfer_failures = rng.choice((0, 0, 0, 2))
    hits = {str(rng.randrange(count)): rng.randrange(prompt) for _ in range(rng.choice((0, 2)))}
    tpot_s = rng.choice((None, 0.001, 0.006, 0.05))
    total, short = prompt + out, prompt <= 100
    work = Work(prompt_tokens=prompt, total_tokens=total, left_tokens=out / 2, tpot_s=tpot_s, hits=hits, short=short)
    rung, local = rng.choice((Rung.NORMAL, Rung.LONG_WAIT)), rng.choice((0, 50))
    rules = place.Rules(weights=Weights(), links=Links(0.003), rung=rung, local_tokens=local, long_tokens=200)
    return request, work, rules


@pytest.mark.parametrize("gpus", [False, True])
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 40), count=st.sampled_from([1, 6, 30, 90]))
def test_it_decides_as_one_would_who_looks_at_everything(seed: int, count: int, gpus: bool) -> None:
    rng = random.Random(seed)
    cluster = state(rng, count, gpus=gpus)
    for _ in range(4):
        request, work, rules = question(rng, count)
        found = place.choose(request, cluster, work=work, rules=rules)
        plain = Plain(request, cluster, work, rules).choice()
        if isinstance(found, place.Wait):
            assert plain is None
        else:
            sink = None if found.decode is None else found.decode.name
            assert plain == (found.score_s, found.prefill.name, sink)
