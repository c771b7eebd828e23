"""Where a request goes: the feasible pairs and local places, scored; or why it has to wait. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from trtpd.runtime.core import score
from trtpd.runtime.core.cluster import Cluster, Group
from trtpd.runtime.core.degrade import Rung
from trtpd.runtime.core.instance import Instance
from trtpd.runtime.core.links import Links
from trtpd.runtime.core.message import message
from trtpd.runtime.core.ranks import Floats, Mask, Table
from trtpd.runtime.core.requests import Request
from trtpd.runtime.core.score import Weights, Work
from trtpd.runtime.core.shortlist import Pair, Shortlist, by_host, least, of_those_that_fit, shortlist

_LONG_WAIT = Rung.LONG_WAIT
"""Looked at for every placement: a member of an enum takes four times as long as a plain name."""

TRANSFER_FAILURES_BEFORE_LOCAL = 2
"""After so many failed transfers a request runs where nothing has to be moved."""


class Wait(StrEnum):
    """Why a request can't be placed now."""

    NO_INSTANCE = "no_instance"
    NO_ROOM = "no_room"
    PAUSED = "paused"
    TURN = "turn"
    """Only for a place in a batch that is full now."""
    LINE = "line"
    """Only because enough prompts of its kind, short or long, wait there already."""


