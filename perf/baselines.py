"""Ways to place a request that others use, on the same core: what the router's own has to be better than.

Each takes what fits and knows nothing but its one criterion; queueing, hand-off and recovery are RouterCore's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trtpd.runtime.core.cluster import Cluster
from trtpd.runtime.core.instance import Instance
from trtpd.runtime.core.place import Choice, Rules, Wait
from trtpd.runtime.core.ranks import Table
from trtpd.runtime.core.requests import Request
from trtpd.runtime.core.score import Work

Pick = Callable[[list[Instance]], Instance]


@dataclass(slots=True)
class Baseline:
    """Prefill and decode are picked each on its own, by one rule. With only one side left, that does it all."""

    pick: Pick
    name: str

    def __call__(self, request: Request, cluster: Cluster, *, work: Work, rules: Rules) -> Choice | Wait:
        cluster.settle()
        exists = False
        for group in cluster.groups.get(request.model, {}).values():
            pools = [table for table in (group.prefill, group.decode) if table.open]
            exists = exists or bool(pools)
            if len(pools) == 2:
                sources = _free(group.prefill, work.prompt_tokens, request, cluster)
                sinks = _free(group.decode, work.total_tokens, request, cluster)
                if sources and sinks:
                    return self._choice(self.pick(sources), self.pick(sinks))
            elif pools and (whole := _free(pools[0], work.total_tokens, request, cluster)):
                return self._choice(self.pick(whole), None)
        return Wait.NO_ROOM if exists else Wait.NO_INSTANCE

    def _choice(self, prefill: Instance, decode: Instance | None) -> Choice:
        return Choice(prefill=prefill, decode=decode, score_s=0.0, reason=self.name, text=self.name)


def _free(table: Table, tokens: int, request: Request, cluster: Cluster) -> list[Instance]:
    """Those whose KV can take it now."""
    rows = np.flatnonzero(table.room >= tokens).tolist()
    found = [table.instances[row] for row in rows]
    return [instance for instance in found if not request.avoids(instance.name, cluster.now_s)]


@dataclass(slots=True)
class _RoundRobin:
    turn: dict[str, int] = field(default_factory=dict)

    def __call__(self, instances: list[Instance]) -> Instance:
        role = instances[0].hello.role
        self.turn[role] = self.turn.get(role, -1) + 1
        return instances[self.turn[role] % len(instances)]


def least_queued(instances: list[Instance]) -> Instance:
    """Fewest requests placed there, counted at dispatch."""
    return min(instances, key=lambda instance: (instance.placed, instance.name))


def baseline(name: str, seed: int) -> Baseline:
    """One of random, round_robin, least_queued; a new one for every run."""
    picks: dict[str, Pick] = {
        "random": random.Random(seed).choice,
        "round_robin": _RoundRobin(),
        "least_queued": least_queued,
    }
    return Baseline(picks[name], name)
