"""Where a request goes: the feasible pairs and local places, scored; or why it has to wait. Pure."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from trtpd.runtime.core import score
from trtpd.runtime.core.cluster import Cluster, Group, Instance
from trtpd.runtime.core.distance import transfer_s
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


Candidate = tuple[float, Instance, Instance | None, str]
"""(score, prefill, decode, why a place that isn't meant for it is considered)."""


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
        now_s = self.now_s
        return [i for i in instances if tokens <= i.capacity_tokens and i.usable(now_s)]

    def open(self, instances: list[Instance], tokens: int, *, batch: bool) -> list[Instance]:
        """Those of the usable that can take it now."""
        self.exists = self.exists or bool(instances)
        if self.request.avoid:
            instances = [i for i in instances if not self.request.avoids(i.name, self.now_s)]
        per_batch = self.placed_per_batch if batch else float("inf")
        found = [
            instance
            for instance in instances
            if instance.has_room(instance.blocks_for(tokens)) and instance.placed < per_batch * instance.hello.max_batch
        ]
        self.full = self.full or len(found) < len(instances)
        return found

    def locals_of(self, instances: list[Instance], fallback: str) -> list[Candidate]:
        """Places where one instance does it all; `fallback` says why, if that isn't its role."""
        request, weights = self.request, self.weights
        extra_s = weights.fallback_s if fallback else 0.0
        return [
            (
                score.prefill_score(instance, request.prompt_tokens, weights)
                + score.decode_score(instance, instance.blocks_for(request.total_tokens), weights)
                + extra_s,
                instance,
                None,
                fallback,
            )
            for instance in self.open(instances, request.total_tokens, batch=True)
        ]

    def pairs_of(self, prefills: list[Instance], decodes: list[Instance]) -> list[Candidate]:
        """The pairs of the shortlists of both sides, over links that are up."""
        prompt, total, weights = self.request.prompt_tokens, self.request.total_tokens, self.weights
        sources = _best(self.open(prefills, prompt, batch=False), lambda i: score.prefill_score(i, prompt, weights))
        sinks = _best(
            self.open(decodes, total, batch=True), lambda i: score.decode_score(i, i.blocks_for(total), weights)
        )
        return [
            (source_s + sink_s + weights.transfer_s * transfer_s(source.hello, sink.hello, prompt), source, sink, "")
            for source_s, source in sources
            for sink_s, sink in sinks
            if self.cluster.link_up(source.name, sink.name, self.now_s)
        ]

    def group(self, group: Group) -> list[Candidate]:
        """All ways to run it within one group."""
        request = self.request
        found = self.locals_of(self.usable(group.mixed.values(), request.total_tokens), "")
        prefills = self.usable(group.prefill.values(), request.prompt_tokens)
        decodes = self.usable(group.decode.values(), request.total_tokens)
        if not prefills:
            found += self.locals_of(decodes, "no prefill instance for it")
        elif not decodes:
            whole = self.usable(prefills, request.total_tokens)
            found += self.locals_of(whole, "no decode instance for it")
        elif request.transfer_failures >= TRANSFER_FAILURES_BEFORE_LOCAL:
            found += self.locals_of(decodes, f"{request.transfer_failures} transfers of it failed")
        elif not self._linked(prefills, decodes):
            found += self.locals_of(decodes, "no link between the pools")
        else:
            found += self.pairs_of(prefills, decodes)
        return found

    def _linked(self, prefills: list[Instance], decodes: list[Instance]) -> bool:
        if not self.cluster.links_down:
            return True
        return any(self.cluster.link_up(p.name, d.name, self.now_s) for p in prefills for d in decodes)

    def choice(self, candidate: Candidate) -> Choice:
        """A candidate with its reasons."""
        score_s, prefill, decode, fallback = candidate
        place = f"local on {prefill.name}" if decode is None else f"pair {prefill.name}→{decode.name}"
        whole = prefill if decode is None else decode
        wait_s = score.first_token_s(prefill, self.request.prompt_tokens)
        use = score.kv_use(whole, whole.blocks_for(self.request.total_tokens))
        why = (
            f"{place}{': ' if fallback else ''}{fallback}; first token in about {wait_s:.3g} s, "
            f"KV {use:.0%} promised, batch {whole.placed + 1}/{whole.hello.max_batch}"
        )
        return Choice(prefill=prefill, decode=decode, score_s=score_s, why=why)


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
    found: list[Candidate] = []
    for group in cluster.groups.get(request.model, {}).values():
        found += view.group(group)
    if found:
        least = min(candidate[0] for candidate in found)
        ties = [candidate for candidate in found if candidate[0] <= least + TIE_S]
        return view.choice(ties[0] if len(ties) == 1 else rng.choice(ties))
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
            far_s = weights.transfer_s * transfer_s(source.hello, sink.hello, request.prompt_tokens)
            found.append((sink.name in not_again, score.decode_score(sink, blocks, weights) + far_s, sink))
    if not found:
        return None
    again, least, _ = min(found, key=lambda entry: entry[:2])
    ties = [sink for other, score_s, sink in found if other == again and score_s <= least + TIE_S]
    return ties[0] if len(ties) == 1 else rng.choice(ties)
