"""Traces of real traffic as requests: the slices in data/, or any CSV or JSON lines whose columns are named.

Known by their headers: Azure 2023 (TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake (timestamp in ms,
input_length, output_length, hash_ids: equal ids are equal prompt blocks and become equal text). In a CSV, or in a
string, ids stand with spaces or commas between, with or without brackets: `46 47`, `[46, 47]`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trtpd.build.decoding import typed_json
from trtpd.build.files import expanded
from trtpd.errors import InputError
from trtpd.perf.prompt_text import Segment
from trtpd.perf.workload import MOST_TOKENS, Ask, numbered_lines

DATA = Path(__file__).resolve().parent / "data"
SLICES = {
    "azure-code": "azure_2023_code.csv.gz",
    "azure-conv": "azure_2023_conv.csv.gz",
    "mooncake": "mooncake_conversation.jsonl.gz",
}
MOONCAKE_BLOCK_TOKENS = 512
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_OWN_SEEDS = 1 << 40
"""Seeds of prompts that share nothing begin here, above ids of shared blocks that are counted from 0."""
_MOST_ID = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where a trace has what. `unit`: of `time` if it is a number (a date and time is read as such). `hashes`: a
    list of ids, one for each `block_tokens` of the prompt."""

    time: str
    prompt: str
    output: str
    hashes: str | None = None
    unit: str = "s"
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


