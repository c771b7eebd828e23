"""What stands beside a tokenizer: its configuration, and the chat template, compiled as it will be used."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtpd.build.decoding import json_object
from trtpd.errors import CheckpointError

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, empty if there is none. Raises CheckpointError."""
    path = folder / TOKENIZER_CONFIG
    try:
        return json_object(path) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def chat_template(config: dict[str, Any], folder: Path) -> jinja2.Template | None:
    """The template of a tokenizer with this configuration, None if it has none. Raises CheckpointError for one with a
    syntax error."""
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    try:
        file = folder / TEMPLATE
        if source is None and file.exists():
            source = file.read_text(encoding="utf-8")
        return _environment().from_string(source) if isinstance(source, str) else None
    except (jinja2.TemplateError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: its chat template can't be used ({error})") from error


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
