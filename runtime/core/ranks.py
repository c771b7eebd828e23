"""Instances of one role as columns, so that the best of a thousand are found without a look at each in Python.

A row is brought up to date when something that bears on placement changes (a hold, health, a factor), and
every few reports for what only drifts (contexts that grow by a token).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappush, heapreplace

import numpy as np
import numpy.typing as npt

from trtpd.runtime.core.cost import Costs
from trtpd.runtime.core.events import Role
from trtpd.runtime.core.instance import Instance

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

REPORTS_PER_REFRESH = 8


COLUMNS = 20
SHORT_FITS = 19

CAUTION = 1.1
"""By so much joined_s is longer than predicted: a full instance works at this bound, and half of its tokens would
come later than a bare prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the work an instance is given ahead (see Policy), and the weights that its row is worked out
    with (see score.Weights)."""

    placed_per_batch: float = 2.0
    ahead_s: float = 0.5
    tpot_s: float = 0.5
    kv_s: float = 0.5
    batch_s: float = 0.1


def places_s(instance: Instance, step_s: float, places: int) -> list[float]:
    """Seconds until each of so many places is free for one more, ascending; as many fewer as are free. Those that write
    leave when their answers are expected to end; those that don't yet take what comes free, in their order."""
    lefts = [(hold.writes, hold.left_tokens) for hold in instance.holds.values() if hold.decodes]
    found = sorted(left * step_s for writes, left in lefts if writes)
    found = found[max(0, len(found) - places) :]  # those that end before free no place
    for writes, left in lefts:
        if writes:
            continue
        if len(found) < places:
            heappush(found, left * step_s)
        else:
            heapreplace(found, found[0] + left * step_s)
    return sorted(found)


