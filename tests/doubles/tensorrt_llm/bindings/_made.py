"""Classes and enums of the executor's bindings, made from api.json: what it names they have, in its order, with its
defaults, and nothing else. As the real bindings do they refuse a value of another type and an argument they don't know.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorrt_llm._api import API, VERSION

EXECUTOR: dict[str, Any] = API["executor"]
LINE = tuple(int(part) for part in VERSION.split(".")[:2])
_SINCE = {"1.2.0rc": (1, 2), "1.2.x": (1, 2), "1.2.0+": (1, 2), "1.3": (1, 3)}
REQUIRED = object()

Check = Callable[[Any], None]


def make_enum(name: str) -> Any:
    found = EXECUTOR[name]["enum"]
    if isinstance(found, dict):
        return enum.Enum(name, found)
    names = []
    for text in found:
        member, _, since = text.partition(" ")
        if _SINCE.get(since.strip("()"), (1, 0)) <= LINE:
            names.append(member)
    return enum.Enum(name, names, start=0)


def parameters_of(name: str) -> list[dict[str, Any]]:
    """Of this release."""
    return [entry for entry in EXECUTOR[name]["ctor"] if _SINCE.get(entry.get("since", ""), (1, 0)) <= LINE]


def make_class(
    name: str, known: dict[str, Any], *, checks: dict[str, Check] | None = None, renamed: dict[str, str] | None = None
) -> Any:
    """`known` are the classes and enums made so far, by name; `renamed` gives attributes other names than their
    arguments."""
    parameters = parameters_of(name)
    positional = [entry["name"] for entry in parameters if not entry.get("kw_only")]
    names, attributes = [entry["name"] for entry in parameters], renamed or {}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = _bound(name, positional, names, args, kwargs)
        for entry in parameters:
            value = given.get(entry["name"], REQUIRED)
            if value is REQUIRED:
                value = _default(name, entry, known)
            else:
                _check_type(name, entry, value, known)
            if checks is not None and entry["name"] in checks and value is not None:
                checks[entry["name"]](value)
            object.__setattr__(self, attributes.get(entry["name"], entry["name"]), value)

    return type(name, (), {"__init__": __init__, "__module__": "tensorrt_llm.bindings.executor"})


def _bound(
    name: str, positional: list[str], names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    if len(args) > len(positional):
        raise TypeError(f"__init__(): incompatible function arguments: {name} takes {len(positional)} by position")
    given = dict(zip(positional, args, strict=False))
    for word, value in kwargs.items():
        if word not in names or word in given:
            raise TypeError(f"__init__(): incompatible function arguments: {name} takes no {word!r} here")
        given[word] = value
    return given


def _default(name: str, entry: dict[str, Any], known: dict[str, Any]) -> Any:
    default, kind = entry["default"], _bare(entry["type"])
    if isinstance(default, str) and default.startswith("<required"):
        raise TypeError(f"__init__(): incompatible function arguments: {name} needs {entry['name']!r}")
    if isinstance(default, str) and default.endswith("()"):
        made = known.get(default[:-2])
        return None if made is None else made()
    return known[kind][default] if kind in known and isinstance(default, str) else default


def _bare(kind: str) -> str:
    found = re.fullmatch(r"Optional\[(.*)\]", kind)
    return (found[1] if found else kind).partition(" ")[0]


_PLAIN: dict[str, Any] = {
    "int": int, "bool": bool, "float": (int, float), "str": str, "bytes": bytes, "Path": (str, os.PathLike)
}  # fmt: skip


def _check_type(name: str, entry: dict[str, Any], value: Any, known: dict[str, Any]) -> None:
    kind, optional = _bare(entry["type"]), "Optional" in entry["type"] or "may be None" in str(entry["default"])
    if value is None and optional:
        return
    if kind.startswith("list[") and kind.endswith("]"):
        right = isinstance(value, list) and (kind != "list[int]" or all(type(item) is int for item in value))
    elif kind in known:
        right = isinstance(value, known[kind])
    elif kind in _PLAIN:
        right = isinstance(value, _PLAIN[kind]) and (kind == "bool" or not isinstance(value, bool))
    else:
        right = value is None  # a class that this stand-in doesn't have
    if not right:
        raise TypeError(
            f"__init__(): incompatible function arguments: {name} takes {entry['type']} as {entry['name']!r}, "
            f"not {type(value).__name__}"
        )


def at_least(bound: float, what: str) -> Check:
    def check(value: Any) -> None:
        if not value >= bound:
            raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: {what} >= {bound}")

    return check


def above(bound: float, what: str, most: float = float("inf")) -> Check:
    def check(value: Any) -> None:
        if not bound < value <= most:
            raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: {what} > {bound} and <= {most}")

    return check


def path_of(value: Any) -> Path:
    return Path(os.fspath(value))
