"""The Backend of tensorrt_llm: convert, compile, check; or link the model and write the LLM arguments.

What is dear to make grows in the builder's work folder, under names that say what it is:

WORK/checkpoints/KEY/   converted checkpoints, one for all roles of equal TP and precision
WORK/engines/KEY/       finished engine directories (KEY.part while they grow)
WORK/timing/ROLE.cache  TensorRT's timing cache, seeded from the build that is there
WORK/logs/ROLE.log      what trtllm-build said

An engine directory then holds engine/ (or llm_args.yaml and model/), timing.cache, build.log and content.json,
which names what is in it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtpd.build.backends.base import Job, Progress
from trtpd.build.backends.tensorrt_llm.checkpoint import CHECKPOINT_FORMAT, checkpoint_config, convert
from trtpd.build.backends.tensorrt_llm.engine_dir import check_engine_dir
from trtpd.build.backends.tensorrt_llm.llm_args import LLM_ARGS_FILE, MODEL_DIR, write_llm_args
from trtpd.build.backends.tensorrt_llm.release import parse_release
from trtpd.build.backends.tensorrt_llm.runs import (
    Run,
    RunPlaces,
    find_program,
    plan_run,
    run_all,
    share_devices,
    visible_devices,
)
from trtpd.build.backends.tensorrt_llm.shards import rank_shards
from trtpd.build.checkpoint import TOKENIZER_FILES, Checkpoint
from trtpd.build.decoding import plain_json
from trtpd.build.files import digest_of, link_or_copy, link_tree
from trtpd.build.machine import installed_version
from trtpd.build.manifest import EngineConfig, TensorRTConfig
from trtpd.errors import BuildError

ENGINE_DIR = "engine"
CONTENT = "content.json"
TIMING_CACHE = "timing.cache"
BUILD_LOG = "build.log"


class TensorRTBackend:
    """Compiled engines, or arguments for the LLM class, as the release wants it."""

    def key(self, digest: str, config: EngineConfig) -> str:
        given = _settings(config)
        if given.mode == "llm_api":
            return digest_of(given.mode, digest, config.role)
        return digest_of(given.mode, _checkpoint_key(digest, config), given.settings, given.release, given.sm)

    def found_key(self, directory: Path, config: EngineConfig) -> str | None:
        try:
            content = plain_json((directory / CONTENT).read_bytes())
            whole = all((directory / name).stat().st_size == size for name, size in content["files"].items())
            return str(content["key"]) if whole else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def write(self, checkpoint: Checkpoint, jobs: Sequence[Job], *, work: Path, progress: Progress) -> None:
        for job in jobs:
            if _settings(job.config).mode == "llm_api":
                _link_model(checkpoint, job.directory / MODEL_DIR)
                write_llm_args(job.directory, _settings(job.config).settings)
                _write_content(job.directory, job.key)
        compiled = [job for job in jobs if _settings(job.config).mode == "engine"]
        if compiled:
            _compile(checkpoint, compiled, work, progress)

    def link(self, source: Path, config: EngineConfig, directory: Path) -> None:
        for name in (ENGINE_DIR, MODEL_DIR):
            if (source / name).is_dir():
                link_tree(source / name, directory / name)
        for name in (CONTENT, TIMING_CACHE, BUILD_LOG):
            if (source / name).is_file():
                link_or_copy(source / name, directory / name)
        if _settings(config).mode == "llm_api":
            write_llm_args(directory, _settings(config).settings)

    def steps(self, checkpoint: Checkpoint, jobs: Sequence[Job], *, work: Path) -> list[str]:
        lines: list[str] = []
        for job in jobs:
            if _settings(job.config).mode == "llm_api":
                lines += _llm_api_steps(job)
        compiled = [job for job in jobs if _settings(job.config).mode == "engine"]
        planned: set[Path] = set()
        for job, run in zip(compiled, _plan_runs(compiled, work), strict=True):
            place = _checkpoint_place(job, work)
            if place not in planned:
                planned.add(place)
                lines += _conversion_steps(job, place)
            lines += [f"{job.config.role}: build {job.config.tp} engine(s), log in {run.log}", f"  {run.shown()}"]
        return lines


def _settings(config: EngineConfig) -> TensorRTConfig:
    assert config.tensorrt_llm is not None, "made by resolve for this engine"
    return config.tensorrt_llm


def _checkpoint_key(digest: str, config: EngineConfig) -> str:
    given = _settings(config)
    return digest_of(CHECKPOINT_FORMAT, digest, checkpoint_config(config.architecture, given, config.tp))


def _checkpoint_place(job: Job, work: Path) -> Path:
    return work / "checkpoints" / _checkpoint_key(job.digest, job.config)


def _engine_place(job: Job, work: Path) -> Path:
    return work / "engines" / job.key


def _plan_runs(jobs: Sequence[Job], work: Path) -> list[Run]:
    shares = share_devices(visible_devices(), len(jobs))
    runs = []
    for job, devices in zip(jobs, shares, strict=True):
        role = job.config.role
        place = _engine_place(job, work)
        places = RunPlaces(
            checkpoint=_checkpoint_place(job, work),
            output=place.with_name(place.name + ".part"),
            timing_cache=work / "timing" / f"{role}.cache",
            log=work / "logs" / f"{role}.log",
        )
        runs.append(plan_run(role, _settings(job.config).settings, places, tp=job.config.tp, devices=devices))
    return runs


def _compile(checkpoint: Checkpoint, jobs: Sequence[Job], work: Path, progress: Progress) -> None:
    unfinished = [job for job in jobs if not _engine_place(job, work).is_dir()]
    if unfinished:
        _compile_unfinished(checkpoint, unfinished, work, progress)
    for job in jobs:
        _place(job, work)


def _compile_unfinished(checkpoint: Checkpoint, jobs: Sequence[Job], work: Path, progress: Progress) -> None:
    program = find_program()
    _check_release(jobs)
    devices = visible_devices()
    if not devices:
        raise BuildError(
            "trtllm-build needs an NVIDIA GPU, and none is visible here; build on a machine with the GPU the engines "
            "are for, or look at the plan with --dry-run"
        )
    for job in jobs:
        place = _checkpoint_place(job, work)
        stage = f"{job.config.role} checkpoint"

        def told(done: int, total: int, stage: str = stage) -> None:
            progress(stage, done, total)

        convert(checkpoint, job.config.architecture, _settings(job.config), job.config.tp, place, told)
        _seed_timing_cache(job, work)
    runs = _plan_runs(jobs, work)
    by_role = {job.config.role: job for job in jobs}
    for run in runs:
        shutil.rmtree(run.output, ignore_errors=True)
        progress(f"{run.role} engine", 0, 0)

    def done(run: Run) -> None:
        job = by_role[run.role]
        check_engine_dir(run.output, job.config, installed=installed_version("tensorrt_llm"), devices=run.devices)
        run.output.rename(_engine_place(job, work))

    run_all(runs, program, side_by_side=len(devices) >= len(runs), done=done)


def _check_release(jobs: Sequence[Job]) -> None:
    """Raises BuildError if what is installed is another release than was planned for, hours before its engines
    would show it."""
    installed = installed_version("tensorrt_llm")
    here = parse_release(installed)
    for job in jobs:
        planned = _settings(job.config).release
        if here is not None and here.name != planned:
            raise BuildError(
                f"{job.config.role} is planned for TensorRT-LLM {planned}, installed here is {installed}; leave "
                "tensorrt_llm.version at auto, or build where that release is installed"
            )


def _seed_timing_cache(job: Job, work: Path) -> None:
    cache = work / "timing" / f"{job.config.role}.cache"
    cache.parent.mkdir(parents=True, exist_ok=True)
    former = job.former / TIMING_CACHE if job.former is not None else None
    if former is not None and former.is_file() and not cache.exists():
        shutil.copyfile(former, cache)


def _place(job: Job, work: Path) -> None:
    """Links a finished engine, its timing cache and log into the role's directory."""
    link_tree(_engine_place(job, work), job.directory / ENGINE_DIR)
    role = job.config.role
    for source, name in ((f"timing/{role}.cache", TIMING_CACHE), (f"logs/{role}.log", BUILD_LOG)):
        if (work / source).is_file():
            link_or_copy(work / source, job.directory / name)
    _write_content(job.directory, job.key)


