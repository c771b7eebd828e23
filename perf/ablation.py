"""The router's placement against three plain ones, on the virtual clock: `python -m trtpd.perf.ablation`.

The same core, settings, requests, seeds and faults in every arm; only what decides where a request goes differs.
Nothing is refused for its targets and no session is moved, so that placement is what is compared and every request
counts. A last arm, `ours_moving`, shows what moving sessions adds to ours; it takes no part in the comparison.

The loads follow from a rule and not from results: requests arrive at LOADS parts of what the scenario's cluster can
serve at its weakest by the step-time model (see capacity.py), the same parts in every scenario.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trtpd.perf.baselines import baseline
from trtpd.perf.capacity import demand
from trtpd.perf.outcome import Summary
from trtpd.perf.scenario import Faults, Kill, SimRequest, Slow
from trtpd.perf.simulate import Simulation
from trtpd.perf.worker_spec import WorkerSpec
from trtpd.runtime.core import place
from trtpd.runtime.core.cost import LinearStepTime, StepTimeModel
from trtpd.runtime.core.events import Role
from trtpd.runtime.core.policy import Policy
from trtpd.runtime.core.router import RouterCore

ARMS = ("random", "round_robin", "least_queued", "ours")
POLICIES = (*ARMS, "ours_moving")
LOADS = (0.5, 0.7, 0.9)
NEAR = 0.03
"""Ours is as good as the best when it is within this part of it."""

SAMPLE_S, FIRST_RATE, ROUNDS = 1000.0, 10.0, 3
"""From so many seconds of each stream its demand is reckoned, and in so many rounds its rate."""
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
    """`load(rng, seconds, rate)` makes the requests of one run; `rate` is requests a second, bursts aside."""

    name: str
    what: str
    load: Callable[[random.Random, float, float], list[SimRequest]]
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
    Scenario(name="a_long_sessions", what="chat, some answers ten times as long (false idle)", load=chat),
    Scenario(name="b_bursts", what="bursts of long prompts over a calm stream", load=bursts),
    Scenario(
        name="c_shared_prefixes",
        what="a dozen system prompts, prefix caches on prefill",
        load=shared,
        workers=tuple(pools(cache_blocks=512)),
    ),
    Scenario(
        name="d_one_slow",
        what="decode_1 and prefill_1 take three times as long from the fifth second",
        load=chat,
        faults=Faults(
            slow=tuple(Slow(instance=name, from_s=5.0, to_s=1e9, factor=3.0) for name in ("decode_1", "prefill_1"))
        ),
    ),
    Scenario(
        name="e_killed",
        what="decode_0 and prefill_0 die and are back after ten seconds",
        load=chat,
        faults=Faults(
            kills=(
                Kill(instance="decode_0", at_s=10.0, back_after_s=10.0),
                Kill(instance="prefill_0", at_s=25.0, back_after_s=10.0),
            )
        ),
    ),
)


def rate_at(scenario: Scenario, part: float) -> float:
    """Requests a second that ask for `part` of what the scenario's cluster can do at its weakest. Demand grows
    about linearly with the rate, from that of the bursts alone."""

    def asked(rate: float) -> float:
        requests = scenario.load(random.Random("capacity"), SAMPLE_S, rate)
        found = demand(requests, scenario.workers, MODEL, seconds=SAMPLE_S, tpot_s=TPOT_S, faults=scenario.faults)
        return found.most

    base, rate = asked(FIRST_RATE / 1e6), FIRST_RATE
    for _ in range(ROUNDS):
        rate *= (part - base) / (asked(rate) - base)
    return round(rate, 2)


def run(scenario: Scenario, policy: str, *, rate: float, seconds: float, seed: int, profiled: bool = False) -> Summary:
    """One arm of one scenario. `profiled`: the router has the step times that `trtpd profile` would have measured; else
    it learns them as it goes."""
    settings = Policy(refuse_late=False, queue_limit=100_000, queue_s=1e6, dwell_up_s=1e9, move_gain=NO_MOVES)
    if policy == "ours_moving":
        settings = replace(settings, move_gain=Policy().move_gain)
    choose = place.choose if policy.startswith("ours") else baseline(policy, seed)
    step_times: dict[Role, StepTimeModel] | None = {"prefill": MODEL, "decode": MODEL} if profiled else None
    core = RouterCore(settings, seed=seed, step_times=step_times, choose=choose)
    simulation = Simulation(
        core=core,
        workers=scenario.workers,
        model=MODEL,
        requests=scenario.load(random.Random(seed), seconds, rate),
        faults=scenario.faults,
        seed=seed,
    )
    return simulation.run()


METRICS: dict[str, Callable[[Summary], float]] = {
    "goodput": lambda s: s.kinds.get("good", 0) / s.requests,
    "ttft_p99_s": lambda s: s.ttft_s["p99"] if s.ttft_s else math.inf,
    "tpot_p99_s": lambda s: s.tpot_s["p99"] if s.tpot_s else math.inf,
}
"""Goodput is the part of all requests that finished inside both targets."""


def row(
    scenario: Scenario,
    policy: str,
    *,
    load: float,
    rate: float,
    seconds: float,
    seeds: Sequence[int],
    profiled: bool = False,
) -> dict[str, Any]:
    """Of each metric the mean over the seeds and its standard deviation."""
    found = [run(scenario, policy, rate=rate, seconds=seconds, seed=seed, profiled=profiled) for seed in seeds]
    values = {name: [read(summary) for summary in found] for name, read in METRICS.items()}
    return {
        "scenario": scenario.name,
        "load": load,
        "rate": rate,
        "policy": policy,
        "requests": sum(summary.requests for summary in found),
        **{name: round(float(np.mean(one)), 4) for name, one in values.items()},
        **{f"{name}_sd": round(float(np.std(one)), 4) for name, one in values.items()},
    }


def behind(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """For each metric by how large a part ours is behind the best of the arms: 0 where it is the best."""
    arms = [one for one in rows if one["policy"] in ARMS]
    ours = next(one for one in arms if one["policy"] == "ours")
    found = {}
    for name in METRICS:
        best = (max if name == "goodput" else min)(one[name] for one in arms)
        found[name] = round(abs(ours[name] - best) / best, 4) if best else 0.0
    return found


def shown(one: Mapping[str, Any]) -> str:
    figures = "".join(f"{one[name]:>12.4f} ±{one[name + '_sd']:<8.4f}" for name in METRICS)
    return f"{one['scenario']:>18}{one['load']:>6.0%}{one['rate']:>8.2f}/s{one['policy']:>14}{figures}"


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where ours is not within NEAR of the best."""
    far = {name: part for name, part in behind(rows).items() if part > NEAR}
    return "ours is best or near it in all" if not far else f"ours is behind: {far}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--profiled", action="store_true", help="the router has measured step times")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    for scenario in (one for one in SCENARIOS if options.only in one.name):
        for load in options.loads:
            rate, rows = rate_at(scenario, load), []
            for policy in options.policies:
                how: dict[str, Any] = {"seconds": options.seconds, "profiled": options.profiled}
                rows.append(row(scenario, policy, load=load, rate=rate, seeds=range(options.seeds), **how))
                print(json.dumps(rows[-1]) if options.json else shown(rows[-1]), flush=True)
            if not options.json and "ours" in options.policies:
                print(f"{'':>18}{verdict(rows)}", flush=True)


if __name__ == "__main__":
    main()