@message
class Choice:
    """Where it goes. `decode` is None where `prefill` does everything. `reason` is a code for metrics, `text` says
    the same for people where it isn't plain."""

    prefill: Instance
    decode: Instance | None
    score_s: float
    reason: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What placement may do now: constants of the policy, and what the ladder's rung allows.

    `local_tokens`: longest prompt that decode may prefill itself where that is cheaper than moving KV.
    `long_tokens`: from so many on a prompt is long, which matters from rung 2 on.
    """

    weights: Weights
    links: Links
    rung: Rung = Rung.NORMAL
    local_tokens: int = 0
    long_tokens: int = 1024

    def leaves_way(self, prompt_tokens: int) -> bool:
        """Whether a prompt is to leave prefill to shorter ones: it goes where nothing waits, and keeps nobody back."""
        return self.rung >= _LONG_WAIT and prompt_tokens >= self.long_tokens


Candidate = tuple[float, Instance, Instance | None, str, str]
"""(score, prefill, decode, reason, what else to say)."""


@dataclass(slots=True)
class _View:
    """One request seen against one cluster at one instant; notes on the way why places fell out. `is_long`: it is to
    leave the prefill pool to short prompts."""

    request: Request
    cluster: Cluster
    rules: Rules
    work: Work
    is_long: bool
    exists: bool = False
    held_back: bool = False
    awaits_turn: bool = False
    awaits_line: bool = False
    awaits_room: bool = False

    def avoided(self, table: Table, unfit: Mask) -> Mask:
        """Adds those the request stays away from."""
        for name in self.request.avoid:
            row = score.row_of(table, name)
            if row is not None and self.request.avoids(name, self.cluster.now_s):
                unfit[row] = True
        return unfit

    def sources(self, table: Table, flow: float) -> Shortlist:
        """Those that would prefill only."""
        scores, tokens = self._prefill(table, flow), self.work.prompt_tokens
        if not self.is_long and not self.request.avoid:
            found = shortlist(scores)
            if table.bounds[0] >= tokens or least(self._fits(table), found) >= tokens:
                return found
        unfit = self.avoided(table, self._fits(table) < tokens)
        if self.is_long:
            self.held_back = True
            unfit |= table.rate * table.wait_s > 1.0
        found = of_those_that_fit(scores, unfit)
        if not found:
            self._note_line(table.room >= tokens)
        return found

    def _fits(self, table: Table) -> Floats:
        return table.fits(short=self.work.short)

    def _note_line(self, others: Mask) -> None:
        """`others` would take it but for their lines. One that stays away from some says nothing of its kind."""
        if others.any() and not self.request.avoid:
            self.awaits_line = True
        else:
            self.awaits_room = True

    def _stretch(self, table: Table) -> float:
        return table.stretch(self.work.prompt_tokens)

    def _prefill(self, table: Table, flow: float = 0.0) -> Floats:
        return score.prefill(table, self.work, self.rules.weights, self._stretch(table), flow)

    def sinks(self, table: Table, flow: float, ready_at_s: float) -> Shortlist:
        """Those that would decode what others will have prefilled by `ready_at_s`."""
        work, fits = self.work, table.whole_fits
        scores = score.decode(table, work, flow)
        if not self.request.avoid:
            found = shortlist(scores)
            all_fit = table.bounds[1] >= work.total_tokens or least(fits, found) >= work.total_tokens
            if all_fit and self._none_late(found, table, ready_at_s):
                return found
        return of_those_that_fit(
            scores, self._in_time(table, self.avoided(table, fits < work.total_tokens), ready_at_s)
        )

    def _none_late(self, found: Shortlist, table: Table, ready_at_s: float) -> bool:
        """Whether all of these keep the target as far as their own rows say; if not, `too_late` knows more."""
        most_s = self.work.tpot_s
        if most_s is None:
            return True
        in_step = table.bounds[2] <= most_s or all(table.joined_s.item(row) <= most_s for _, row in found)
        return in_step and all(table.free_at_s.item(row) <= ready_at_s for _, row in found)

    def _in_time(self, table: Table, unfit: Mask, ready_at_s: float) -> Mask:
        late = score.too_late(table, self.work, self.cluster.costs, ready_at_s=ready_at_s)
        if late is not None:
            if not self.awaits_turn:
                self.awaits_turn = bool((late & (table.joined_s <= self.work.tpot_s) & ~unfit).any())
            unfit |= late
        return unfit

    def locals_of(self, table: Table, reason: str, text: str = "", *, extra_s: float = 0.0) -> list[Candidate]:
        """The best place where one instance does it all. `text` says why, if that isn't its role."""
        total = self.work.total_tokens
        self.exists = self.exists or table.can_hold(total)
        unfit = self.avoided(table, (table.whole_fits < total) | (self._fits(table) < total))
        scores = self._prefill(table) + score.decode(table, self.work)
        scores += score.disturbance(table, self.work, self.rules.weights, self._stretch(table))
        if not len(table):
            return []
        scores[self._in_time(table, unfit, self.cluster.now_s)] = np.inf
        row = int(scores.argmin())
        score_s = scores.item(row) + extra_s
        if score_s < np.inf:
            return [(score_s, table.instances[row], None, reason, text)]
        self._note_line((table.whole_fits >= total) & (self._fits(table) < total))
        return []

    def pairs_of(self, prefills: Table, decodes: Table) -> list[Candidate]:
        """The best pair of both shortlists, over links that are up."""
        self.exists = True
        links, weight, tokens = self.rules.links, self.rules.weights.transfer_s, self.work.prompt_tokens
        hello = prefills.instances[0].hello
        near_s, far_s, flow_s = links.move(hello, tokens, hosts=self.cluster.hosts)
        sources = self.sources(prefills, weight * flow_s)
        if not sources:
            return []
        ready_at_s = self.cluster.now_s + score.prompt_s(prefills, sources[0][1], self.work)
        sinks = self.sinks(decodes, weight * flow_s, ready_at_s)
        if not sinks:
            self.awaits_room = True
            return []
        if hello.gpus or self.cluster.links_down:
            found = self._over_links(sources, sinks, prefills, decodes, near_s, far_s)
        else:
            found = by_host(sources, sinks, prefills.hosts, decodes.hosts, weight * near_s, weight * far_s)
        if found is None:
            return []
        score_s, row, sink_row = found
        return [(score_s, prefills.instances[row], decodes.instances[sink_row], "pair", "")]

    def _over_links(
        self, sources: Shortlist, sinks: Shortlist, prefills: Table, decodes: Table, near_s: float, far_s: float
    ) -> Pair | None:
        """Where some links are down, or how far apart two instances are is known for each pair: all are looked at."""
        links, weight, tokens = self.rules.links, self.rules.weights.transfer_s, self.work.prompt_tokens
        best: Pair | None = None
        bound_s, floor_s = float("inf"), weight * links.least_s
        for source_s, row in sources:
            if source_s + sinks[0][0] + floor_s >= bound_s:
                break
            source = prefills.instances[row]
            for sink_s, sink_row in sinks:
                sink = decodes.instances[sink_row]
                if source_s + sink_s + floor_s >= bound_s:
                    break
                if not self.cluster.link_up(source.name, sink.name):
                    continue
                known_s = links.known_s(source, sink, tokens)
                if known_s is None:
                    known_s = near_s if sink.host == source.host else far_s
                score_s = source_s + sink_s + weight * known_s
                if score_s < bound_s:
                    best, bound_s = (score_s, row, sink_row), score_s
        return best

    def group(self, group: Group) -> list[Candidate]:
        """All ways to run it within one group."""
        request, work = self.request, self.work
        found = self.locals_of(group.mixed, "mixed") if group.mixed.open else []
        fallback_s = self.rules.weights.fallback_s
        decodes, prefills = group.decode, group.prefill
        if not prefills.can_hold(work.prompt_tokens):
            text = "no prefill instance for it"
            return found + self.locals_of(decodes, "no_prefill", text, extra_s=fallback_s)
        if not decodes.can_hold(work.total_tokens):
            text = "no decode instance for it"
            return found + self.locals_of(prefills, "no_decode", text, extra_s=fallback_s)
        if request.transfer_failures >= TRANSFER_FAILURES_BEFORE_LOCAL:
            text = f"{request.transfer_failures} transfers of it failed"
            return found + self.locals_of(decodes, "transfers_failed", text, extra_s=fallback_s)
        if not self._linked(prefills, decodes):
            text = "no link between the pools"
            return found + self.locals_of(decodes, "no_link", text, extra_s=fallback_s)
        if self.is_long and found:
            return found
        found += self.pairs_of(prefills, decodes)
        if work.prompt_tokens <= self.rules.local_tokens:
            found += self.locals_of(decodes, "local", "moving its KV costs more than it saves")
        return found

    def _linked(self, prefills: Table, decodes: Table) -> bool:
        """Whether any pair could move KV. Walks them only while a link is down."""
        if not self.cluster.links_down:
            return True
        pairs = ((p, d) for p in serving(prefills) for d in serving(decodes))
        return any(self.cluster.link_up(p.name, d.name) for p, d in pairs)

    def wait(self) -> Wait:
        """Why nothing was found: nobody serves it, somebody is too full for it, or it stays away from the rest."""
        if not self.exists:
            return Wait.NO_INSTANCE
        if self.awaits_turn:
            return Wait.TURN
        if self.held_back or self._all_avoided():
            return Wait.PAUSED
        return Wait.LINE if self.awaits_line and not self.awaits_room else Wait.NO_ROOM

    def _all_avoided(self) -> bool:
        """Whether what it stays away from is all that keeps it from a place."""
        kept = {name for name in self.request.avoid if self.request.avoids(name, self.cluster.now_s)}
        return bool(kept) and all(
            one.name in kept for table in self.cluster.tables(self.request.model) for one in serving(table)
        )


