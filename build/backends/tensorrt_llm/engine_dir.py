"""The directory trtllm-build writes: config.json and one engine a rank. Reading it, and checking it against what
was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trtpd.build.backends.tensorrt_llm.checkpoint import checkpoint_config
from trtpd.build.backends.tensorrt_llm.flags import FLAGS, PLUGIN_SWITCHES
from trtpd.build.backends.tensorrt_llm.release import parse_release
from trtpd.build.decoding import plain_json
from trtpd.build.manifest import EngineConfig, Settings
from trtpd.errors import BuildError, InputError

CONFIG = "config.json"
_BUILD_NUMBERS = ("max_batch_size", "max_seq_len", "max_beam_width", "max_draft_len")
_MODEL_KEYS = (
    "architecture", "dtype", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_size",
    "vocab_size", "hidden_size",
)  # fmt: skip
_QUANT_KEYS = ("quant_algo", "kv_cache_quant_algo")
_INSPECT_TIMEOUT_S = 1800.0


def engine_name(rank: int) -> str:
    return f"rank{rank}.engine"


def is_engine_dir(directory: Path) -> bool:
    """Whether a folder is one that trtllm-build wrote, by its config.json."""
    try:
        found = plain_json((directory / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"version", "pretrained_config", "build_config"} <= found.keys()


def read_engine_dir(directory: Path) -> Settings:
    """config.json of such a folder. Raises InputError."""
    path = directory / CONFIG
    try:
        found = plain_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror or error})") from error
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
    missing = {"version", "pretrained_config", "build_config"} - (found.keys() if isinstance(found, dict) else set())
    if missing:
        raise InputError(f"{path}: not of an engine: {', '.join(sorted(missing))} missing")
    return dict(found)


def engine_ranks(directory: Path) -> int:
    """How many whole engine files there are, counted from rank 0."""
    rank = 0
    while (directory / engine_name(rank)).is_file() and (directory / engine_name(rank)).stat().st_size > 0:
        rank += 1
    return rank


def check_engine_dir(directory: Path, config: EngineConfig, *, installed: str, devices: Sequence[str]) -> None:
    """Raises BuildError, in one line, if what is in `directory` isn't what `config` asks for. `devices` are the GPUs
    the engines may be opened on: others may be in use."""
    try:
        found = read_engine_dir(directory)
    except InputError as error:
        raise BuildError(str(error)) from error
    faults = [*_file_faults(directory, config.tp), *_config_faults(found, config, installed)]
    if not faults:
        faults += _opened_faults(directory, config, devices)
    if faults:
        raise BuildError(f"{directory}: trtllm-build made something else than was asked for: {'; '.join(faults)}")


def _file_faults(directory: Path, tp: int) -> Iterator[str]:
    for rank in range(tp):
        path = directory / engine_name(rank)
        if not path.is_file() or path.stat().st_size == 0:
            yield f"{path.name} is missing or empty"
    extra = sorted(path.name for path in directory.glob("rank*.engine"))[tp:]
    if engine_ranks(directory) > tp:
        yield f"{extra[0]} is there, but there are {tp} ranks"


def _config_faults(found: Settings, config: EngineConfig, installed: str) -> Iterator[str]:
    asked = config.tensorrt_llm
    assert asked is not None, "compiled roles have settings"
    release = parse_release(str(found["version"]))
    if release is None or release.name != asked.release:
        yield f"version is {found['version']}, planned for {asked.release}"
    elif installed not in ("none", found["version"]):
        yield f"version is {found['version']}, installed here is {installed}"
    model, build = found["pretrained_config"], found["build_config"]
    wanted = checkpoint_config(config.architecture, asked, config.tp)
    yield from _differences(model, {key: wanted[key] for key in _MODEL_KEYS}, "")
    yield from _differences(model.get("mapping", {}), {"tp_size": config.tp, "world_size": config.tp}, "mapping.")
    quantization = {key: wanted["quantization"][key] for key in _QUANT_KEYS}
    yield from _differences(model.get("quantization", {}), quantization, "quantization.")
    numbers = {key: asked.settings[key] for key in _BUILD_NUMBERS if key in asked.settings}
    yield from _differences(build, numbers, "")
    if int(build.get("max_num_tokens") or 0) < asked.settings["max_num_tokens"]:
        yield f"max_num_tokens is {build.get('max_num_tokens')}, not {asked.settings['max_num_tokens']}"
    if str(build.get("kv_cache_type", "")).upper() != str(asked.settings["kv_cache_type"]).upper():
        yield f"kv_cache_type is {build.get('kv_cache_type')}, not {str(asked.settings['kv_cache_type']).upper()}"
    yield from _differences(build.get("plugin_config", {}), _plugins(asked.settings), "plugin_config.")


def _plugins(settings: Settings) -> Settings:
    """What plugin_config must hold: switches as booleans; a dtype only where it is a fixed one."""
    wanted: Settings = {"tokens_per_block": settings["tokens_per_block"]}
    for name, value in settings.items():
        if name in PLUGIN_SWITCHES and name != "reduce_fusion":
            wanted[name] = value == "enable"
        elif name.endswith("_plugin") and isinstance(FLAGS.get(name), tuple) and value not in ("auto", "disable"):
            wanted[name] = value
    return wanted


def _differences(found: Any, wanted: Settings, prefix: str) -> Iterator[str]:
    for key, value in wanted.items():
        if found.get(key) != value:
            yield f"{prefix}{key} is {found.get(key)}, not {value}"


def _opened_faults(directory: Path, config: EngineConfig, devices: Sequence[str]) -> Iterator[str]:
    """What is wrong with the engines themselves, as a process of its own sees them with TensorRT (a fault in a
    library's loader ends only that process). Nothing where TensorRT isn't installed."""
    words = [sys.executable, "-P", "-m", "trtpd.build.backends.tensorrt_llm.inspect_engines", str(directory)]
    environ = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {})
    try:
        run = subprocess.run(
            words, env=environ, capture_output=True, text=True, timeout=_INSPECT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield f"its engines could not be opened within {_INSPECT_TIMEOUT_S:.0f} s"
        return
    try:
        report = json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        yield f"its engines could not be opened: {(run.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        return
    assert config.tensorrt_llm is not None
    for name, engine in report.get("engines", {}).items():
        yield from profile_faults(name, engine, config.tensorrt_llm.settings)


def profile_faults(name: str, engine: Settings, settings: Settings) -> Iterator[str]:
    """What is wrong with one opened engine: it must take a step of max_num_tokens and a batch of max_batch_size."""
    if fault := engine.get("fault"):
        yield f"{name}: {fault}"
        return
    for tensor, flag in (("input_ids", "max_num_tokens"), ("context_lengths", "max_batch_size")):
        largest = max((profile[2][0] for profile in engine["profiles"].get(tensor, ())), default=None)
        if largest is not None and largest < settings[flag]:
            yield f"{name}: its profiles take {tensor} up to {largest}, below {flag} {settings[flag]}"
