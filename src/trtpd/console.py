"""What the command line shows: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

LINE_EVERY_S = 2.0


class Report(Protocol):
    """Called with (stage, done, total); `done == total` ends a stage."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


@contextmanager
def progress() -> Iterator[Report]:
    """A bar per stage on a terminal; elsewhere plain lines: one at each stage's start and end, and one every
    LINE_EVERY_S between."""
    if sys.stderr.isatty():
        with _bars() as report:
            yield report
    else:
        yield _lines()


@contextmanager
def _bars() -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, object] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=max(total, 1))
            bars.update(tasks[stage], completed=min(done, total) if total else 1, total=max(total, 1))  # type: ignore[arg-type]

        yield report


def _lines() -> Report:
    shown: dict[str, float] = {}
    ended: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        over = done >= total
        if stage in ended or (not over and now_s - shown.get(stage, -LINE_EVERY_S) < LINE_EVERY_S):
            return
        shown[stage] = now_s
        if over:
            ended.add(stage)
        percent = 100 if over else 100 * done // max(total, 1)
        print(f"{stage}: {percent} %", file=sys.stderr, flush=True)

    return report


def say(text: str) -> None:
    """One line for a person, on standard error."""
    print(text, file=sys.stderr, flush=True)


def result(value: str | Mapping[str, object], *, as_json: bool, text: str = "") -> None:
    """The command's result on standard output: one JSON object with --json, else `text`."""
    if as_json:
        # An output of another encoding would escape in Python's way, which JSON doesn't know.
        plain = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
        print(json.dumps(value if isinstance(value, Mapping) else {"result": value}, ensure_ascii=plain), flush=True)
    else:
        print(text or value, flush=True)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """A plain table on standard output, cut to nothing: it wraps instead."""
    view = Table(*headings, box=None, pad_edge=False, title=title or None, title_justify="left")
    for row in rows:
        view.add_row(*row)
    Console(soft_wrap=False, highlight=False, markup=False, width=None if sys.stdout.isatty() else 160).print(view)
