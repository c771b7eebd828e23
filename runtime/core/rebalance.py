"""Elasticity: whether one more instance should prefill, or decode. Pure; from what is offered, not from what is served.

Demand is measured where requests arrive, refused ones included: measured at the output it could never exceed what
there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

WINDOW_S = 10.0
"""Time constant of the offered rates."""

BUSY = 0.7
"""Below this use of the busier pool nothing needs to change, whatever the balance."""

ATTAINED = 0.98
"""The same for the part of arrivals that were expected to meet their targets."""

NEXT = 0.25
"""The part of the usual time that a further switch of the same kind has to have held."""

SHORT = 0.95
"""Use of both pools, at the best split, from which on an instance is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """What there is: instances that serve, and what one of each does in a second."""

    prefill: int
    decode: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """`kind` "switch": an instance of the other role should become `role`; "add": one more of `role` is needed.
    `gain`: capacity after it by capacity now. `why` for people."""

    kind: Literal["switch", "add"]
    role: Literal["prefill", "decode"]
    gain: float
    why: str


class Offered:
    """Prompt and output tokens asked for per second, and how much of it was expected to be served in time."""

    def __init__(self) -> None:
        self.prompt_tokens_per_s = 0.0
        self.output_tokens_per_s = 0.0
        self.attained = 1.0
        self._at_s: float | None = None

    def note(self, now_s: float, prompt_tokens: int, output_tokens: float, *, in_time: bool) -> None:
        """One arrival, admitted or not."""
        self.decay(now_s)
        self.prompt_tokens_per_s += prompt_tokens / WINDOW_S
        self.output_tokens_per_s += output_tokens / WINDOW_S
        self.attained += 0.02 * (float(in_time) - self.attained)

    def decay(self, now_s: float) -> None:
        """To be called before the rates are read."""
        if self._at_s is not None and now_s > self._at_s:
            factor = math.exp((self._at_s - now_s) / WINDOW_S)
            self.prompt_tokens_per_s *= factor
            self.output_tokens_per_s *= factor
        self._at_s = now_s if self._at_s is None else max(now_s, self._at_s)


class Rebalancer:
    """Remembers since when one role has been the shorter one; proposes only what has held for `after_s`, since a
    switch takes an instance out of service for a while. A role that stays the shorter one after a switch was made gets
    its next instance sooner (NEXT): the load has turned, it does not swing."""

    def __init__(self, *, after_s: float, gain: float) -> None:
        self.offered = Offered()
        self.last: Proposal | None = None
        self._after_s = after_s
        self._gain = gain
        self._wanted: tuple[str, str] | None = None
        self._since_s = 0.0
        self._said: tuple[str, str] | None = None
        self._said_at: tuple[int, int] | None = None

    def propose(self, now_s: float, pools: Pools, *, backlog_tokens: int) -> Proposal | None:
        """What should change now. `backlog_tokens`: prompt tokens that wait in the router."""
        self.offered.decay(now_s)
        found = self._best(pools, backlog_tokens)
        self.last = found
        wanted = None if found is None else (found.kind, found.role)
        if wanted != self._wanted:
            self._wanted, self._since_s = wanted, now_s
            if found is not None and self._said is not None and found.role != self._said[1]:
                self._said = None
        split = (pools.prefill, pools.decode)
        heeded = self._said_at is not None and split != self._said_at
        again = heeded and wanted is not None and wanted == self._said and wanted[0] == "switch"
        if found is None or now_s - self._since_s < self._after_s * (NEXT if again else 1.0):
            return None
        self._said, self._said_at, self._since_s = wanted, split, now_s
        return found

    def _best(self, pools: Pools, backlog_tokens: int) -> Proposal | None:
        if not (pools.prefill and pools.decode and pools.prefill_tokens_per_s and pools.decode_tokens_per_s):
            return None
        prompt = self.offered.prompt_tokens_per_s + backlog_tokens / WINDOW_S
        need_p = prompt / pools.prefill_tokens_per_s
        need_d = self.offered.output_tokens_per_s / pools.decode_tokens_per_s
        now = use(need_p, need_d, pools.prefill, pools.decode)
        if now < BUSY and self.offered.attained >= ATTAINED:
            return None
        more_p = use(need_p, need_d, pools.prefill + 1, pools.decode - 1)
        more_d = use(need_p, need_d, pools.prefill - 1, pools.decode + 1)
        after, role = min((more_p, "prefill"), (more_d, "decode"))
        load = f"prefill {need_p / pools.prefill:.0%}, decode {need_d / pools.decode:.0%} of capacity asked for"
        if after > 0.0 and now / after >= self._gain:
            return self._proposal("switch", role, now / after, load)
        if now > SHORT:
            short = "prefill" if need_p / pools.prefill > need_d / pools.decode else "decode"
            return self._proposal("add", short, 1.0, load)
        return None

    @staticmethod
    def _proposal(kind: Literal["switch", "add"], role: str, gain: float, load: str) -> Proposal:
        return Proposal(kind=kind, role="prefill" if role == "prefill" else "decode", gain=gain, why=load)


def use(need_p: float, need_d: float, prefill: int, decode: int) -> float:
    """Use of the busier pool; infinite with nobody in one."""
    if prefill < 1 or decode < 1:
        return math.inf
    return max(need_p / prefill, need_d / decode)
