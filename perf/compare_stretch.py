"""Which rows of a trace each run of a comparison asks: the tuning's, and each repeat's, apart if there are enough.

Run 0 (the tuning) begins at the first row, run 1 at the middle, then at the quarters and the eighths: where a run
begins does not depend on how many there are in all, so further repeats can be added later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True)
class Stretch:
    """`count` rows from `first` on."""

    first: int
    count: int

    def meets(self, other: Stretch) -> bool:
        """Whether a row is in both."""
        return self.first < other.first + other.count and other.first < self.first + self.count

    def __str__(self) -> str:
        return f"{self.first} to {self.first + self.count - 1}"


def stretch(rows: int, count: int, run: int) -> Stretch:
    """`count` of the trace's `rows` for that run: all of them if there are no more, and otherwise always so many, if
    need be from before where the run's own would begin."""
    count = min(count, rows)
    return Stretch(min(int(rows * _place(run)), rows - count), count)


def _place(run: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, ... (van der Corput's sequence)."""
    place, part = 0.0, 0.5
    while run:
        place += part * (run & 1)
        run, part = run >> 1, part / 2
    return place


def told(rows: int, runs: Sequence[tuple[str, Stretch]]) -> str:
    """A sentence on which rows were asked by which run, and whether some were asked by several."""
    listed = ", ".join(f"{name} {one}" for name, one in runs)
    shared = [f"{a} and {b}" for (a, one), (b, other) in combinations(runs, 2) if one.meets(other)]
    if not shared:
        return f"Each run had a stretch of the trace of its own ({rows} rows): {listed}."
    return (
        f"The trace is not long enough ({rows} rows): {'; '.join(shared)} share requests ({listed}), so they are no "
        "independent runs. Lower rates, a shorter --point-s or a longer trace would be."
    )
