"""Goodput and its kin, from records. Every request that was offered counts; nothing unknown is read as zero.

- *Goodput*: requests a second that finished within their targets. Refused, failed, cancelled and unmeasured ones were
  offered and count against it.
- *Attainment*: their share of the offered. *Completion*: the share that finished, in time or not.
- A quantity over no request is None, never 0.
- *Window*: from the end of the warm-up until requests stop coming due. Rates are over it: in a steady state as much
  ends in it as comes due. A window shorter than a good request takes (their median, to its last token) has no steady
  state: what came due in it is served behind it, at a pace that it doesn't show. There goodput is None where something
  was good; 0 stays 0.
- *Tokens a second*: those that arrived in the window, of whichever requests, by the same rule with all requests that
  finished; prompt tokens arrive with the first token of their answer.
- *Per unit*: over all GPUs or cores of the deployment, those of every pool and of the router alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from trtpd.errors import InputError
from trtpd.perf.records import Record
from trtpd.perf.resampling import (
    Distribution,
    Drift,
    Interval,
    distribution,
    drift,
    grouped_distribution,
    share,
    share_drift,
)
from trtpd.perf.slo import Slo

WARM_UP_SHARE = 0.1
WARM_UP_MOST_S = 30.0
DISTSERVE_GOAL = 0.9


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What served: all of it. `unit`: core or GPU."""

    units: int
    unit: str = "core"

    def __post_init__(self) -> None:
        if self.units < 1:
            raise InputError(f"the deployment has {self.units} {self.unit}s; it must have at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A way to say that a request was served well. `goal`: the share of offered requests that must be, for the rate to
    count at all (DistServe); None: those that were are counted (a rate of good requests)."""

    name: str
    text: str
    pace_s: Callable[[Record], float | None]
    goal: float | None = None

    def verdict(self, record: Record, slo: Slo) -> str:
        """good, late:ttft, late:tpot, late:both, refused:REASON, failed:REASON, cancelled, or unmeasured:REASON."""
        if record.state != "finished":
            return f"{record.state}:{record.reason}" if record.reason else record.state
        if record.ttft_s is None:
            return "unmeasured:no_token"
        ttft_s, pace_s = slo.ttft_for(record.prompt_tokens), self.pace_s(record)
        late = [
            name
            for name, value, target in (("ttft", record.ttft_s, ttft_s), ("tpot", pace_s, slo.tpot_s))
            if value is not None and target is not None and value > target
        ]
        if len(late) == 2:
            return "late:both"
        if late:
            return f"late:{late[0]}"
        return "unmeasured:one_response" if slo.tpot_s is not None and record.in_one_response else "good"


DEFINITIONS = {
    one.name: one
    for one in (
        Definition(
            name="trtpd",
            text="finished; first token and mean time of the further tokens within their targets",
            pace_s=lambda record: record.tpot_s,
        ),
        Definition(
            name="distserve",
            text=f"the offered rate, if at least {DISTSERVE_GOAL:.0%} of the requests meet both targets (OSDI 2024)",
            pace_s=lambda record: record.tpot_s,
            goal=DISTSERVE_GOAL,
        ),
        Definition(
            name="mooncake",
            text="finished; first token, and the mean of the longest 10 % of the token gaps, within the targets "
            "(FAST 2025)",
            pace_s=lambda record: record.longest_gaps_s,
        ),
    )
}


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """By one definition. `per_s` is None where its goal was missed, nothing was offered, or the window was shorter than
    one of the good requests took; from 0 on where the goal may have been met by chance."""

    good: int
    attainment: Interval | None
    per_s: Interval | None
    per_unit: float | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one run. Requests due in the window count (`offered`); those due before it, in the warm-up, do not
    (`cut`). Latencies are of those that finished, in seconds.

    `verdicts` are by `definition`; `kinds` says what each kind of request got of it. `no_rate` says why there is no
    goodput by it, or no tokens a second. `output_tokens` and `prompt_tokens` are those of the whole run, with the
    warm-up and what came behind the window. `itl` is over all token gaps (0 within a response), `response_gap` over
    those between responses; neither has answers that came in one.
    `tpot_spread` is p99 over p50 of the requests' TPOT. `drift`: of TTFT and TPOT, which are of those that finished,
    and of the attainment, which is of all.
    """

    definition: str
    window_s: float
    warm_up_s: float
    cut: int
    offered: int
    offered_per_s: float | None
    goodput: dict[str, Goodput]
    completion: Interval | None
    verdicts: dict[str, int]
    kinds: dict[str, dict[str, int]]
    ttft: Distribution | None
    tpot: Distribution | None
    second_token: Distribution | None
    itl: Distribution | None
    response_gap: Distribution | None
    total: Distribution | None
    tpot_spread: float | None
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    output_tokens: int
    prompt_tokens: int
    no_rate: str
    drift: dict[str, Drift]
    deployment: Deployment | None


def warm_up_for(duration_s: float) -> float:
    """What is cut from the beginning unless told otherwise: a tenth, at most WARM_UP_MOST_S."""
    return min(WARM_UP_SHARE * duration_s, WARM_UP_MOST_S)


def covered_s(records: Sequence[Record], until_s: float) -> float:
    """The end of the time that the arrivals cover: as many gaps as arrivals. Where the first is due at the very
    beginning and the run ends with the last, one gap is missing, and a mean one is added."""
    due_s = sorted(record.scheduled_s for record in records)
    if len(due_s) < 2 or due_s[0] > 0.0 or until_s > due_s[-1]:
        return until_s
    return until_s + due_s[-1] / (len(due_s) - 1)


def account(
    records: Sequence[Record],
    slo: Slo,
    *,
    until_s: float,
    warm_up_s: float | None = None,
    deployment: Deployment | None = None,
    seed: int = 0,
    definition: str = "trtpd",
) -> Figures:
    """Figures of the requests due in [warm-up, `until_s`]. `until_s` is when the last was due (for a closed loop,
    which has no such instant, when the last ended), or later. The same for the same records. `warm_up_s` None: the
    usual one; none where all requests were due in it, as in a closed loop with a user for each.

    Raises InputError for a warm-up that leaves nothing.
    """
    until_s = covered_s(records, until_s)
    cut_s = _usual_warm_up_s(records, until_s) if warm_up_s is None else warm_up_s
    if records and not 0.0 <= cut_s < max(until_s, 1e-9):
        raise InputError(f"a warm-up of {cut_s:g} s leaves nothing of a run of {until_s:g} s; give a shorter one")
    kept = sorted((r for r in records if r.scheduled_s >= cut_s), key=lambda r: (r.scheduled_s, r.number))
    window_s = max(until_s - cut_s, 0.0)
    rng = np.random.default_rng([seed, 3])
    verdicts = [DEFINITIONS[definition].verdict(record, slo) for record in kept]
    good = [record for record, verdict in zip(kept, verdicts, strict=True) if verdict == "good"]
    finished = [record for record in kept if record.state == "finished" and record.ttft_s is not None]
    tpot = distribution(_values(finished, lambda r: r.tpot_s), rng)
    goodputs = {name: _goodput(one, kept, slo, window_s, deployment, rng) for name, one in DEFINITIONS.items()}
    output_per_s, prompt_per_s = _tokens_per_s(records, cut_s, until_s)
    drifts = {
        "ttft": drift(_values(finished, lambda r: r.ttft_s), rng),
        "tpot": drift(_values(finished, lambda r: r.tpot_s), rng),
        "attainment": share_drift([verdict == "good" for verdict in verdicts], rng),
    }
    return Figures(
        definition=definition,
        window_s=window_s,
        warm_up_s=cut_s,
        cut=len(records) - len(kept),
        offered=len(kept),
        offered_per_s=_rate(len(kept), window_s) if kept else None,
        goodput=goodputs,
        completion=share([record.state == "finished" for record in kept], rng),
        verdicts=dict(sorted(Counter(verdicts).items())),
        kinds=_by_kind(kept, verdicts),
        ttft=distribution(_values(finished, lambda r: r.ttft_s), rng),
        tpot=tpot,
        second_token=distribution(_values(finished, lambda r: r.second_token_s), rng),
        itl=grouped_distribution([record.gaps_s() for record in finished], rng),
        response_gap=grouped_distribution([_response_gaps(record) for record in finished], rng),
        total=distribution(_values(finished, lambda r: r.total_s), rng),
        tpot_spread=tpot.p99.value / tpot.p50.value if tpot is not None and tpot.p50.value > 0.0 else None,
        output_tokens_per_s=output_per_s,
        prompt_tokens_per_s=prompt_per_s,
        output_tokens=sum(record.output_tokens for record in records),
        prompt_tokens=sum(record.prompt_tokens for record in records if record.at_s),
        no_rate=_no_rate(len(kept), good, finished, window_s),
        drift={name: one for name, one in drifts.items() if one is not None},
        deployment=deployment,
    )


def _by_kind(records: Sequence[Record], verdicts: Sequence[str]) -> dict[str, dict[str, int]]:
    """How often each kind of request got each verdict."""
    kinds: dict[str, Counter[str]] = {}
    for record, verdict in zip(records, verdicts, strict=True):
        kinds.setdefault(record.kind, Counter())[verdict] += 1
    return {kind: dict(sorted(counts.items())) for kind, counts in sorted(kinds.items())}


def attainment_over_scale(
    records: Sequence[Record], slo: Slo, scales: Sequence[float], *, warm_up_s: float, definition: str = "trtpd"
) -> list[tuple[float, float | None]]:
    """The share of offered requests served well when all targets are multiplied by each scale."""
    kept = [record for record in records if record.scheduled_s >= warm_up_s]
    judge = DEFINITIONS[definition]
    found: list[tuple[float, float | None]] = []
    for scale in scales:
        target = slo.scaled(scale)
        good = sum(judge.verdict(record, target) == "good" for record in kept)
        found.append((scale, good / len(kept) if kept else None))
    return found


def _goodput(
    definition: Definition,
    records: Sequence[Record],
    slo: Slo,
    window_s: float,
    deployment: Deployment | None,
    rng: np.random.Generator,
) -> Goodput:
    flags = [definition.verdict(record, slo) == "good" for record in records]
    attained = share(flags, rng)
    good = [record for record, flag in zip(records, flags, strict=True) if flag]
    rate = None if _shorter_than_one(window_s, good) else _rate(len(records), window_s)
    per_s: Interval | None = None
    if attained is not None and rate is not None:
        if definition.goal is None:
            per_s = attained.times(rate)
        elif attained.value >= definition.goal:
            surely = attained.low is not None and attained.low >= definition.goal
            per_s = Interval(rate, rate if surely else 0.0, rate)
    per_unit = per_s.value / deployment.units if per_s is not None and deployment is not None else None
    return Goodput(good=sum(flags), attainment=attained, per_s=per_s, per_unit=per_unit)


def _values(records: Sequence[Record], read: Callable[[Record], float | None]) -> list[float]:
    return [value for record in records if (value := read(record)) is not None]


def _response_gaps(record: Record) -> list[float]:
    return [later - earlier for earlier, later in zip(record.at_s, record.at_s[1:], strict=False)]


def _usual_warm_up_s(records: Sequence[Record], until_s: float) -> float:
    cut_s = warm_up_for(until_s)
    return cut_s if any(record.scheduled_s >= cut_s for record in records) else 0.0


def _shorter_than_one(window_s: float, served: Sequence[Record]) -> bool:
    """Whether the window is shorter than these requests took, by their median; not where there are none."""
    took_s = _values(served, lambda record: record.total_s)
    return bool(took_s) and window_s < float(np.median(took_s))


def _no_rate(counted: int, good: Sequence[Record], finished: Sequence[Record], window_s: float) -> str:
    """One line with what to do; empty where the rates are there, or nothing was offered."""
    served = next((some for some in (good, finished) if _shorter_than_one(window_s, some)), None)
    if served is None:
        return ""
    took_s = float(np.median(_values(served, lambda record: record.total_s)))
    return (
        f"The {counted} counted requests came due within {window_s:.3g} s, and one took {took_s:.3g} s to be served "
        "(median): that is one burst, of which no rate follows. Give more --requests, or a lower --rate."
    )


def _tokens_per_s(records: Sequence[Record], cut_s: float, until_s: float) -> tuple[float | None, float | None]:
    """Of answers and of prompts."""
    window_s = max(until_s - cut_s, 0.0)
    output, prompt = _tokens_within(records, cut_s, until_s), _prompts_within(records, cut_s, until_s)
    missed = output == 0 and any(record.at_s for record in records)
    if not records or missed or _shorter_than_one(window_s, [r for r in records if r.state == "finished"]):
        return None, None
    return _rate(output, window_s), _rate(prompt, window_s)


def _tokens_within(records: Sequence[Record], from_s: float, to_s: float) -> int:
    return sum(tokens for r in records for at_s, tokens in zip(r.at_s, r.tokens, strict=True) if from_s <= at_s <= to_s)


def _prompts_within(records: Sequence[Record], from_s: float, to_s: float) -> int:
    """Tokens of the prompts whose first token came in that time."""
    return sum(r.prompt_tokens for r in records if r.at_s and from_s <= r.at_s[0] <= to_s)


def _rate(count: int, window_s: float) -> float | None:
    return count / window_s if window_s > 0.0 else None
