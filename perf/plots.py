"""Plots, drawn by matplotlib (extra `bench`): figures in, SVG for the page or PNG for a file out.

One style, one colour per thing in every plot, axes that begin at 0 unless a logarithm is the point.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trtpd.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "good": "#2a9d8f",
    "late": "#e9a23b",
    "refused": "#8d99ae",
    "failed": "#c8553d",
    "cancelled": "#b8b8b8",
    "unmeasured": "#d7c9e8",
    "queue": "#8d99ae",
    "prefill": "#3d6fb6",
    "transfer": "#c8553d",
    "decode": "#2a9d8f",
}
SERIES = ("#3d6fb6", "#c8553d", "#2a9d8f", "#e9a23b", "#7a5195", "#5c677d")
STYLE: dict[str, object] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "path",
    "svg.hashsalt": "trtpd",
    "figure.dpi": 110,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A named sequence of values, with a target to be drawn if there is one."""

    title: str
    values: Sequence[float]
    unit: str = "ms"
    target: float | None = None


@contextmanager
def canvas(rows: int, columns: int, *, width: float = 9.0, height: float = 3.2) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of ROWS x COLUMNS axes in our style. Raises InputError if matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise InputError(
            "a report needs matplotlib; install it: `pip install '.[bench]'` in trtpd's source folder"
        ) from error
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = NewFigure(figsize=(width, height * rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, [one for row in axes for one in row]


def svg(figure: Figure) -> str:
    """As an element for a page. The same figure gives the same text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), count=1, flags=re.DOTALL)


def png(figure: Figure, path: Path) -> None:
    """Twice the size of the screen's."""
    import matplotlib

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure.savefig(path, format="png", dpi=180, metadata={"Software": None})


def distributions(curves: Sequence[Curve]) -> Figure:
    """For each curve the share of its values up to x, on a logarithmic x where they span more than a decade."""
    columns = min(2, max(1, len(curves)))
    rows = -(-len(curves) // columns)
    with canvas(rows, columns, height=2.6) as (figure, axes):
        for curve, axis in zip(curves, axes, strict=False):
            _distribution(axis, curve)
        for axis in axes[len(curves) :]:
            axis.set_visible(False)
        return figure


def _distribution(axis: Axes, curve: Curve) -> None:
    values = np.sort(np.asarray(curve.values, dtype=np.float64))
    axis.set_title(curve.title)
    axis.set_xlabel(curve.unit)
    axis.set_ylabel("share of values up to x")
    axis.set_ylim(0, 1.02)
    if not len(values):
        axis.text(0.5, 0.5, "no value", ha="center", transform=axis.transAxes, color="#888888")
        return
    axis.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=SERIES[0], linewidth=1.4)
    for share in (50, 99):
        value = float(np.percentile(values, share))
        axis.plot([value], [share / 100], "o", color=SERIES[0], markersize=3.5)
        left = value > np.mean(axis.get_xlim())
        axis.annotate(
            f"p{share} {short(value)}",
            (value, share / 100),
            xytext=(-6 if left else 6, -11),
            textcoords="offset points",
            fontsize=8,
            ha="right" if left else "left",
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )
    if curve.target is not None:
        axis.axvline(curve.target, color=COLOURS["failed"], linestyle="--", linewidth=1)
        axis.text(
            curve.target, 0.03, " target", color=COLOURS["failed"], fontsize=8, transform=axis.get_xaxis_transform()
        )
    positive = values[values > 0]
    if len(positive) and positive[-1] / positive[0] > 30 and len(positive) > 0.98 * len(values):
        _logarithmic(axis)
    else:
        axis.set_xlim(left=0)


def _logarithmic(axis: Axes) -> None:
    """1, 2, 5, 10, ... in plain figures."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """One run's requests, columns of equal length. `verdict` is the part before any colon (good, late, refused, ...);
    `ttft_s` is None where no token came."""

    due_s: Sequence[float]
    ended_s: Sequence[float]
    ttft_s: Sequence[float | None]
    verdict: Sequence[str]


def run_over_time(requests: Requests, *, warm_up_s: float) -> Figure:
    """Above: each request's TTFT over when it was due, by verdict. Below: requests under way."""
    with canvas(2, 1, height=2.5) as (figure, axes):
        top, below = axes
        top.set_title("Time to first token, by when a request was due")
        top.set_ylabel("s")
        for verdict in dict.fromkeys([*COLOURS, *requests.verdict]):
            found = [i for i, one in enumerate(requests.verdict) if one == verdict]
            if not found:
                continue
            colour = COLOURS.get(verdict, "#444444")
            told = [(requests.due_s[i], value) for i in found if (value := requests.ttft_s[i]) is not None]
            untold = [requests.due_s[i] for i in found if requests.ttft_s[i] is None]
            name = f"{verdict} ({len(found)})"
            if told:
                x, y = zip(*told, strict=True)
                top.scatter(x, y, s=14, color=colour, label=name, linewidths=0)
            if untold:
                top.scatter(untold, [0.0] * len(untold), s=22, color=colour, marker="x", label=f"{name}, no token")
        top.set_ylim(bottom=0)
        if requests.verdict:  # a run may be interrupted before anything was asked
            figure.legend(loc="outside lower left", ncols=6)
        edges = sorted([(at, 1) for at in requests.due_s] + [(at, -1) for at in requests.ended_s])
        times = [at for at, _ in edges]
        below.step(times, np.cumsum([change for _, change in edges]), where="post", color=SERIES[0], linewidth=1)
        below.set_title("Requests under way")
        below.set_xlabel("s after the start")
        below.set_ylim(bottom=0)
        for axis in axes:
            axis.set_xlim(0, max(times, default=1.0))
            if warm_up_s > 0:
                axis.axvspan(0, warm_up_s, color="#f1f1f1", zorder=0)
        return figure


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100.0 else f"{value:.3g}"


def stacked(title: str, bars: Mapping[str, Mapping[str, float]], *, unit: str) -> Figure:
    """Horizontal bars made of parts: {bar: {part: length}}; parts take their colour from COLOURS."""
    with canvas(1, 1, height=1.05 + 0.42 * max(len(bars), 1)) as (figure, axes):
        axis = axes[0]
        parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
        names = list(bars)[::-1]
        left = np.zeros(len(names))
        for number, part in enumerate(parts):
            lengths = np.array([bars[name].get(part, 0.0) for name in names])
            colour = COLOURS.get(part.split(" ")[0], SERIES[number % len(SERIES)])
            axis.barh(names, lengths, left=left, height=0.62, color=colour, label=part)
            left += lengths
        for row, total in enumerate(left):
            axis.text(total, row, f"  {short(total)} {unit}", va="center", fontsize=8)
        axis.set_xlim(0, max(float(left.max(initial=0.0)) * 1.14, 1e-9))
        axis.set_title(title)
        axis.set_xlabel(unit)
        axis.grid(axis="y", visible=False)
        figure.legend(loc="outside lower left", ncols=6)
        return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points of one series; `low` and `high` make a band."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def lines(
    title: str,
    series: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    share: bool = False,
    mark_x: float | None = None,
    diagonal: bool = False,
) -> Figure:
    """One axis of lines with bands. `share`: y from 0 to 1. `mark_x`: a vertical line. `diagonal`: y = x, thin."""
    with canvas(1, 1, width=7.0) as (figure, axes):
        axis = axes[0]
        for number, line in enumerate(series):
            colour = SERIES[number % len(SERIES)]
            axis.plot(line.x, line.y, "o-", color=colour, markersize=3.5, linewidth=1.4, label=line.name)
            if line.low is not None and line.high is not None:
                axis.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        if diagonal:
            end = max((max(line.x, default=0.0) for line in series), default=1.0)
            axis.plot([0, end], [0, end], color="#999999", linewidth=0.8, linestyle=":", label="all that was offered")
        if mark_x is not None:
            axis.axvline(mark_x, color="#777777", linewidth=0.8, linestyle="--")
        axis.set_title(title)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.set_ylim(0, 1.03) if share else axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        if len(series) > 1 or diagonal:
            figure.legend(loc="outside lower left", ncols=3)
        return figure
