"""Where requests of a comparison spend their time, at the rate that its report shows."""

from __future__ import annotations

from trtpd.perf.compare_ratio import usable
from trtpd.perf.comparison import Comparison
from trtpd.perf.records import Record
from trtpd.perf.stages import FirstToken, first_token
from trtpd.perf.verdict import arms_of


def shown_rate(comparison: Comparison) -> float:
    """The rate at which most arms were measured; of several the one nearest to the middle."""
    rates, arms = comparison.rates, arms_of(comparison)
    middle = len(rates) // 2

    def worth(index: int) -> tuple[int, int]:
        return sum(bool(usable(comparison.points, arm, rates[index])) for arm in arms), -abs(index - middle)

    return rates[max(range(len(rates)), key=worth)]


def first_tokens(comparison: Comparison) -> dict[str, FirstToken]:
    """Of the arms whose server tells, at the rate that is shown."""
    rate = shown_rate(comparison)
    found = ((arm, first_token(finished(comparison, arm, rate))) for arm in arms_of(comparison))
    return {arm: one for arm, one in found if one is not None}


def finished(comparison: Comparison, arm: str, rate: float) -> list[Record]:
    """All counted requests of an arm that finished."""
    points = usable(comparison.points, arm, rate)
    return [r for p in points for r in p.records if r.state == "finished" and r.scheduled_s >= p.figures.warm_up_s]
