"""Traces of real traffic as requests: the slices in data/, or any CSV or JSON lines whose columns are named.

Known by their headers: Azure 2023 (TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake (timestamp in ms,
input_length, output_length, hash_ids: equal ids are equal prompt blocks and become equal text).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from trtpd.build.decoding import typed_json
from trtpd.build.files import expanded
from trtpd.errors import InputError
from trtpd.perf.prompt_text import Segment
from trtpd.perf.workload import MOST_TOKENS, Ask, read_lines

DATA = Path(__file__).resolve().parent / "data"
SLICES = {
    "azure-code": "azure_2023_code.csv.gz",
    "azure-conv": "azure_2023_conv.csv.gz",
    "mooncake": "mooncake_conversation.jsonl.gz",
}
MOONCAKE_BLOCK_TOKENS = 512
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_OWN_SEEDS = 1 << 40
"""Seeds of prompts that share nothing begin here, above any id of a shared block."""


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


def read_trace(source: str, options: TraceOptions, *, limit: int) -> list[Ask]:
    """Up to `limit` requests in order of time, the first at 0 s. `source` is a name of SLICES or a path.

    Rows without a prompt or without an answer are left out, as nothing can be asked for. Raises InputError naming
    row and column.
    """
    path = DATA / SLICES[source] if source in SLICES else expanded(source)
    if source not in SLICES and not path.is_file():
        raise InputError(f"trace {source!r}: no such file, and none of {', '.join(SLICES)}")
    rows = _rows(path)
    columns = parse_columns(options.columns) if options.columns else _by_header(rows, path)
    read = [_Row.of(row, columns, f"{path}: row {number + 1}") for number, row in enumerate(rows)]
    usable = sorted((row for row in read if row.prompt_tokens > 0 and row.output_tokens > 0), key=lambda row: row.at_s)
    kept = usable[options.offset : options.offset + limit]
    if not kept:
        raise InputError(f"{path}: has no request left from row {options.offset} on ({len(usable)} usable rows)")
    kind = source if source in SLICES else path.name.split(".")[0]
    return [
        Ask(
            segments=row.segments(number, columns.block_tokens),
            max_tokens=row.output_tokens,
            kind=kind,
            at_s=(row.at_s - kept[0].at_s) * options.time_scale,
        )
        for number, row in enumerate(kept)
    ]


def parse_columns(text: str) -> Columns:
    """Raises InputError for an unknown key or one that is missing."""
    given = dict(item.partition("=")[::2] for item in text.split(","))
    unknown = given.keys() - {"time", "prompt", "output", "hashes", "unit", "block"}
    missing = {"time", "prompt", "output"} - given.keys()
    if unknown or missing:
        fault = f"{min(unknown)!r} is not known" if unknown else f"{min(missing)!r} is missing"
        raise InputError(f"columns {text!r}: {fault}; write time=T,prompt=P,output=O[,hashes=H][,unit=ms][,block=512]")
    unit, block = given.get("unit", "s"), given.get("block", str(MOONCAKE_BLOCK_TOKENS))
    if unit not in UNITS:
        raise InputError(f"columns {text!r}: unit is {unit!r}; it must be one of {', '.join(UNITS)}")
    if not block.isdecimal() or int(block) < 1:
        raise InputError(f"columns {text!r}: block is {block!r}; it must be a number of tokens")
    return Columns(
        time=given["time"],
        prompt=given["prompt"],
        output=given["output"],
        hashes=given.get("hashes"),
        unit=unit,
        block_tokens=int(block),
    )


def _rows(path: Path) -> list[Mapping[str, Any]]:
    lines = read_lines(path)
    if path.name.removesuffix(".gz").endswith((".jsonl", ".json")):
        try:
            return [typed_json(line, dict[str, Any]) for line in lines]
        except ValueError as error:
            raise InputError(f"{path}: not JSON lines ({error})") from error
    try:
        return list(csv.DictReader(line.decode() for line in lines))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file ({error}); JSON lines must be named .jsonl") from error


def _by_header(rows: Iterable[Mapping[str, Any]], path: Path) -> Columns:
    first = next(iter(rows), None)
    if first is None:
        raise InputError(f"{path}: holds no row")
    for columns in KNOWN:
        if {columns.time, columns.prompt, columns.output} <= first.keys():
            return columns
    raise InputError(f"{path}: has columns {', '.join(first)}; say with --columns which are time, prompt and output")


class _Row(msgspec.Struct, frozen=True):
    at_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]

    @classmethod
    def of(cls, row: Mapping[str, Any], columns: Columns, where: str) -> _Row:
        try:
            hashes = row.get(columns.hashes) if columns.hashes else None
            return cls(
                at_s=_seconds(row[columns.time], columns.unit),
                prompt_tokens=_tokens(row[columns.prompt]),
                output_tokens=_tokens(row[columns.output]),
                hashes=tuple(int(one) for one in hashes or ()),
            )
        except KeyError as error:
            raise InputError(f"{where}: has no column {error.args[0]!r}") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{where}: {error}; is another column meant? say so with --columns") from error

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


def _tokens(value: Any) -> int:
    tokens = int(value)
    if tokens > MOST_TOKENS:
        raise ValueError(f"{str(value)[:20]} tokens are more than {MOST_TOKENS:,}")
    return tokens


def _seconds(value: object, unit: str) -> float:
    text = str(value)
    try:
        seconds = float(text) * UNITS[unit]
    except ValueError:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"the time is {text}")
    return seconds
