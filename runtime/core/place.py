"""Where a request goes: the feasible pairs and local places, scored; or why it has to wait. Pure."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from trtpd.runtime.core import score
from trtpd.runtime.core.cluster import Cluster, Group, Instance
from trtpd.runtime.core.requests import Request

SHORTLIST = 8
"""Instances of each side that are scored as pairs."""

TIE_S = 1e-9

TRANSFER_FAILURES_BEFORE_LOCAL = 2
"""After so many failed transfers a request runs where nothing has to be moved."""


class Wait(StrEnum):
    """Why a request can't be placed now."""

    NO_INSTANCE = "no_instance"
    NO_ROOM = "no_room"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where it goes. `decode` is None where `prefill` does everything. `why` is for the timeline."""

    prefill: Instance
    decode: Instance | None
    score_s: float
    why: str


@dataclass(slots=True)
class _View:
    """One request seen against one cluster at one instant; notes on the way why places fell out."""

    request: Request
    cluster: Cluster
    weights: score.Weights
    placed_per_batch: float
    now_s: float
    exists: bool = False
    full: bool = False

    def usable(self, instances: Iterable[Instance], tokens: int) -> list[Instance]:
        """Those that serve now and could hold so many tokens if they were empty."""
        return [i for i in instances if i.usable(self.now_s) and tokens <= i.capacity_tokens]

    def open(self, instances: Iterable[Instance], tokens: int, *, batch: bool) -> list[Instance]:
        """Those of the usable that can take it now."""
        found = []
        for instance in instances:
            self.exists = True
            if self.request.avoids(instance.name, self.now_s):
                continue
            crowded = batch and instance.placed >= self.placed_per_batch * instance.hello.max_batch
            if crowded or not instance.has_room(instance.blocks_for(tokens)):
                self.full = True
            else:
                found.append(instance)
        return found

    def locals_of(self, instances: list[Instance], fallback: str) -> list[Choice]:
        """Places where one instance does it all; `fallback` says why, if that isn't its role."""
        request = self.request
        choices = []
        for instance in self.open(instances, request.total_tokens, batch=True):
            blocks = instance.blocks_for(request.total_tokens)
            score_s = score.prefill_score(instance, request.prompt_tokens, self.weights)
            score_s += score.decode_score(instance, blocks, self.weights)
            score_s += self.weights.fallback_s if fallback else 0.0
            reason = f": {fallback}" if fallback else ""
            why = f"local on {instance.name}{reason}; {self._state(instance, instance)}"
            choices.append(Choice(prefill=instance, decode=None, score_s=score_s, why=why))
        return choices

    def pairs_of(self, prefills: list[Instance], decodes: list[Instance]) -> list[Choice]:
        """The best pairs of the shortlists of both sides, over links that are up."""
        request, weights = self.request, self.weights
        sources = _best(
            self.open(prefills, request.prompt_tokens, batch=False),
            lambda i: score.prefill_score(i, request.prompt_tokens, weights),
        )
        sinks = _best(
            self.open(decodes, request.total_tokens, batch=True),
            lambda i: score.decode_score(i, i.blocks_for(request.total_tokens), weights),
        )
        best: list[tuple[float, Instance, Instance]] = []
        for source_s, source in sources:
            for sink_s, sink in sinks:
                if self.cluster.link_up(source.name, sink.name, self.now_s):
                    best.append((source_s + sink_s, source, sink))
        least = min((entry[0] for entry in best), default=0.0)
        return [
            Choice(prefill=p, decode=d, score_s=s, why=f"pair {p.name}→{d.name}; {self._state(p, d)}")
            for s, p, d in best
            if s <= least + TIE_S
        ]

    def _state(self, prefill: Instance, decode: Instance) -> str:
        wait_s = score.first_token_s(prefill, self.request.prompt_tokens)
        use = score.kv_use(decode, decode.blocks_for(self.request.total_tokens))
        batch = f"{decode.placed + 1}/{decode.hello.max_batch}"
        return f"first token in about {wait_s:.3g} s, KV {use:.0%} promised, batch {batch}"

    def group(self, group: Group) -> list[Choice]:
        """All ways to run it within one group."""
        request = self.request
        choices = self.locals_of(self.usable(group.mixed.values(), request.total_tokens), "")
        prefills = self.usable(group.prefill.values(), request.prompt_tokens)
        decodes = self.usable(group.decode.values(), request.total_tokens)
        if not prefills:
            choices += self.locals_of(decodes, "no prefill instance for it")
        elif not decodes:
            whole = self.usable(prefills, request.total_tokens)
            choices += self.locals_of(whole, "no decode instance for it")
        elif request.transfer_failures >= TRANSFER_FAILURES_BEFORE_LOCAL:
            choices += self.locals_of(decodes, f"{request.transfer_failures} transfers of it failed")
        elif not self._linked(prefills, decodes):
            choices += self.locals_of(decodes, "no link between the pools")
        else:
            choices += self.pairs_of(prefills, decodes)
        return choices

    def _linked(self, prefills: list[Instance], decodes: list[Instance]) -> bool:
        if not self.cluster.links_down:
            return True
        return any(self.cluster.link_up(p.name, d.name, self.now_s) for p in prefills for d in decodes)


