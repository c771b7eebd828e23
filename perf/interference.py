"""Interference made visible: a few long answers being written while long prompts keep coming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """For each arm the residents' token gaps over time; shaded from each prompt's arrival to its first token."""
    with canvas(max(1, len(arms)), 1, height=1.9) as (figure, axes):
        for number, (axis, (name, records)) in enumerate(zip(axes, arms.items(), strict=False)):
            residents = [record for record in records if record.kind == "resident"]
            x = [at_s for record in residents for at_s in record.at_s[1:]]
            gaps = [b - a for record in residents for a, b in zip(record.at_s, record.at_s[1:], strict=False)]
            axis.plot(x, np.array(gaps) * 1e3, ".", color=SERIES[number % len(SERIES)], markersize=2.5)
            for record in records:
                if record.kind == "prompt":
                    until_s = record.at_s[0] if record.at_s else record.ended_s or record.scheduled_s
                    axis.axvspan(record.scheduled_s, until_s, color="#f0d9d3", zorder=0, linewidth=0)
                    axis.axvline(record.scheduled_s, color="#c8553d", linewidth=0.8)
            worst = f", p99 {np.percentile(gaps, 99) * 1e3:,.0f} ms, largest {max(gaps) * 1e3:,.0f} ms" if gaps else ""
            median = f": p50 {np.median(gaps) * 1e3:,.0f} ms" if gaps else ""
            axis.set_title(f"{name}{median}{worst}")
            axis.set_yscale("log")
            axis.set_ylabel("gap, ms")
        axes[-1].set_xlabel("s; red: a long prompt arrives, shaded until its first token")
        low = min(axis.get_ylim()[0] for axis in axes)
        high = max(axis.get_ylim()[1] for axis in axes)
        right = max(axis.get_xlim()[1] for axis in axes)
        for axis in axes:
            axis.set_ylim(low, high)
            axis.set_xlim(0, right)
        return figure
