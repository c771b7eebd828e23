"""Errors in a pipeline file, in our own words: file, line, key, value, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from trtpd.errors import SpecError

Where = tuple[str | int, ...]
_SHOWN = 3

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "model_type": "a mapping of keys",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
    "string_too_short": "a text that isn't empty",
    "too_short": "a list that isn't empty",
}


class SpecFile:
    """A YAML file as plain data, with the line of each key. Raises SpecError if it can't be read or
    parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[Where, int] = {}
        self._noted: set[int] = set()
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise SpecError(f"{path}: no such file; make one with `trtpd init -o {path}`") from error
        except OSError as error:
            raise SpecError(f"{path}: can't be read ({error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise SpecError(f"{path}: not UTF-8 text (byte {error.start})") from error
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            if node is not None:
                self._note(node, ())
            self.data: Any = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise SpecError(f"{path}{_mark(error)}: not valid YAML ({_problem(error)})") from error
        except RecursionError as error:
            raise SpecError(f"{path}: nested too deeply") from error

    def _note(self, node: yaml.Node, where: Where) -> None:
        if id(node) in self._noted:
            return  # an alias: noted where its anchor stands, and it may even lead back to itself
        self._noted.add(id(node))
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in seen:
                    raise SpecError(
                        f"{self.path}:{line}: {_dotted((*where, name))}: given twice, first in line {seen[name]}"
                    )
                seen[name] = line
                self._lines[(*where, name)] = line
                self._note(value, (*where, name))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._lines[(*where, index)] = value.start_mark.line + 1
                self._note(value, (*where, index))

    def line(self, where: Where) -> int | None:
        """The line of a key, or of the nearest key around it that the file has."""
        while where and where not in self._lines:
            where = where[:-1]
        return self._lines.get(where)


def describe(error: ValidationError, model: type[BaseModel], file: SpecFile | None) -> str:
    """All that is wrong, in one line, the first fault first."""
    faults = [_fault(dict(item), model, file) for item in error.errors()]
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(faults[:_SHOWN]) + more


def _fault(item: Mapping[str, Any], model: type[BaseModel], file: SpecFile | None) -> str:
    where: Where = tuple(item["loc"])
    line = file.line(where) if file else None
    place = (f"{file.path}:{line}: " if line else f"{file.path}: ") if file else ""
    return f"{place}{_dotted(where)}: {_reason(item, where, model)}"


def _reason(item: Mapping[str, Any], where: Where, model: type[BaseModel]) -> str:
    kind, value, context = item["type"], item.get("input"), item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {_nearest(where, model)}"
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context["error"])
    wanted = _WANTED[kind].format(**context) if kind in _WANTED else item["msg"]
    return f"is {_shown(value)}; it must be {wanted}{' or auto' if _takes_auto(where, model) else ''}"


def _nearest(where: Where, model: type[BaseModel]) -> str:
    key, parent = str(where[-1]), _model_at(where[:-1], model)
    known = list(parent.model_fields) if parent else []
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.6):
        return f"did you mean {close[0]}?"
    elsewhere = [path for path in _paths(model) if path[-1] == key]
    if elsewhere:
        return f"it belongs at {_dotted(elsewhere[0])}"
    return f"known here: {', '.join(known)}"


def _paths(model: type[BaseModel], where: Where = ()) -> Iterator[Where]:
    for name, field in model.model_fields.items():
        yield (*where, name)
        inner = _model_in(field.annotation)
        if inner is not None:
            yield from _paths(inner, (*where, name))


def _model_at(where: Where, model: type[BaseModel]) -> type[BaseModel] | None:
    found: type[BaseModel] | None = model
    many = False
    for part in where:
        if many:
            many = False  # a place in a list, or a key of a mapping whose values are what was found
            continue
        field = found.model_fields.get(str(part)) if found else None
        found = _model_in(field.annotation) if field else None
        many = field is not None and get_origin(field.annotation) in (list, dict) and found is not None
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:
    candidates = (annotation, *get_args(annotation))
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _takes_auto(where: Where, model: type[BaseModel]) -> bool:
    parent = _model_at(where[:-1], model)
    field = parent.model_fields.get(str(where[-1])) if parent else None
    return field is not None and field.default is None and _model_in(field.annotation) is None


def _dotted(where: Where) -> str:
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "pipeline"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _mark(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark is not None else ""


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).replace("\n", " ")