def _write_content(directory: Path, key: str) -> None:
    files = {
        str(path.relative_to(directory)): path.stat().st_size
        for name in (ENGINE_DIR, MODEL_DIR)
        for path in sorted((directory / name).rglob("*"))
        if path.is_file()
    }
    (directory / CONTENT).write_text(json.dumps({"key": key, "files": files}, indent=2) + "\n", encoding="utf-8")


def _link_model(checkpoint: Checkpoint, target: Path) -> None:
    """Makes `target` a Hugging Face folder with the model's files, linked so that no weight is copied."""
    if not checkpoint.path.is_dir():
        raise BuildError(f"{checkpoint.path}: the LLM API loads a Hugging Face folder; convert the model to one")
    target.mkdir()
    names = ("config.json", "hf_quant_config.json", "model.safetensors.index.json", *TOKENIZER_FILES)
    files = [checkpoint.path / name for name in names] + checkpoint.source.files()
    for file in files:
        if not file.is_file():
            continue
        try:
            os.link(file.resolve(), target / file.name)
        except OSError:
            (target / file.name).symlink_to(file.resolve())


def _llm_api_steps(job: Job) -> list[str]:
    place = job.directory / LLM_ARGS_FILE
    shown: dict[str, Any] = _settings(job.config).settings
    return [
        f"{job.config.role}: link the model into {job.directory / MODEL_DIR} and write {place}:",
        *(f"  {key}: {json.dumps(value)}" for key, value in shown.items()),
    ]


def _conversion_steps(job: Job, place: Path) -> list[str]:
    """The conversion as a plan: config.json, and for ranks that are alike every tensor of the first and last layer, the
    others like the first."""
    config, given = job.config, _settings(job.config)
    document = checkpoint_config(config.architecture, given, config.tp)
    lines = [
        f"{config.role}: convert for tp {config.tp} into {place}: config.json, rank<N>.safetensors",
        f"  config.json: {json.dumps(document)}",
    ]
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in range(config.tp):
        shards = rank_shards(
            config.architecture, dtype=given.dtype, quant_algo=given.quant_algo, tp=config.tp, rank=rank
        )
        alike.setdefault(tuple(f"{one.name} {one.dtype} {list(one.shape)}" for one in shards), []).append(rank)
    last = config.architecture.num_hidden_layers - 1
    for tensors, ranks in alike.items():
        files = ", ".join(f"rank{rank}.safetensors" for rank in ranks)
        lines.append(f"  {files}: {len(tensors)} tensors{' each' if len(ranks) > 1 else ''}")
        for tensor in tensors:
            parts = tensor.split(".layers.")
            if len(parts) == 1 or int(parts[1].split(".")[0]) in (0, last):
                lines.append(f"    {tensor}")
        if last > 1:
            lines.append(f"    transformer.layers.1 to {last - 1}: as layer 0")
    return lines
