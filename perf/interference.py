"""Interference made visible: a few long answers being written while long prompts keep coming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from trtpd.perf.plots import SERIES, canvas
from trtpd.perf.prompt_text import Segment
from trtpd.perf.records import Record
from trtpd.perf.workload import Ask, Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESIDENTS = 4
RESIDENT_PROMPT_TOKENS = 100
FIRST_PROMPT_S = 5.0
LEAST_PAUSE_S = 2.0


def interference_workload(
    *, longest: int, tpot_s: float, prefill_s: float, prompt_tokens: int, prompts: int = 4
) -> Workload:
    """RESIDENTS answers written throughout, and `prompts` prompts of `prompt_tokens`, one every three unloaded
    prefills (`prefill_s`), the first after FIRST_PROMPT_S. Answers last as long as the KV and `tpot_s` let them."""
    every_s = max(3.0 * prefill_s, LEAST_PAUSE_S)
    length_s = FIRST_PROMPT_S + prompts * every_s
    answer = max(8, min(longest - RESIDENT_PROMPT_TOKENS, round(length_s / tpot_s)))
    residents = [
        Ask(segments=(Segment(1 + n, RESIDENT_PROMPT_TOKENS),), max_tokens=answer, kind="resident", at_s=0.0)
        for n in range(RESIDENTS)
    ]
    arriving = [
        Ask(
            segments=(Segment(100 + n, min(prompt_tokens, longest - 2)),),
            max_tokens=2,
            kind="prompt",
            at_s=round(FIRST_PROMPT_S + n * every_s, 3),
        )
        for n in range(prompts)
    ]
    return Workload(name="interference", seed=0, asks=(*residents, *arriving))


def plot(arms: Mapping[str, Sequence[Record]]) -> Figure:
    """For each arm the residents' token gaps over time; shaded from each prompt's arrival to its first token, and the
    figures in the title are of the gaps that end there."""
    with canvas(max(1, len(arms)), 1, height=2.1) as (figure, axes):
        right_s = 0.0
        for number, (axis, (name, records)) in enumerate(zip(axes, arms.items(), strict=False)):
            windows = disturbed(records)
            gaps = [gap for record in records if record.kind == "resident" for gap in timed_gaps(record)]
            x, y = [at_s for at_s, _ in gaps], [gap_s * 1e3 for _, gap_s in gaps]
            axis.plot(x, y, ".", color=SERIES[number % len(SERIES)], markersize=2.5)
            for from_s, to_s in windows:
                axis.axvspan(from_s, to_s, color="#f0d9d3", zorder=0, linewidth=0)
                axis.axvline(from_s, color="#c8553d", linewidth=0.8)
            axis.set_title(f"{name}{_summary([g for at_s, g in gaps if any(a <= at_s <= b for a, b in windows)])}")
            axis.set_yscale("log")
            axis.set_ylabel("gap before a token, ms")
            right_s = max([right_s, *(to_s for _, to_s in windows)])
        axes[-1].set_xlabel("s after the start; red line: a long prompt arrives, shaded until its first token")
        low = min(axis.get_ylim()[0] for axis in axes)
        high = max(axis.get_ylim()[1] for axis in axes)
        for axis in axes:
            axis.set_ylim(low, high)
            axis.set_xlim(0, right_s + FIRST_PROMPT_S)
        return figure


def disturbed(records: Sequence[Record]) -> list[tuple[float, float]]:
    """From each long prompt's arrival to its first token, or to its end if it had none."""
    return [
        (record.scheduled_s, record.at_s[0] if record.at_s else record.ended_s or record.scheduled_s)
        for record in records
        if record.kind == "prompt"
    ]


def timed_gaps(record: Record) -> list[tuple[float, float]]:
    """(instant, gap before it) of each response but the first."""
    return [(later, later - earlier) for earlier, later in pairwise(record.at_s)]


def _summary(gaps: Sequence[float]) -> str:
    if not gaps:
        return ""
    p50, p99, largest = (value * 1e3 for value in (np.median(gaps), np.percentile(gaps, 99), max(gaps)))
    return f": while prompts are computed p50 {p50:,.0f} ms, p99 {p99:,.0f} ms, largest {largest:,.0f} ms"
