"""The ladder: how the system bends before it breaks. Five rungs, up by pressure, down with hysteresis, never silent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Rung(IntEnum):
    """What each rung adds to those below it."""

    NORMAL = 0
    SHORT_LOCAL = 1
    """Short prompts may be prefilled by decode instances."""
    LONG_WAIT = 2
    """Long prompts go to the mixed pool, or wait for a prefill instance without other work."""
    SHED_LOW = 3
    """Requests of priority below 0 are refused."""
    REFUSE = 4
    """Every new request is refused."""


UP_AT = (0.5, 0.8, 1.0, 3.0)
"""Pressure at which the next rung is taken, from each rung but the last."""

DOWN_AT = 0.6
"""A rung is left when pressure is below this part of what led to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """How near the deployment is to breaking its targets: 1 is the point at which it does.

    `value` is the worst of what was looked at, `reason` the code of that: prefill_backlog (predicted wait for the
    first token by its target), decode_full (KV and batch places promised), held_kv (prefill's KV by its watermark),
    pool_gone (a role has no instance left and another does its work).
    """

    value: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The ladder moved."""

    at_s: float
    rung: Rung
    former: Rung
    reason: str
    pressure: float


class Ladder:
    """One rung at a time; a rung is kept for `dwell_up_s` before the next higher one and for `dwell_down_s` of
    low pressure before the next lower one. `since_s`: when it came to its rung; None before it has begun."""

    def __init__(self, *, dwell_up_s: float, dwell_down_s: float) -> None:
        self.rung = Rung.NORMAL
        self.reason = ""
        self.since_s: float | None = None
        self.pressure = Pressure(value=0.0, reason="")
        self.ups = 0
        self.downs = 0
        self._dwell_up_s = dwell_up_s
        self._dwell_down_s = dwell_down_s
        self._calm_since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """There is something to serve with from now on."""
        if self.since_s is None:
            self.since_s = now_s

    def look(self, now_s: float, pressure: Pressure) -> Change | None:
        """Takes in the pressure now; returns the change it makes, if any."""
        self.pressure = pressure
        if self.rung < Rung.REFUSE and pressure.value >= UP_AT[self.rung]:
            self._calm_since_s = None
            if self.since_s is None or self.rung is Rung.NORMAL or now_s - self.since_s >= self._dwell_up_s:
                return self._move(now_s, Rung(self.rung + 1), pressure.reason)
        elif self.rung > Rung.NORMAL and pressure.value < DOWN_AT * UP_AT[self.rung - 1]:
            if self._calm_since_s is None:
                self._calm_since_s = now_s
            if now_s - self._calm_since_s >= self._dwell_down_s:
                return self._move(now_s, Rung(self.rung - 1), "calm")
        else:
            self._calm_since_s = None
        return None

    def _move(self, now_s: float, rung: Rung, reason: str) -> Change:
        former, self.rung = self.rung, rung
        self.since_s, self.reason, self._calm_since_s = now_s, reason, None
        self.ups += rung > former
        self.downs += rung < former
        return Change(at_s=now_s, rung=rung, former=former, reason=reason, pressure=self.pressure.value)