class Table:
    """Instances of one role in one group. Columns, each as long as there are instances:

    capacity      longest sequence it could hold if it were empty; -1 while it takes nothing new
    room          longest sequence its free KV can take now; -1 while it takes nothing new
    prefill_fits  longest prompt it can take now: room, or -1 while enough prompt waits there already: of long ones
                  only, where short ones don't wait for them · short_fits: the same of a short prompt
    whole_fits    longest sequence it can take now: room, or -1 while its batch is promised
    rate          prompt tokens a second, 0 while it takes nothing new
    sequences     that decode there or will · left: tokens they will write yet, all together
    one_s         a step of one sequence · each_s: what each further one adds
    flows         transfers into or out of it
    joined_s      a step once one more has joined; 0 while there is none, where no target forbids it
    free_at_s     the instant at which its batch has a place for one more; 0 while it has

    wait_s        seconds of prompts that wait there · short_wait_s: those before a short one
    token_s       seconds per prompt token

    `decode_terms` and `prefill_terms` are columns that a score is a weighted sum of: see score.py. `hosts` are the
    numbers of the instances' hosts.
    """

    def __init__(self, role: Role, costs: Costs, limits: Limits) -> None:
        self.role: Role = role
        self.instances: list[Instance] = []
        self.names: dict[str, Instance] = {}
        self.hosts: list[int] = []
        self.open = 0
        self.usual_tokens = 128.0
        self._costs = costs
        self._limits = limits
        self._longest: float | None = None
        self._rates: tuple[float, float] | None = None
        self._data: Floats = np.zeros((COLUMNS, 8))
        self._decode_weights: Floats = np.zeros(5)
        self._prefill_weights: Floats = np.zeros(4)
        self._view()

    def __len__(self) -> int:
        return len(self.instances)

    def _view(self) -> None:
        """Names the columns in use. Anew after every change of their number: old views would show old memory."""
        data = self._data[:, : len(self.instances)]
        self._longest, self._rates = None, None
        self.capacity, self.room, self.prefill_fits, self.whole_fits, self.rate = data[0:5]
        self.sequences, self.left, self.one_s, self.each_s, self.joined_s, self.free_at_s = data[5:11]
        self.decode_terms: Floats = data[11:16]
        self.prefill_terms: Floats = data[15:19]
        self.flows, self.wait_s, self.token_s, self.short_wait_s = data[15:19]
        self.short_fits = data[SHORT_FITS]
        self._bounds: tuple[float, float, float] | None = None
        self._scores: Floats = np.zeros((2, len(self.instances)))
        self._decode_scores, self._prefill_scores = self._scores

    def add(self, instance: Instance, now_s: float) -> None:
        instance.row = len(self.instances)
        self.instances.append(instance)
        self.hosts.append(instance.host)
        self.names[instance.name] = instance
        if instance.row == self._data.shape[1]:
            # Not a power of two: columns whose beginnings lie pages apart push each other out of the cache.
            more = np.zeros((COLUMNS, self._data.shape[1] + 8))
            self._data = np.concatenate((self._data, more), axis=1)
        self._data[:, instance.row] = 0.0
        self._data[0, instance.row] = -1.0
        self._view()
        self.refresh(instance, now_s)

    def remove(self, instance: Instance) -> None:
        """The last row takes its place."""
        del self.names[instance.name]
        last, last_host = self.instances.pop(), self.hosts.pop()
        self.open -= bool(self._data[0, instance.row] >= 0.0)
        if last is not instance:
            self._data[:, instance.row] = self._data[:, last.row]
            self.instances[instance.row], self.hosts[instance.row] = last, last_host
            last.row = instance.row
        self._view()

    def stretch(self, tokens: int) -> float:
        """See Costs. The instances of a table are of one build."""
        return self._costs.stretch(self.instances[0].hello, self.role, tokens) if self.instances else 1.0

    def refresh(self, instance: Instance, now_s: float) -> bool:
        """Brings its row up to date. True if it can be given prompts of a kind that it could not be given before."""
        row, found = instance.row, self._row(instance, now_s)
        if (found[0] >= 0.0) != (self.capacity.item(row) >= 0.0):
            self.open += 1 if found[0] >= 0.0 else -1
            self._longest = None
        if found[4] != self.rate.item(row):
            self._rates = None
        long_full, short_full = self.prefill_fits.item(row) < 0.0, self.short_fits.item(row) < 0.0
        self._rebound(row, min(found[2], found[SHORT_FITS]), found[3], found[9])
        self._data[:, row] = found
        return (long_full and found[2] >= 0.0) or (short_full and found[SHORT_FITS] >= 0.0)

    def _row(self, instance: Instance, now_s: float) -> tuple[float, ...]:
        """Its row as it should be, column by column."""
        hello, limits = instance.hello, self._limits
        is_open = instance.usable(now_s)
        token_s = self._costs.token_s(hello, self.role) * instance.factor
        wait_s, short_s, takes_long, takes_short = self._lines(instance, token_s)
        kv_tokens = hello.kv_blocks * hello.tokens_per_block
        fits = -1.0
        if is_open:
            free_tokens = kv_tokens - instance.committed_blocks * hello.tokens_per_block
            fits = float(min(free_tokens, instance.capacity_tokens))
        placed, sequences = len(instance.holds), instance.sequences
        one_s, each_s = self._costs.decode_s(hello, self.role, instance.context_tokens / max(sequences, 1))
        one_s, each_s = one_s * instance.factor, each_s * instance.factor
        full_s = one_s + each_s * (min(sequences + 1, hello.max_batch) - 1)
        free_at_s = 0.0
        if sequences >= hello.max_batch:
            free_at_s = now_s + places_s(instance, full_s, hello.max_batch)[0]
        met = min(sequences, 2.0 * instance.left_tokens / self.usual_tokens)
        step_s = one_s + each_s * met
        kv, kv_token = (instance.context_tokens + instance.left_tokens) / kv_tokens, 1.0 / kv_tokens
        crowd = limits.batch_s * (placed + 1) / hello.max_batch
        whole_fits = fits if placed < limits.placed_per_batch * hello.max_batch else -1.0
        return (
            instance.capacity_tokens if is_open else -1.0,
            fits,
            fits if takes_long else -1.0,
            whole_fits,
            1.0 / token_s if is_open else 0.0,
            sequences,
            instance.left_tokens,
            one_s,
            each_s,
            CAUTION * full_s if sequences else 0.0,
            free_at_s,
            limits.tpot_s * step_s * step_s,
            limits.kv_s * kv * kv + crowd + instance.jitter,
            limits.kv_s * 2.0 * kv * kv_token,
            limits.kv_s * kv_token * kv_token,
            instance.flows,
            wait_s + instance.jitter,
            token_s,
            short_s + instance.jitter,
            fits if takes_short else -1.0,
        )

    def _lines(self, instance: Instance, token_s: float) -> tuple[float, float, bool, bool]:
        """(seconds of prompts that wait there, of those before a short one, whether it takes one more long prompt, and
        one more short one)."""
        hello, ahead_s = instance.hello, self._limits.ahead_s
        # An engine that reports no chunks seems to have its whole prompt ahead until the seal, so it gets a second.
        ahead = 1 if hello.capabilities.chunk_events else 2
        wait_s = instance.queued_tokens * token_s
        if not hello.capabilities.shorter_first:
            takes = wait_s <= ahead_s or instance.prefilling < ahead
            return wait_s, wait_s, takes, takes
        shorts, short_s = instance.short_prefilling, instance.short_tokens * token_s
        longs, longs_s = instance.prefilling - shorts, wait_s - short_s
        if longs_s > 0.0:  # a chunk under way is not interrupted
            short_s += min(instance.load.step_s, longs_s)
        return wait_s, short_s, longs_s <= ahead_s or longs < ahead, short_s <= ahead_s or shorts < ahead

    def _rebound(self, row: int, prefill_fits: float, whole_fits: float, joined_s: float) -> None:
        """Keeps `bounds` for a row that is about to change, or gives them up if it may be the one that sets them."""
        if self._bounds is None:
            return
        least_prefill, least_whole, most_s = self._bounds
        if (
            (min(self.prefill_fits.item(row), self.short_fits.item(row)) <= least_prefill < prefill_fits)
            or (self.whole_fits.item(row) <= least_whole < whole_fits)
            or (self.joined_s.item(row) >= most_s > joined_s)
        ):
            self._bounds = None
        else:
            self._bounds = min(least_prefill, prefill_fits), min(least_whole, whole_fits), max(most_s, joined_s)

    @property
    def bounds(self) -> tuple[float, float, float]:
        """What every instance keeps: the least of `prefill_fits` and `short_fits` and of `whole_fits`, and the most of
        `joined_s`. The table must not be empty."""
        if self._bounds is None:
            least_prefill = min(float(self.prefill_fits.min()), float(self.short_fits.min()))
            self._bounds = least_prefill, float(self.whole_fits.min()), float(self.joined_s.max())
        return self._bounds

    def weigh_decode(self, tpot: float, one: float, grows: float, flow: float) -> Floats:
        """The sum of `decode_terms` so weighted, for each instance: the caller's until it asks again."""
        weights = self._decode_weights
        weights[0], weights[1], weights[2], weights[3], weights[4] = tpot, one, grows, grows * grows, flow
        found: Floats = weights.dot(self.decode_terms, self._decode_scores)
        return found

    def waits_s(self, *, short: bool) -> Floats:
        """Seconds of the prompts before one more."""
        found: Floats = self.short_wait_s if short else self.wait_s
        return found

    def fits(self, *, short: bool) -> Floats:
        """The longest prompt of its kind that each can take now."""
        found: Floats = self.short_fits if short else self.prefill_fits
        return found

    def weigh_prefill(self, flow: float, wait: float, token: float, *, short: bool) -> Floats:
        """The sum of `prefill_terms` so weighted, for each instance: the caller's until it asks again."""
        weights = self._prefill_weights
        weights[0], weights[2] = flow, token
        weights[1], weights[3] = (0.0, wait) if short else (wait, 0.0)
        found: Floats = weights.dot(self.prefill_terms, self._prefill_scores)
        return found

    def idle(self) -> list[int]:
        """Rows of instances on which nothing decodes."""
        found: list[int] = np.flatnonzero(self.sequences == 0.0).tolist()
        return found

    def stale(self, instance: Instance, now_s: float) -> bool:
        """Whether what decides feasibility in its row is not what the instance says: for checks. Changes nothing. How
        long a step under way takes, which a line of short prompts waits for, is told only now and then: that line is
        compared where it is empty, and so open."""
        seen, found = self._data[:, instance.row].tolist(), self._row(instance, now_s)
        shorts_open = instance.short_prefilling == 0 and instance.hello.capabilities.shorter_first
        return tuple(seen[:4]) != found[:4] or (shorts_open and seen[SHORT_FITS] != found[SHORT_FITS])

    def can_hold(self, tokens: int) -> bool:
        """Whether one that serves now could hold so many if it were empty."""
        if self._longest is None:
            self._longest = float(self.capacity.max()) if self.instances else -1.0
        return tokens <= self._longest

    @property
    def rates(self) -> tuple[float, float]:
        """Prompt tokens a second of all that serve together, and of the fastest."""
        if self._rates is None:
            self._rates = (float(self.rate.sum()), float(self.rate.max())) if self.instances else (0.0, 0.0)
        return self._rates

    def queue(self, *, short: bool = False) -> tuple[float, float]:
        """(prompt tokens before one more at those that serve, their prompt tokens a second together)."""
        return float(np.dot(self.waits_s(short=short), self.rate)), self.rates[0]
