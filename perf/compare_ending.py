"""How a comparison ended: what is there, what was left out and why, what was not run, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trtpd.perf.comparison import Choice, Comparison, Point, RunState, top_rate

WHY = {
    "budget": "the budget ended first",
    "interrupted": "interrupted first",
    "complete": "away from this arm's best",
}


def run_states(
    arms: Sequence[str],
    choices: Sequence[Choice],
    points: Sequence[Point],
    rates: Sequence[float],
    repeats: int,
    *,
    searched: bool,
    how: str,
) -> tuple[RunState, ...]:
    """What became of each run of each arm: those that are there, and those that `rates` and `repeats` want. In a search
    (`searched`) further repeats are wanted at the best rate only."""
    variants = {choice.arm: choice.variant for choice in choices}
    found = []
    for arm in arms:
        there = {(p.file.rate, p.file.repeat): p for p in points if p.file.arm == arm}
        wanted = {(rate, repeat) for rate in rates for repeat in range(1 if searched else repeats)}
        top = top_rate(there.values())
        if searched and top is not None:
            wanted |= {(top, repeat) for repeat in range(1, repeats)}
        reason = WHY[how] if arm in variants else f"not tuned yet: {WHY[how]}"
        for rate, repeat in sorted(wanted | there.keys()):
            point = there.get((rate, repeat))
            if point is not None:
                found.append(_state(point))
                continue
            found.append(
                RunState(
                    arm=arm,
                    variant=variants.get(arm, ""),
                    rate=rate,
                    repeat=repeat,
                    state="not run",
                    reason=reason,
                )
            )
    return tuple(found)


def _state(point: Point) -> RunState:
    file = point.file
    nothing = point.figures.goodput[point.definition].good == 0
    return RunState(
        arm=file.arm,
        variant=file.variant,
        rate=file.rate,
        repeat=file.repeat,
        state="left out" if file.fault else "served nothing" if nothing else "measured",
        reason=file.fault,
    )


def ending(comparison: Comparison) -> list[str]:
    """Lines for a person. None for a comparison that came to its end with all its runs."""
    end = comparison.end
    left_out = [
        f"left out: {run.arm} at {run.rate:g} requests/s, repeat {run.repeat + 1}: {run.reason}"
        for run in comparison.runs
        if run.state == "left out"
    ]
    if end.how == "complete":
        again = "the same command makes what was left out once more; end other work on this machine before"
        return [*left_out, again] if left_out else []
    rest = f"; what remains takes about {math.ceil(end.rest_s)} s or more" if end.rest_s else ""
    if end.how == "interrupted":
        first = f"interrupted after {end.spent_s:.0f} s"
    else:
        first = (
            f"the budget of {end.budget_s:g} s ended after {end.spent_s:.0f} s: the next run, {end.next_step}, may "
            f"take {math.ceil(end.next_needs_s)} s"
        )
    more = " (with a larger --budget-s it gets further at once)" if end.how == "budget" else ""
    arms = list(dict.fromkeys(run.arm for run in comparison.runs))
    return [
        f"{first}; all finished runs are kept in {end.folder}, and the same command goes on{more}{rest}",
        "; ".join(_arm(comparison, arm) for arm in arms),
        *left_out,
    ]


def _arm(comparison: Comparison, arm: str) -> str:
    """colocated: measured at 0.8, not run at 1.2 (2 runs)."""
    mine = [run for run in comparison.runs if run.arm == arm]
    parts = []
    if not any(run.variant for run in mine):
        runs = comparison.end.tuning_runs.get(arm, 0)
        parts.append(f"not tuned yet ({runs or 'no'} tuning run{'' if runs == 1 else 's'} there)")
    for state in ("measured", "served nothing", "left out", "not run"):
        runs_at: dict[float, int] = {}
        for run in mine:
            if run.state == state:
                runs_at[run.rate] = runs_at.get(run.rate, 0) + 1
        if runs_at:
            parts.append(f"{state} at " + ", ".join(f"{r:g}" + f" ({n} runs)" * (n > 1) for r, n in runs_at.items()))
    return f"{arm}: {', '.join(parts)}"


def unusable_why(comparison: Comparison, arm: str) -> str:
    """Why an arm has no usable run, in brackets; "" where nothing is known."""
    mine = [run for run in comparison.runs if run.arm == arm]
    left_out = [run for run in mine if run.state == "left out"]
    if left_out:
        return f" ({len(left_out)} left out: {left_out[-1].reason})"
    reasons = sorted({run.reason for run in mine if run.state == "not run"})
    return f" ({'; '.join(reasons)})" if reasons else ""


def skipped(
    choices: Sequence[Choice], points: Sequence[Point], rates: Sequence[float], *, searched: bool
) -> Iterator[str]:
    """What a search that came to its end had no reason to measure, and what of the tuning could not be used."""
    for choice in choices:
        measured = {point.file.rate for point in points if point.file.arm == choice.arm}
        left = [f"{rate:g}" for rate in rates if rate not in measured]
        if searched and measured and left:
            yield f"{choice.arm} was not measured at {', '.join(left)} requests/s: away from its best."
        if choice.untried:
            yield f"{choice.arm}: not tried in tuning: {'; '.join(choice.untried)}."
        for label, fault in choice.unusable.items():
            yield f"{choice.arm}: not ranked in tuning, since its run was disturbed twice: {label} ({fault})."
