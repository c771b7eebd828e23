"""The router's placement against three plain ones, on the virtual clock: `python -m trtpd.perf.ablation`.

The same core, settings, load, seeds and faults in every arm; only what decides where a request goes differs. Nothing is
refused for its targets and no session is moved, so that placement is what is compared and every request counts. A last
arm shows what moving sessions adds to ours.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trtpd.perf.baselines import baseline
from trtpd.perf.outcome import Summary
from trtpd.perf.scenario import Faults, Kill, SimRequest, Slow
from trtpd.perf.simulate import Simulation
from trtpd.perf.simulated_worker import WorkerSpec
from trtpd.runtime.core import place
from trtpd.runtime.core.cost import LinearStepTime
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.router import RouterCore

POLICIES = ("random", "round_robin", "least_queued", "ours", "ours_moving")
TTFT_S, TPOT_S = 1.0, 0.05
BLOCK_TOKENS = 32
NO_MOVES = 1e9

MODEL = LinearStepTime(
    fixed_s=0.006, prefill_token_s=8e-5, prefill_pair_s=4e-9, decode_sequence_s=8e-4, decode_kv_token_s=2e-7
)
PREFILL_TOKENS_PER_S = 10_000.0


def pools(prefill: int = 4, decode: int = 4, **more: Any) -> list[WorkerSpec]:
    return [
        WorkerSpec(
            name=f"{role}_{number}",
            role=role,  # type: ignore[arg-type]
            kv_blocks=2048,
            max_batch=48,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            **more,
        )
        for role, count in (("prefill", prefill), ("decode", decode))
        for number in range(count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`load(rng, seconds, rate)` makes the requests of one run; `rate` is requests a second."""

    name: str
    what: str
    load: Callable[[random.Random, float, float], list[SimRequest]]
    rate: float
    faults: Faults = field(default_factory=Faults)
    workers: tuple[WorkerSpec, ...] = field(default_factory=lambda: tuple(pools()))


def request(at_s: float, prompt: int, output: int, most: int, **more: Any) -> SimRequest:
    return SimRequest(
        at_s=at_s,
        prompt_tokens=prompt,
        max_tokens=most,
        output_tokens=max(1, min(output, most)),
        ttft_s=TTFT_S,
        tpot_s=TPOT_S,
        **more,
    )


def arrivals(rng: random.Random, seconds: float, rate: float) -> list[float]:
    found, now_s = [], 0.0
    while (now_s := now_s + rng.expovariate(rate)) < seconds:
        found.append(now_s)
    return found


def chat(rng: random.Random, seconds: float, rate: float) -> list[SimRequest]:
    """Short prompts; one answer in five is ten times as long as the others and declares it."""
    made = []
    for at_s in arrivals(rng, seconds, rate):
        long = rng.random() < 0.2
        most = 1600 if long else 160
        made.append(request(at_s, rng.randint(40, 400), round(rng.uniform(0.5, 1.0) * most), most))
    return made


def bursts(rng: random.Random, seconds: float, rate: float) -> list[SimRequest]:
    """A calm stream of chats, and every few seconds a dozen long prompts at once."""
    made = chat(rng, seconds, rate)
    at_s = 2.0
    while at_s < seconds:
        made += [request(at_s + 0.01 * n, rng.randint(1500, 5000), rng.randint(20, 80), 160) for n in range(12)]
        at_s += rng.uniform(5.0, 8.0)
    return sorted(made, key=lambda one: one.at_s)


def shared(rng: random.Random, seconds: float, rate: float) -> list[SimRequest]:
    """Prompts that begin with one of a dozen long system prompts, some far more often than others."""
    made = []
    for at_s in arrivals(rng, seconds, rate):
        system = min(int(rng.expovariate(0.35)), 11)
        own = rng.randint(20, 200)
        blocks = tuple(system * 1000 + block for block in range(1, 2048 // BLOCK_TOKENS + 1))
        made.append(request(at_s, 2048 + own, rng.randint(10, 120), 160, block_hashes=blocks))
    return made


SCENARIOS = (
    Scenario(name="a_long_sessions", what="chat, some answers ten times as long (false idle)", load=chat, rate=15.0),
    Scenario(name="b_bursts", what="bursts of long prompts over a calm stream", load=bursts, rate=12.0),
    Scenario(
        name="c_shared_prefixes",
        what="a dozen system prompts, prefix caches on prefill",
        load=shared,
        rate=42.0,
        workers=tuple(pools(cache_blocks=512)),
    ),
    Scenario(
        name="d_one_slow",
        what="decode_1 and prefill_1 take three times as long from the fifth second",
        load=chat,
        rate=12.5,
        faults=Faults(
            slow=tuple(Slow(instance=name, from_s=5.0, to_s=1e9, factor=3.0) for name in ("decode_1", "prefill_1"))
        ),
    ),
    Scenario(
        name="e_killed",
        what="decode_0 and prefill_0 die and are back after ten seconds",
        load=chat,
        rate=14.5,
        faults=Faults(
            kills=(
                Kill(instance="decode_0", at_s=10.0, back_after_s=10.0),
                Kill(instance="prefill_0", at_s=25.0, back_after_s=10.0),
            )
        ),
    ),
)


def run(scenario: Scenario, policy: str, *, seconds: float, seed: int) -> Summary:
    """One arm of one scenario."""
    settings = Policy(refuse_late=False, queue_limit=100_000, queue_s=1e6, dwell_up_s=1e9, move_gain=NO_MOVES)
    if policy == "ours_moving":
        settings = replace(settings, move_gain=Policy().move_gain)
    choose = place.choose if policy.startswith("ours") else baseline(policy, seed)
    core = RouterCore(settings, seed=seed, choose=choose)
    simulation = Simulation(
        core=core,
        workers=scenario.workers,
        model=MODEL,
        requests=scenario.load(random.Random(seed), seconds, scenario.rate),
        faults=scenario.faults,
        seed=seed,
    )
    return simulation.run()


def row(scenario: Scenario, policy: str, *, seconds: float, seeds: Sequence[int]) -> dict[str, Any]:
    """Means over the seeds. Goodput is the part of all requests that finished inside both targets."""
    found = [run(scenario, policy, seconds=seconds, seed=seed) for seed in seeds]
    return {
        "scenario": scenario.name,
        "policy": policy,
        "goodput": round(float(np.mean([s.kinds.get("good", 0) / s.requests for s in found])), 4),
        "ttft_p99_s": round(float(np.mean([s.ttft_s["p99"] for s in found if s.ttft_s])), 3),
        "tpot_p99_s": round(float(np.mean([s.tpot_s["p99"] for s in found if s.tpot_s])), 4),
        "requests": sum(s.requests for s in found),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    for scenario in SCENARIOS:
        if options.only not in scenario.name:
            continue
        for policy in POLICIES:
            found = row(scenario, policy, seconds=options.seconds, seeds=range(options.seeds))
            if options.json:
                print(json.dumps(found), flush=True)
            else:
                print("  ".join(f"{value!s:>18}" for value in found.values()), flush=True)


if __name__ == "__main__":
    main()
