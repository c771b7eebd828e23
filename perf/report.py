"""A report: one page without network (plots inside), its figures as JSON and CSV, its plots as PNG.

REPORT/
  report.html  report.json  requests.csv
  plots/NAME.png
and beside it, of a benchmark, what bench_folder.py names: to replay and to compute again
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe
import msgspec

from trtpd.build.files import ELSEWHERE, mend_of
from trtpd.errors import InputError
from trtpd.perf import plots
from trtpd.perf.goodput import DEFINITIONS
from trtpd.perf.records import Record
from trtpd.perf.resampling import Distribution, Interval
from trtpd.perf.slo import Slo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).resolve().parent / "templates"
NOTHING = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The first column names a row, the others are figures."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page; `plots` are names of figures."""

    heading: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report's content. `remarks` are what a reader must know before he believes a figure."""

    title: str
    subtitle: str
    summary: Sequence[str]
    remarks: Sequence[str]
    sections: Sequence[Section]
    command: str


def write_report(
    folder: Path, page: Page, document: object, figures: Mapping[str, Figure], files: Mapping[str, bytes] | None = None
) -> Path:
    """Writes `folder` (made if need be) and returns the page. `document` becomes report.json, `files` go beside it.

    Raises InputError if it can't be written.
    """
    html = rendered(page, figures)
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    try:
        (folder / "plots").mkdir(parents=True, exist_ok=True)
        (folder / "report.html").write_text(html, encoding="utf-8")
        (folder / "report.json").write_bytes(encoded)
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
        for name, figure in figures.items():
            plots.png(figure, folder / "plots" / f"{name}.png")
    except OSError as error:
        raise InputError(
            f"{folder}: the report can't be written there ({error.strerror}); {mend_of(error, ELSEWHERE)}"
        ) from error
    return folder / "report.html"


def rendered(page: Page, figures: Mapping[str, Figure]) -> str:
    """As HTML that needs no other file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    # matplotlib escapes text of its own, and nothing else is in its SVG
    drawn = {name: markupsafe.Markup(plots.svg(figure)) for name, figure in figures.items()}
    return environment.get_template("report.html.j2").render(page=page, svgs=drawn)


COLUMNS: Sequence[str] = (
    "number", "kind", "scheduled_s", "sent_s", "prompt_tokens", "served_prompt_tokens", "max_tokens", "output_tokens",
    "tokens_guessed",
    "state", "reason", "verdict", "ttft_s", "second_token_s", "tpot_s", "longest_gaps_s", "total_s",
)  # fmt: skip
SERVER_COLUMNS = ("queue_s", "prefill_s", "transfer_s", "exposed_s", "transfer_bytes", "retries", "prefill", "decode")


def requests_csv(records: Sequence[Record], slo: Slo) -> bytes:
    """One line per request; an empty cell is something that is not known."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*COLUMNS, *(f"server_{name}" for name in SERVER_COLUMNS)])
    judge = DEFINITIONS["trtpd"]
    for record in records:
        row = [judge.verdict(record, slo) if name == "verdict" else _cell(getattr(record, name)) for name in COLUMNS]
        server = record.server
        row += ["" if server is None else _cell(getattr(server, name)) for name in SERVER_COLUMNS]
        writer.writerow(row)
    return buffer.getvalue().encode()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def number(value: float | None, digits: int = 3, unit: str = "") -> str:
    """For people; a dash for what is not known."""
    if value is None:
        return NOTHING
    text = f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:,.{digits}g}"
    return f"{text} {unit}" if unit else text


def interval(value: Interval | None, factor: float = 1.0, unit: str = "") -> str:
    """12.3 (11.9 to 12.8) unit; where a bound is open, 12.3 (at least 11.9) unit."""
    if value is None:
        return NOTHING
    scaled = value.times(factor)
    text = f"{number(scaled.value)} ({scaled.around(number)})"
    return f"{text} {unit}" if unit else text


def percent(value: Interval | None) -> str:
    """97.1 % (95.0 to 98.8)."""
    if value is None:
        return NOTHING
    return f"{value.value:.1%} ({value.times(100.0).around(lambda bound: f'{bound:.1f}')})"


def latency_table(rows: Mapping[str, Distribution | None]) -> Table:
    """Distributions in ms, percentiles with their 95 % confidence intervals."""
    headings = ("ms", "count", "mean", "p50", "p90", "p99", "largest")
    cells: list[Sequence[str]] = []
    for name, found in rows.items():
        if found is None:
            cells.append((name, "0", *[NOTHING] * 5))
            continue
        quantiles = [interval(one, 1e3) for one in (found.p50, found.p90, found.p99)]
        cells.append((name, str(found.count), number(found.mean * 1e3), *quantiles, number(found.largest * 1e3)))
    return Table(headings=headings, rows=cells)
