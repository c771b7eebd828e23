"""`trtpd init`: a pipeline file with every key, its default and what it means, fitted to a model and a
machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from trtpd.build.checkpoint import Checkpoint
from trtpd.build.engines import EngineName
from trtpd.build.gpu_roles import fitting_tp
from trtpd.build.machine import Machine
from trtpd.build.resolve import resolve
from trtpd.build.spec import ROLES, PipelineSpec, PoolSpec, PoolsSpec, SloSpec

_HEAD = "# A trtpd pipeline: check it with `trtpd lint`, then `trtpd build` and `trtpd serve`.\n"
_MIXED = "  # A third pool that does both, for when one of the others can't (instances 0: built, not started):\n"
_WRAP = 46


def init_text(checkpoint: Checkpoint, engine: EngineName, machine: Machine, *, folder: Path) -> str:
    """The text of a pipeline file that will lie in `folder`. What stands in it was resolved for this
    machine; keys that follow from others stay `auto`."""
    model = checkpoint.path
    inside = model.is_relative_to(folder.resolve())
    pool = PoolSpec()
    spec = PipelineSpec(
        model=str(model.relative_to(folder.resolve()) if inside else model),
        engine=engine,
        pools=PoolsSpec(prefill=pool, decode=pool),
        slo=SloSpec(ttft_ms=1000, tpot_ms=80),
    )
    if engine == "tensorrt_llm":
        pool = PoolSpec(tp=fitting_tp(spec, checkpoint.architecture, machine))
        spec = spec.model_copy(update={"pools": PoolsSpec(prefill=pool, decode=pool)})
    resolved = resolve(spec, checkpoint.architecture, machine)
    settings: dict[str, Any] = resolved.settings()
    shown: dict[str, Any] = spec.model_dump()
    for role in resolved.roles:
        found = settings["pools"][role]
        shown["pools"][role] |= {
            key: found[key] for key in ("cores", "max_batch", "max_step_tokens", "chunk_tokens", "kv_tokens")
        }
    shown["kv"]["max_seq_tokens"] = settings["kv"]["max_seq_tokens"]
    for section in ("emulated", "tensorrt_llm"):
        if engine != section:
            del shown[section]
    if engine != "tensorrt_llm":
        for role in resolved.roles:
            del shown["pools"][role]["engine_args"]
    return _HEAD + "".join(_lines(shown, PipelineSpec, 0))


def _lines(values: dict[str, Any], model: type[BaseModel], depth: int) -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        field = model.model_fields[name]
        inner = _section(model, name)
        if inner is None:
            lines.append(_line(f"{'  ' * depth}{name}: {_yaml(value)}", field.description or ""))
        elif value is not None:
            lines += ["\n"] if depth == 0 else []
            lines.append(_line(f"{'  ' * depth}{name}:", field.description or ""))
            lines += _lines(value, inner, depth + 1)
        elif name == "mixed":
            lines += [_MIXED, "  # mixed: {instances: 0}\n"]
    return lines


def _section(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    if model is PoolsSpec and name in ROLES:
        return PoolSpec
    annotation = model.model_fields[name].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _line(setting: str, description: str) -> str:
    return f"{setting:<{_WRAP}} # {description}\n"


def _yaml(value: Any) -> str:
    if value is None:
        return "auto"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str) and value.isidentifier() and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