def serving(table: Table) -> Iterable[Instance]:
    return (instance for instance in table.instances if table.capacity[instance.row] >= 0.0)


def choose(request: Request, cluster: Cluster, *, work: Work, rules: Rules) -> Choice | Wait:
    """The best place for a new attempt."""
    cluster.settle()
    view = _View(request, cluster, rules, work, rules.leaves_way(work.prompt_tokens))
    found: list[Candidate] = []
    for group in cluster.groups.get(request.model, {}).values():
        found += view.group(group)
    if not found:
        return view.wait()
    score_s, prefill, decode, reason, text = found[0] if len(found) == 1 else min(found, key=lambda one: one[0])
    return Choice(prefill=prefill, decode=decode, score_s=score_s, reason=reason, text=text)


class Chooser(Protocol):
    """What decides where a request goes: `choose`, or another to compare it with."""

    def __call__(self, request: Request, cluster: Cluster, *, work: Work, rules: Rules) -> Choice | Wait: ...


def why(choice: Choice, work: Work) -> str:
    """What spoke for it, for the timeline. To be asked before anything is reserved there."""
    prefill, decode = choice.prefill, choice.decode
    place = f"local on {prefill.name}" if decode is None else f"pair {prefill.name}→{decode.name}"
    whole = prefill if decode is None else decode
    hit = work.hits.get(prefill.name, 0)
    wait_s = score.prompt_s(prefill.table, prefill.row, work)
    step_s = whole.table.one_s.item(whole.row) + whole.table.each_s.item(whole.row) * whole.sequences
    kv = (whole.committed_blocks + whole.blocks_for(work.total_tokens)) / whole.hello.kv_blocks
    return (
        f"{place}{': ' if choice.text else ''}{choice.text}; first token in about {wait_s:.3g} s"
        f"{f', {hit} tokens cached' if hit else ''}, then one each {step_s:.2g} s, "
        f"KV {kv:.0%} promised, batch {whole.placed + 1}/{whole.hello.max_batch}; score {choice.score_s:.3g}"
    )
