"""Placement as it reads in plain words: every instance is looked at, and every pair of the best. Slow, and to agree
with runtime/core/place.py in everything it decides."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from trtpd.runtime.core import score
from trtpd.runtime.core.cluster import Cluster, Group
from trtpd.runtime.core.degrade import Rung
from trtpd.runtime.core.instance import Instance
from trtpd.runtime.core.place import TRANSFER_FAILURES_BEFORE_LOCAL, Rules
from trtpd.runtime.core.ranks import Table
from trtpd.runtime.core.requests import Request
from trtpd.runtime.core.score import Work
from trtpd.runtime.core.shortlist import SHORTLIST

Found = tuple[float, str, str | None]
"""(score, prefill, decode)."""


@dataclass
class Plain:
    """One request and everything that bears on where it goes."""

    request: Request
    cluster: Cluster
    work: Work
    rules: Rules

    def choice(self) -> Found | None:
        """The best place; None if there is none now."""
        self.cluster.settle()
        groups = self.cluster.groups.get(self.request.model, {}).values()
        return min((way for group in groups for way in self.ways(group)), key=lambda way: way[0], default=None)

    @property
    def is_long(self) -> bool:
        return self.rules.rung >= Rung.LONG_WAIT and self.work.prompt_tokens >= self.rules.long_tokens

    def ways(self, group: Group) -> list[Found]:
        work, fallback_s = self.work, self.rules.weights.fallback_s
        found = self.alone(group.mixed)
        linked = any(
            self.cluster.link_up(source.name, sink.name)
            for source, sink in product(self.serving(group.prefill), self.serving(group.decode))
        )
        if not any(one.capacity_tokens >= work.prompt_tokens for one in self.serving(group.prefill)):
            return found + self.alone(group.decode, fallback_s)
        if not any(one.capacity_tokens >= work.total_tokens for one in self.serving(group.decode)):
            return found + self.alone(group.prefill, fallback_s)
        if self.request.transfer_failures >= TRANSFER_FAILURES_BEFORE_LOCAL or not linked:
            return found + self.alone(group.decode, fallback_s)
        if self.is_long and found:
            return found
        found += self.pairs(group)
        return found + self.alone(group.decode) if work.prompt_tokens <= self.rules.local_tokens else found

    def serving(self, table: Table) -> list[Instance]:
        return [one for one in table.instances if one.usable(self.cluster.now_s)]

    def prefill_s(self, table: Table, flow_s: float = 0.0) -> list[float]:
        work, weights = self.work, self.rules.weights
        stretch = table.stretch(work.prompt_tokens)
        waits_s = (0.0, weights.ttft_s) if work.short else (weights.ttft_s, 0.0)
        own = weights.ttft_s * work.prompt_tokens * stretch
        rows = np.dot((flow_s, waits_s[0], own, waits_s[1]), table.prefill_terms)
        for name, hit in work.hits.items():
            if name in table.names:
                row = table.names[name].row
                rows[row] -= (weights.ttft_s + weights.prefix_s) * table.token_s[row] * stretch * hit
        return list(rows.tolist())

    def decode_s(self, table: Table, flow_s: float = 0.0) -> list[float]:
        target_s = self.work.tpot_s or score.TPOT_USUAL_S
        grows = self.work.prompt_tokens + self.work.left_tokens
        terms = (1.0 / (target_s * target_s), 1.0, grows, grows * grows, flow_s)
        return list(np.dot(terms, table.decode_terms).tolist())

    def takes_prompt(self, table: Table, row: int) -> float:
        """The longest of its kind."""
        return float((table.short_fits if self.work.short else table.prefill_fits)[row])

    def kept_away(self, one: Instance) -> bool:
        return self.request.avoids(one.name, self.cluster.now_s)

    def in_time(self, table: Table, row: int, ready_at_s: float) -> bool:
        """Whether its steps keep the target, and its batch has a place soon after the prompt is computed."""
        tpot_s = self.work.tpot_s
        if tpot_s is None or table.one_s.min() > tpot_s:
            return True
        free_at_s = float(table.free_at_s[row])
        if not self.cluster.costs.known(table.instances[0].hello, table.role):
            return free_at_s <= 0.0
        joined_s = float(table.joined_s[row])
        spare_s = min((tpot_s - joined_s) * self.work.left_tokens * score.SPARE, score.TURN_S)
        return joined_s <= tpot_s and free_at_s <= ready_at_s + spare_s

    def alone(self, table: Table, extra_s: float = 0.0) -> list[Found]:
        """The best instance that would do it all."""
        work, weights = self.work, self.rules.weights
        stretch = table.stretch(work.prompt_tokens)
        both = np.array(self.prefill_s(table)) + np.array(self.decode_s(table)) if len(table) else np.zeros(0)
        both += table.token_s * table.sequences * (weights.disturb_s * work.prompt_tokens * stretch)
        found = [
            (float(both[row]) + extra_s, one.name, None)
            for row, one in enumerate(table.instances)
            if min(table.whole_fits[row], self.takes_prompt(table, row)) >= work.total_tokens
            and not self.kept_away(one)
            and self.in_time(table, row, self.cluster.now_s)
        ]
        return [min(found, key=lambda way: way[0])] if found else []

    def pairs(self, group: Group) -> list[Found]:
        """The best pair of the best of each side."""
        weight = self.rules.weights.transfer_s
        hello = group.prefill.instances[0].hello
        near_s, far_s, flow_s = self.rules.links.move(hello, self.work.prompt_tokens, hosts=self.cluster.hosts)
        sources = self.sources(group.prefill, weight * flow_s)
        if not sources:
            return []
        first = sources[0][1]
        own_tokens = self.work.prompt_tokens - self.work.hits.get(first.name, 0)
        own_s = own_tokens * group.prefill.stretch(self.work.prompt_tokens)
        ready_at_s = self.cluster.now_s + float(
            (group.prefill.short_wait_s if self.work.short else group.prefill.wait_s)[first.row]
            + own_s * group.prefill.token_s[first.row]
        )
        sinks = self.sinks(group.decode, weight * flow_s, ready_at_s)
        found = []
        for (source_s, source), (sink_s, sink) in product(sources, sinks):
            if self.cluster.link_up(source.name, sink.name):
                known_s = self.rules.links.known_s(source, sink, self.work.prompt_tokens)
                by_host_s = near_s if source.hello.host == sink.hello.host else far_s
                moved_s = by_host_s if known_s is None else known_s
                found.append((source_s + sink_s + weight * moved_s, source.name, sink.name))
        return [min(found, key=lambda way: way[0])] if found else []

    def sources(self, table: Table, flow_s: float) -> list[tuple[float, Instance]]:
        scores = self.prefill_s(table, flow_s)
        found = [
            (scores[row], row)
            for row, one in enumerate(table.instances)
            if self.takes_prompt(table, row) >= self.work.prompt_tokens
            and not self.kept_away(one)
            and not (self.is_long and table.rate[row] * table.wait_s[row] > 1.0)
        ]
        return [(score_s, table.instances[row]) for score_s, row in sorted(found)[:SHORTLIST]]

    def sinks(self, table: Table, flow_s: float, ready_at_s: float) -> list[tuple[float, Instance]]:
        scores = self.decode_s(table, flow_s)
        found = [
            (scores[row], row)
            for row, one in enumerate(table.instances)
            if table.whole_fits[row] >= self.work.total_tokens
            and not self.kept_away(one)
            and self.in_time(table, row, ready_at_s)
        ]
        return [(score_s, table.instances[row]) for score_s, row in sorted(found)[:SHORTLIST]]