KNOWN = (
    Columns(time="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens"),
    Columns(time="timestamp", prompt="input_length", output="output_length", hashes="hash_ids", unit="ms"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """`columns` as "time=T,prompt=P,output=O[,hashes=H][,unit=ms][,block=512]", None: by the header. Rows from
    `offset` on, at `time_scale` times their distances (0.5: twice as fast)."""

    columns: str | None = None
    offset: int = 0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.time_scale < 1e9:
            raise InputError(f"the time scale is {self.time_scale:g}; it must be above 0 and below 1e9")
        if self.offset < 0:
            raise InputError(f"the trace offset is {self.offset}; it must be 0 or more")


def trace_path(source: str) -> Path:
    """Of a name of SLICES, or of a file. Raises InputError if there is none."""
    path = DATA / SLICES[source] if source in SLICES else expanded(source)
    if not path.is_file():
        fault = "is a folder, not a file" if path.is_dir() else "no such file"
        raise InputError(f"trace {source!r}: {fault}, and none of {', '.join(SLICES)}")
    return path


def read_trace(source: str, options: TraceOptions, *, limit: int) -> tuple[list[Ask], tuple[str, ...]]:
    """Up to `limit` requests in order of time, the first at 0 s, and notes on what is missing or in another order than
    in the file. `source` is a name of SLICES or a path.

    Rows without a prompt or without an answer are left out, as nothing can be asked for. Raises InputError naming
    line and column.
    """
    path = trace_path(source)
    rows = _rows(path)
    columns = _by_header(rows, path) if options.columns is None else parse_columns(options.columns)
    if options.columns is not None and columns.hashes and not any(columns.hashes in row for _, row in rows):
        raise InputError(f"{path}: has no column {columns.hashes!r}, which --columns names for hashes")
    read = [_Row.of(row, columns, f"{path}: line {line}") for line, row in rows]
    in_file = [row for row in read if row.prompt_tokens > 0 and row.output_tokens > 0]
    usable = sorted(in_file, key=lambda row: row.at_s)
    kept = usable[options.offset : options.offset + limit]
    if not kept:
        raise InputError(f"{path}: has no request left from row {options.offset} on ({len(usable)} usable rows)")
    notes = []
    if len(usable) < len(read):
        notes.append(
            f"{len(read) - len(usable)} of the trace's {len(read)} rows left out: no prompt or no answer in them"
        )
    if usable != in_file:
        early = sum(later.at_s < earlier.at_s for earlier, later in pairwise(in_file))
        notes.append(f"the trace's rows put in order of time ({early} of them came before the row above)")
    if len(kept) < limit:
        notes.append(f"{limit} requests were wanted, the trace has {len(kept)} from row {options.offset} on")
    kind = source if source in SLICES else path.name.split(".")[0]
    asks = [
        Ask(
            segments=row.segments(number, columns.block_tokens),
            max_tokens=row.output_tokens,
            kind=kind,
            at_s=(row.at_s - kept[0].at_s) * options.time_scale,
        )
        for number, row in enumerate(kept)
    ]
    return asks, tuple(notes)


def parse_columns(text: str) -> Columns:
    """Raises InputError for an unknown key, one that is missing or there twice, or one that names nothing."""
    items = [item.partition("=")[::2] for item in text.split(",")]
    given = dict(items)
    unknown = given.keys() - {"time", "prompt", "output", "hashes", "unit", "block"}
    missing = {"time", "prompt", "output"} - given.keys()
    if unknown or missing:
        fault = f"{min(unknown)!r} is not known" if unknown else f"{min(missing)!r} is missing"
        raise InputError(f"columns {text!r}: {fault}; write time=T,prompt=P,output=O[,hashes=H][,unit=ms][,block=512]")
    twice = [key for key in given if sum(other == key for other, _ in items) > 1]
    empty = [key for key, value in items if not value]
    if twice or empty:
        fault = f"{twice[0]} is there twice" if twice else f"{empty[0]} names nothing"
        raise InputError(f"columns {text!r}: {fault}; write time=T,prompt=P,output=O[,hashes=H][,unit=ms][,block=512]")
    unit, block = given.get("unit", "s"), given.get("block", str(MOONCAKE_BLOCK_TOKENS))
    if unit not in UNITS:
        raise InputError(f"columns {text!r}: unit is {unit!r}; it must be one of {', '.join(UNITS)}")
    if not block.isdecimal() or int(block) < 1:
        raise InputError(f"columns {text!r}: block is {block!r}; it must be a number of tokens")
    if "block" in given and "hashes" not in given:
        raise InputError(f"columns {text!r}: block is the length of what an id of hashes stands for; give hashes too")
    return Columns(
        time=given["time"],
        prompt=given["prompt"],
        output=given["output"],
        hashes=given.get("hashes"),
        unit=unit,
        block_tokens=int(block),
    )


_Rows = list[tuple[int, Mapping[str, Any]]]
"""Each with its line in the file."""


def _rows(path: Path) -> _Rows:
    lines = numbered_lines(path)
    if not path.name.removesuffix(".gz").endswith((".jsonl", ".json")):
        return _csv_rows(path, lines)
    rows: _Rows = []
    for number, line in lines:
        try:
            rows.append((number, typed_json(line, dict[str, Any])))
        except ValueError as error:
            raise InputError(f"{path}: line {number} is no JSON object ({error})") from error
    return rows


def _csv_rows(path: Path, lines: Sequence[tuple[int, bytes]]) -> _Rows:
    """Raises InputError for a row that has other fields than the header names."""
    rows: _Rows = []
    try:
        reader = csv.reader(line.decode("utf-8-sig" if number == 1 else "utf-8") for number, line in lines)
        header = next(reader, [])
        for fields in reader:
            number = lines[reader.line_num - 1][0]
            if len(fields) != len(header):
                raise InputError(
                    f"{path}: line {number} has {len(fields)} fields and the header {len(header)}; put quotes around a "
                    "field with a comma in it"
                )
            rows.append((number, dict(zip(header, fields, strict=True))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file ({error}); JSON lines must be named .jsonl") from error
    return rows


def _by_header(rows: _Rows, path: Path) -> Columns:
    if not rows:
        raise InputError(f"{path}: holds no row")
    _, first = rows[0]
    for columns in KNOWN:
        if {columns.time, columns.prompt, columns.output} <= first.keys():
            return columns
    raise InputError(f"{path}: has columns {', '.join(first)}; say with --columns which are time, prompt and output")


_Cell = TypeVar("_Cell")


class _Row(msgspec.Struct, frozen=True):
    at_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]

    @classmethod
    def of(cls, row: Mapping[str, Any], columns: Columns, where: str) -> _Row:
        def cell(column: str, read: Callable[[Any], _Cell]) -> _Cell:
            if column not in row:
                raise InputError(f"{where}: has no column {column!r}")
            try:
                return read(row[column])
            except ValueError as error:
                raise InputError(
                    f"{where}, column {column!r}: {error}; is another column meant? say so with --columns"
                ) from error

        return cls(
            at_s=cell(columns.time, lambda value: _seconds(value, columns.unit)),
            prompt_tokens=cell(columns.prompt, _tokens),
            output_tokens=cell(columns.output, _tokens),
            hashes=cell(columns.hashes, _ids) if columns.hashes and columns.hashes in row else (),
        )

    def segments(self, number: int, block_tokens: int) -> tuple[Segment, ...]:
        """Blocks with an id get their text from it; what has none is this request's own."""
        left, found = self.prompt_tokens, []
        for block in self.hashes:
            if left <= 0:
                break
            found.append(Segment(seed=block, tokens=min(block_tokens, left)))
            left -= block_tokens
        if left > 0:
            found.append(Segment(seed=_OWN_SEEDS + number, tokens=left))
        return tuple(found)


def _ids(cell: object) -> tuple[int, ...]:
    """Of a list, or of text with spaces or commas between. Raises ValueError."""
    if cell is None:
        return ()
    parts = (
        cell.strip().removeprefix("[").removesuffix("]").replace(",", " ").split() if isinstance(cell, str) else cell
    )
    if not isinstance(parts, list) or any(isinstance(one, float | bool) for one in parts):
        raise ValueError(f"hashes are {str(cell)[:40]!r}; they must be whole numbers in a list, such as [46, 47]")
    try:
        found = tuple(int(one) for one in parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"hashes are {str(cell)[:40]!r}; write whole numbers with spaces between") from error
    if any(not 0 <= one < _MOST_ID for one in found):
        raise ValueError(f"hashes are {str(cell)[:40]!r}; each must lie between 0 and {_MOST_ID - 1}")
    return found


def _tokens(value: object) -> int:
    """Of a whole number or its text; 12.0 is one. Raises ValueError, also for one below 0."""
    shown = _shown(value)
    try:
        number = None if isinstance(value, bool) else float(str(value))
    except ValueError:
        number = None
    if number is None or not number.is_integer():
        raise ValueError(f"{shown} is not a whole number of tokens")
    if not 0 <= number <= MOST_TOKENS:
        raise ValueError(f"{shown} tokens; there must be 0 to {MOST_TOKENS:,}")
    return int(number)


def _seconds(value: object, unit: str) -> float:
    """Of a number of `unit`, or of a date and time. Raises ValueError."""
    text = str(value)
    try:
        seconds = float(text) * UNITS[unit]
    except ValueError:
        try:
            when = datetime.fromisoformat(text)
        except ValueError as error:
            raise ValueError(f"{_shown(value)} is neither a number nor a date and time") from error
        seconds = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"{_shown(value)} is no instant")
    return seconds


def _shown(value: object) -> str:
    """As the file has it, for a message."""
    if value is None:
        return "null"
    return repr(value[:40]) if isinstance(value, str) else str(value)[:40]
