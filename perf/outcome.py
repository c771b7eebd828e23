"""What became of each simulated request, and of all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from trtpd.errors import InternalError
from trtpd.runtime.core.events import Emit, Finish, Refuse
from trtpd.runtime.core.lifecycle import Timeline


class Targets(Protocol):
    """The part of a request that says when it is served well."""

    @property
    def ttft_s(self) -> float | None: ...

    @property
    def tpot_s(self) -> float | None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Outcome:
    """One request as its client saw it."""

    request_id: int
    arrived_s: float
    tokens: list[int] = field(default_factory=list)
    first_s: float | None = None
    second_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    state: str = ""
    reason: str = ""
    message: str = ""
    timeline: Timeline | None = None

    def emitted(self, emit: Emit, now_s: float) -> None:
        """Raises InternalError for a token that is not the next one, or comes after the end."""
        if emit.first_index != len(self.tokens) or self.state:
            raise InternalError(f"request {self.request_id}, {len(self.tokens)} tokens, {self.state!r}: {emit}")
        if not self.tokens:
            self.first_s = now_s
        elif self.second_s is None:
            self.second_s = now_s
        self.tokens.extend(emit.ids)
        self.last_s = now_s

    def end(self, command: Finish | Refuse, now_s: float) -> None:
        """Raises InternalError for a second end."""
        if self.state:
            raise InternalError(f"request {self.request_id} is {self.state} and ends again: {command}")
        self.ended_s, self.message = now_s, command.message
        if isinstance(command, Refuse):
            self.state, self.reason = "refused", command.code
        else:
            self.state, self.reason, self.timeline = command.state, command.reason, command.timeline

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None below two emissions, as of a client's records: several tokens at
        once have no pace."""
        if self.first_s is None or self.last_s is None or self.second_s is None:
            return None
        return (self.last_s - self.first_s) / (len(self.tokens) - 1)

    def kind(self, targets: Targets) -> str:
        """good (finished within its targets), late, unmeasured (it has a target for a pace, and none was seen),
        cancelled, "refused:CODE", "failed:CODE", or unfinished."""
        if self.state == "finished":
            if _above(self.ttft_s, targets.ttft_s) or _above(self.tpot_s, targets.tpot_s):
                return "late"
            at_once = len(self.tokens) > 1 and self.second_s is None
            return "unmeasured" if at_once and targets.tpot_s is not None else "good"
        if self.state in ("refused", "failed"):
            return f"{self.state}:{self.reason}"
        return self.state or "unfinished"


def _above(value: float | None, target: float | None) -> bool:
    return value is not None and target is not None and value > target


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Percentiles are over finished requests and None if there are none. `duration_s` runs to the last end;
    `goodput_per_s` counts good requests over it."""

    requests: int
    duration_s: float
    kinds: dict[str, int]
    output_tokens: int
    goodput_per_s: float
    ttft_s: dict[str, float] | None
    tpot_s: dict[str, float] | None
    second_token_s: dict[str, float] | None


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99; None for no values."""
    if not values:
        return None
    found = np.percentile(np.asarray(values), (50, 90, 99))
    return {name: float(value) for name, value in zip(("p50", "p90", "p99"), found, strict=True)}


def summarise(outcomes: Sequence[Outcome], requests: Sequence[Targets], *, duration_s: float) -> Summary:
    """`requests[i]` has the targets of `outcomes[i]`."""
    kinds = Counter(outcome.kind(targets) for outcome, targets in zip(outcomes, requests, strict=True))
    finished = [outcome for outcome in outcomes if outcome.state == "finished"]
    gaps = [o.second_s - o.first_s for o in finished if o.second_s is not None and o.first_s is not None]
    return Summary(
        requests=len(outcomes),
        duration_s=duration_s,
        kinds=dict(sorted(kinds.items())),
        output_tokens=sum(len(outcome.tokens) for outcome in outcomes),
        goodput_per_s=kinds["good"] / duration_s if duration_s > 0.0 else 0.0,
        ttft_s=percentiles([o.ttft_s for o in finished if o.ttft_s is not None]),
        tpot_s=percentiles([o.tpot_s for o in finished if o.tpot_s is not None]),
        second_token_s=percentiles(gaps),
    )
