"""The terms of the placement score and their weights. Lower is better; a score reads as seconds of regret."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from trtpd.errors import InputError
from trtpd.runtime.core.cost import Costs
from trtpd.runtime.core.message import message
from trtpd.runtime.core.ranks import Floats, Mask, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Published weights. A placement's score is the sum of

    ttft_s         per second of predicted time to the first token: prompts that wait there, own prefill less
                   what a prefix cache should hold of it
    tpot_s         a step as long as the TPOT target (or, without one, as TPOT_USUAL_S) once the sequence has
                   joined, by the square of the ratio
    kv_s           a KV pool that its sequences will fill, by the square of the part they will fill
    batch_s        a batch that is promised in full, by the part that is
    transfer_s     per second of the hand-off that its client would wait for
    disturb_s      per second that a prefill beside decoding sequences makes them wait, all together
    fallback_s     an instance doing the other role's work because something is missing
    prefix_s       per second of prefill that a prefix hit saves the pool, beside what it saves this request
    """

    ttft_s: float = 1.0
    tpot_s: float = 0.5
    kv_s: float = 0.5
    batch_s: float = 0.1
    transfer_s: float = 1.0
    disturb_s: float = 0.5
    fallback_s: float = 0.5
    prefix_s: float = 0.25

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 0.0:
                raise InputError(f"scheduler weight {item.name} is {getattr(self, item.name)}; it must be at least 0")


SPARE = 0.5
"""The part of what a TPOT target has to spare that a sequence may wait for its place: when places come free is known no
better than the lengths of answers."""

TURN_S = 0.1
"""A place is not kept waiting for its next sequence if that is ready so much sooner. What would wait longer waits in
the router: that counts against the target of its first token, not of the further ones, of which a short answer has
few to make up for it."""

TPOT_USUAL_S = 0.05
"""What a step's length is measured by where a request has no TPOT target."""


@message
class Work:
    """One request as the score sees it. `left_tokens`: the output to expect of it. `hits`: prompt tokens that
    instances should hold in their prefix caches. `short`: its prompt is (see Policy.short_tokens)."""

    prompt_tokens: int
    total_tokens: int
    left_tokens: float
    tpot_s: float | None
    hits: dict[str, int]
    short: bool = False


def prefill(table: Table, work: Work, weights: Weights, stretch: float, flow: float = 0.0) -> Floats:
    """The TTFT term for each instance: prompts that wait there and its own, less what a cache should hold of it; and
    `flow` for each transfer under way there.

    A hit also takes off what it saves the pool, so that an instance whose queue is longer than that is not chosen
    for its cache. The caller's until it asks again for one of this table.
    """
    ttft_s = weights.ttft_s
    found = table.weigh_prefill(flow, ttft_s, ttft_s * work.prompt_tokens * stretch, short=work.short)
    for name, hit in work.hits.items():
        row = row_of(table, name)
        if row is not None:
            found[row] -= (ttft_s + weights.prefix_s) * table.token_s[row] * stretch * hit
    return found


def prompt_s(table: Table, row: int, work: Work) -> float:
    """Seconds until its prompt would be computed there: those before it, and its own less what a cache should hold."""
    own_tokens = work.prompt_tokens - work.hits.get(table.instances[row].name, 0)
    stretch = table.stretch(work.prompt_tokens)
    return float(table.waits_s(short=work.short).item(row) + own_tokens * stretch * table.token_s.item(row))


def row_of(table: Table, name: str) -> int | None:
    """Where an instance is, if it is in this table."""
    instance = table.names.get(name)
    return None if instance is None else instance.row


def decode(table: Table, work: Work, flow: float = 0.0) -> Floats:
    """TPOT, KV and batch terms for each instance, and `flow` for each transfer under way there.

    The step is that of the batch the sequence will meet on the whole: those there now, less those who will have
    gone before a usual answer is half written. A node of few but long sessions looks idle and is not; one whose
    many sessions are about to end looks full and is not. The caller's until it asks again for one of this table.
    """
    target_s = work.tpot_s or TPOT_USUAL_S
    return table.weigh_decode(1.0 / (target_s * target_s), 1.0, work.prompt_tokens + work.left_tokens, flow)


def disturbance(table: Table, work: Work, weights: Weights, stretch: float) -> Floats:
    """What its prefill would make those wait that decode there, for each instance."""
    found: Floats = table.token_s * table.sequences
    found *= weights.disturb_s * work.prompt_tokens * stretch
    return found


def too_late(table: Table, work: Work, costs: Costs, *, ready_at_s: float) -> Mask | None:
    """Where one more sequence, whose prompt is computed at `ready_at_s`, would miss its target: for the length of the
    steps, or because it would wait too long for a place in the batch: see spare_s. While nobody knows how long steps
    are: where there is no place. None: nowhere, or even an idle instance's steps would miss it."""
    tpot_s = work.tpot_s
    if tpot_s is None or not table.open or float(table.one_s.min()) > tpot_s:
        return None
    if not costs.known(table.instances[0].hello, table.role):
        late: Mask = table.free_at_s > 0.0
        return late
    late = table.joined_s > tpot_s
    late |= table.free_at_s > ready_at_s + spare_s(table, tpot_s, work.left_tokens)
    return late


def spare_s(table: Table, tpot_s: float, left_tokens: float) -> Floats:
    """How long a sequence may wait for its place once its prompt is computed, for each instance: what its target has to
    spare over all its tokens, and at most TURN_S."""
    found: Floats = np.minimum((tpot_s - table.joined_s) * left_tokens * SPARE, TURN_S)
    return found