def _best(instances: list[Instance], key: Callable[[Instance], float]) -> list[tuple[float, Instance]]:
    scored = ((key(instance), order, instance) for order, instance in enumerate(instances))
    return [(score_s, instance) for score_s, _, instance in heapq.nsmallest(SHORTLIST, scored)]


def choose(
    request: Request,
    cluster: Cluster,
    *,
    weights: score.Weights,
    placed_per_batch: float,
    now_s: float,
    rng: random.Random,
) -> Choice | Wait:
    """The best place for a new attempt. Among equals `rng` draws."""
    view = _View(request, cluster, weights, placed_per_batch, now_s)
    choices: list[Choice] = []
    for group in cluster.groups.get(request.model, {}).values():
        choices += view.group(group)
    if choices:
        least = min(choice.score_s for choice in choices)
        ties = [choice for choice in choices if choice.score_s <= least + TIE_S]
        return ties[0] if len(ties) == 1 else rng.choice(ties)
    if not view.exists:
        return Wait.NO_INSTANCE
    return Wait.NO_ROOM if view.full else Wait.PAUSED


def sinks_for(request: Request, source: Instance, cluster: Cluster, *, now_s: float) -> list[Instance]:
    """Decode instances that serve now and could ever take what `source` offers, whether or not they have
    room."""
    group = cluster.groups[request.model][source.group_key]
    return [
        instance
        for instance in group.decode.values()
        if instance.usable(now_s) and request.total_tokens <= instance.capacity_tokens
    ]


def choose_sink(
    request: Request,
    source: Instance,
    cluster: Cluster,
    *,
    weights: score.Weights,
    now_s: float,
    rng: random.Random,
    not_again: frozenset[str],
) -> Instance | None:
    """The best decode instance to pull an offer that exists already; None if none has room now.

    `not_again` are taken only if there is no other.
    """
    attempt = request.running()
    key = (request.id, attempt.number)
    found: list[tuple[bool, float, Instance]] = []
    for sink in sinks_for(request, source, cluster, now_s=now_s):
        blocks = sink.blocks_for(request.total_tokens)
        fits = sink.has_room(blocks) and key not in sink.holds and sink.name not in attempt.shunned
        if fits and not request.avoids(sink.name, now_s) and cluster.link_up(source.name, sink.name, now_s):
            found.append((sink.name in not_again, score.decode_score(sink, blocks, weights), sink))
    if not found:
        return None
    again, least, _ = min(found, key=lambda entry: entry[:2])
    ties = [sink for other, score_s, sink in found if other == again and score_s <= least + TIE_S]
    return ties[0] if len(ties) == 1 else rng.choice(ties)
