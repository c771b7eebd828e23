"""JSON that others wrote: whatever is wrong with it is a ValueError, nesting past Python's limit included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")


MOST_DIGITS = 1000


def _integer(digits: str) -> int:
    """Python has a limit too, which it tells in words for programmers."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def plain_json(raw: bytes | str) -> Any:
    """Any JSON value as plain data. Raises ValueError."""
    try:
        return json.loads(raw, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def typed_json(raw: bytes | str, kind: type[Kind]) -> Kind:
    """JSON as a msgspec type. Raises ValueError."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, OSError."""
    try:
        value = plain_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, not an object")
    return value
