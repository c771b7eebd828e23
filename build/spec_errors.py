"""Errors in a pipeline file, in our own words: file, line, key, value, and what to do."""

from __future__ import annotations

import datetime
import difflib
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from trtpd.errors import SpecError

Where = tuple[str | int, ...]
_SHOWN = 3
_MOST_SHOWN = 60

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
    "string_too_short": "a text that isn't empty",
    "too_short": "a list that isn't empty",
}


_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
_MOST_VALUES = 100_000
_MOST_BYTES = 1_000_000


class _Loader(yaml.SafeLoader):
    """Says in which line a value stands that has the look of a number or a date and is none."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            what = node.tag.rpartition(":")[2]
            problem = f"'{_cut(node.value)}' can't be read as {what}; write it in quotes if a text is meant"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


class SpecFile:
    """A YAML file as plain data, with the line of each key. Raises SpecError if it can't be read or
    parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[Where, int] = {}
        self._noted: set[int] = set()
        try:
            with path.open("rb") as opened:
                raw = opened.read(_MOST_BYTES + 1)
            if len(raw) > _MOST_BYTES:
                raise SpecError(f"{path}: more than {_MOST_BYTES:,} bytes long, so it is no pipeline file")
            text = raw.decode("utf-8-sig")
        except FileNotFoundError as error:
            raise SpecError(f"{path}: no such file; make one with `trtpd init -o {path}`") from error
        except OSError as error:
            raise SpecError(f"{path}: can't be read ({error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise SpecError(f"{path}: not UTF-8 text (byte {error.start})") from error
        try:
            node = yaml.compose(text, Loader=_Loader)
            if node is not None:
                self._values(node, {})
                self._note(node, ())
            self.data: Any = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise SpecError(f"{path}{_mark(error)}: not valid YAML ({_problem(error)})") from error
        except RecursionError as error:
            raise SpecError(f"{path}: nested too deeply") from error

    def _values(self, node: yaml.Node, counted: dict[int, int | None]) -> int:
        """How many values a node stands for with its aliases written out. Raises SpecError for too many of them."""
        at = f"{self.path}:{node.start_mark.line + 1}"
        if id(node) in counted:
            known = counted[id(node)]
            if known is None:
                raise SpecError(f"{at}: an alias stands within its own anchor; write out what is meant")
            return known
        counted[id(node)] = None
        parts = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        total = 1 + sum(self._values(part, counted) for part in parts)
        if total > _MOST_VALUES:
            raise SpecError(f"{at}: its aliases stand for more than {_MOST_VALUES:,} values; write out what is meant")
        counted[id(node)] = total
        return total

    def _note(self, node: yaml.Node, where: Where) -> None:
        if id(node) in self._noted:
            return  # an alias: noted where its anchor stands
        self._noted.add(id(node))
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if key.tag not in _KEY_TAGS:
                    given = (key.value or "empty") if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                    raise SpecError(
                        f"{self.path}:{line}: {_dotted(where)}: a key is {_cut(given)}, which is no text; write it in "
                        "quotes"
                    )
                name = str(key.value)
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
    return f"is {shown(value)}; it must be {wanted}{' or auto' if _takes_auto(where, model) else ''}"


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


class _Brief(reprlib.Repr):
    """As repr, without looking further than what is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, _MOST_SHOWN, _MOST_SHOWN

    def repr_date(self, x: datetime.date, level: int) -> str:
        return f"{x} (a date)"

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 128 else f"a number of {x.bit_length()} bits"


def shown(value: Any) -> str:
    """As repr, short whatever the value is."""
    return _cut(_Brief().repr(value))


def _cut(value: object) -> str:
    text = value if isinstance(value, str) else type(value).__name__
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _mark(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark is not None else ""


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).replace("\n", " ")
