"""What `trtpd perf-analyzer` found, as summary.json, loads.csv, a page and a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import msgspec

from trtpd.perf.environment import Environment
from trtpd.perf.instruments_agree import AGREE, TURNS_LEAST, Agreement, Latencies
from trtpd.perf.report import NOTHING, Page, Section, Table
from trtpd.perf.resampling import Interval

INTERRUPTED = "interrupted"


class AnalyzeResult(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json. `complete` is false where the budget ended before all runs were made, or `stopped` says what else
    ended them. `notes` say what the requests are, `remarks` what a reader must know before he believes the figures."""

    model: str
    tool: str
    workload: str
    requests: int
    repeats: int
    complete: bool
    loads: tuple[Agreement, ...]
    environment: Environment
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    stopped: str = ""


def remarks(loads: Sequence[Agreement], complete: bool, stopped: str) -> list[str]:
    found = []
    if stopped == INTERRUPTED:
        found.append("Interrupted: not all runs were made, and the one under way then is left out.")
    elif stopped:
        found.append(f"Ended by an error, not all runs were made: {stopped}")
    elif not complete:
        found.append("The budget ended before all runs were made.")
    for one in loads:
        for whose, figures in (("perf_analyzer's", one.theirs), ("our", one.ours)):
            if figures.unfinished:
                why = ", ".join(f"{name} {number}" for name, number in sorted(figures.unfinished.items()))
                found.append(
                    f"{one.load}: {sum(figures.unfinished.values())} of {whose} requests did not finish ({why}); the "
                    "figures are of the others, so the two are not compared."
                )
        if one.agree == "not shown":
            found.append(f"{one.load}: {_not_shown(one)}")
    return found


def _not_shown(one: Agreement) -> str:
    """Why it can't be said whether both agree, and what would help."""
    what = f"whether both agree within {AGREE:.0%} is not shown with {one.pairs} requests"
    if one.turns < TURNS_LEAST:
        return f"{what} in one run of each, since the machine may have changed between them; give --repeats 2 or more."
    bounds = [f"{name} {ratio.around(_plain)}" for name, ratio in _named_ratios(one)]
    return (
        f"{what} in {one.turns} runs of each (ours / theirs, 95 %: {', '.join(bounds)}); more --requests or --repeats."
    )


def _named_ratios(one: Agreement) -> list[tuple[str, Interval]]:
    ratios = (("TTFT", one.ttft_ratio), ("ITL", one.itl_ratio))
    return [(name, ratio) for name, ratio in ratios if ratio is not None]


def _plain(value: float) -> str:
    return f"{value:.3f}"


CSV_FIGURES = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
CSV_RATIOS = ("ttft_ratio", "itl_ratio")


def csv_of(result: AnalyzeResult) -> bytes:
    """One line per load and instrument; an empty cell is something that is not known. Ours has the ratios to theirs."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    ratios = [f"{name}{bound}" for name in CSV_RATIOS for bound in ("", "_low", "_high")]
    writer.writerow(["load", "instrument", "requests", "unfinished", *CSV_FIGURES, *ratios, "agree"])
    for one in result.loads:
        for instrument, figures in (("perf_analyzer", one.theirs), ("trtpd", one.ours)):
            values = [getattr(figures, name) for name in CSV_FIGURES]
            for name in CSV_RATIOS:
                ratio = getattr(one, name) if figures is one.ours else None
                values += [None] * 3 if ratio is None else [ratio.value, ratio.low, ratio.high]
            cells = ["" if value is None else f"{value:.6f}" for value in values]
            counts = [figures.requests, sum(figures.unfinished.values())]
            writer.writerow([one.load, instrument, *counts, *cells, one.agree if figures is one.ours else ""])
    return buffer.getvalue().encode()


def page_of(result: AnalyzeResult, command: str) -> Page:
    return Page(
        title=f"perf_analyzer and trtpd's client, model {result.model}",
        subtitle=f"{result.tool}; {result.workload}, {result.requests} requests a run, {result.repeats} runs of each",
        summary=result.notes,
        remarks=result.remarks,
        sections=[Section(heading="Both instruments, ms", tables=[table(result)])],
        command=command,
    )


def table(result: AnalyzeResult) -> Table:
    """Both instruments side by side, ms."""
    headings = (
        "load", "TTFT p50 theirs", "ours", "ratio (95 %)", "p99 theirs", "ours",
        "ITL p50 theirs", "ours", "ratio (95 %)", "p99 theirs", "ours", f"agree within {AGREE:.0%}",
        "unfinished theirs", "ours",
    )  # fmt: skip
    rows = [
        (
            one.load,
            _ms(one.theirs.ttft_p50_s), _ms(one.ours.ttft_p50_s), _ratio(one.ttft_ratio),
            _ms(one.theirs.ttft_p99_s), _ms(one.ours.ttft_p99_s),
            _ms(one.theirs.itl_p50_s), _ms(one.ours.itl_p50_s), _ratio(one.itl_ratio),
            _ms(one.theirs.itl_p99_s), _ms(one.ours.itl_p99_s),
            _agree(one),
            _unfinished(one.theirs), _unfinished(one.ours),
        )
        for one in result.loads
    ]  # fmt: skip
    return Table(headings=headings, rows=rows)


def _unfinished(figures: Latencies) -> str:
    return str(sum(figures.unfinished.values()))


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds * 1e3:.2f}"


def _ratio(value: Interval | None) -> str:
    return NOTHING if value is None else f"{value.value:.3f} ({value.around(_plain)})"


def _agree(one: Agreement) -> str:
    if not one.ratios:
        return NOTHING
    return f"not shown with {one.pairs} requests" if one.agree == "not shown" else one.agree
