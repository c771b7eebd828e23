"""`trtpd lint` for TensorRT-LLM: on a pipeline file, on engine directories, on descriptors of a live pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtpd.build import gpu_roles
from trtpd.build.backends.tensorrt_llm import flags, llm_args
from trtpd.build.backends.tensorrt_llm.backend import ENGINE_DIR
from trtpd.build.backends.tensorrt_llm.descriptor import Descriptor, built, planned
from trtpd.build.backends.tensorrt_llm.release import KNOWN_RELEASES, parse_release
from trtpd.build.backends.tensorrt_llm.settings import natural_kv_dtype
from trtpd.build.backends.tensorrt_llm.shards import tp_faults
from trtpd.build.findings import Finding, error, warning
from trtpd.build.machine import Machine
from trtpd.build.manifest import Architecture, EngineConfig, RoleName, TensorRTConfig
from trtpd.build.resolve import ResolvedPipeline, ResolvedRole
from trtpd.build.tensorrt_pair_rules import check_pairs
from trtpd.build.tensorrt_rules import check_engine
from trtpd.build.tensorrt_run_rules import check_run
from trtpd.errors import InputError

_GIB = 1 << 30
_SHORT = 4
"""Usual prompts that the longest one should be worth."""


def check_descriptors(found: Sequence[Descriptor]) -> list[Finding]:
    """Findings on engines and between them, errors first."""
    findings = [finding for one in found for rule in (check_engine, check_run) for finding in rule(one)]
    findings += check_pairs(found)
    return sorted(findings, key=lambda finding: finding.severity != "error")


def lint_live(pair: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Findings on what running engines say of themselves, by instance name. Raises InputError for an unknown key."""
    return check_descriptors([Descriptor.from_dict(name, words) for name, words in pair.items()])


def lint_engine_dirs(directories: Sequence[Path]) -> list[Finding]:
    """Findings on directories that trtllm-build wrote. Raises InputError for one that isn't."""
    return check_descriptors([built(directory, str(directory)) for directory in directories])


def lint_pipeline(pipeline: ResolvedPipeline, architecture: Architecture, machine: Machine) -> list[Finding]:
    """Findings on a resolved pipeline file, beyond those that hold for every engine."""
    spec = pipeline.spec
    findings: list[Finding] = []
    descriptors = []
    for role in pipeline.roles.values():
        config = _settings(role)
        findings += _precision(role, config, architecture)
        findings += _split(role, architecture, paired=len(pipeline.roles) > 1)
        findings += _own_args(role.role, config, spec.pools.given()[role.role].engine_args)
        findings += _memory(pipeline, role, config, architecture, machine)
        descriptors.append(
            planned(
                role.role,
                f"pools.{role.role}",
                config,
                architecture,
                role.layout,
                max_seq_tokens=pipeline.max_seq_tokens,
                version=config.release,
            )
        )
    findings += _transfer_path(spec.transfer.path)
    findings += _installation(pipeline, machine)
    findings += [found for found in check_descriptors(descriptors) if found.code != "trt_release_unknown"]
    return list(dict.fromkeys(findings))


def lint_build_roles(build: Path, configs: Mapping[RoleName, EngineConfig]) -> list[Finding]:
    """Findings on the roles of a build directory: settings, and compiled engines as their own config.json has them.
    Engines are described as they are, run settings as they were planned."""
    descriptors, findings = [], []
    for role, config in configs.items():
        settings = config.tensorrt_llm
        if settings is None:
            continue
        plan = planned(
            role,
            role,
            settings,
            config.architecture,
            config.layout,
            max_seq_tokens=config.max_seq_tokens,
            version=settings.release,
        )
        descriptors.append(plan)
        directory = build / role / ENGINE_DIR
        if settings.mode != "engine":
            continue
        try:
            descriptors[-1] = _merged(plan, built(directory, f"{role}/{ENGINE_DIR}", role=role))
        except InputError as fault:
            findings.append(
                error("incomplete", role, ("built", "broken"), str(fault), "build it again with `trtpd build`")
            )
    return findings + check_descriptors(descriptors)


def _merged(plan: Descriptor, engine: Descriptor) -> Descriptor:
    """An engine with the run settings that were planned for it."""
    values = {name: getattr(plan, name) for name in Descriptor.__dataclass_fields__}
    values |= {
        name: getattr(engine, name)
        for name in Descriptor.__dataclass_fields__
        if name not in ("transceiver_given",) and getattr(engine, name) is not None
    }
    return Descriptor(**values)


def _settings(role: ResolvedRole) -> TensorRTConfig:
    assert role.tensorrt_llm is not None, "resolve made it for this engine"
    return role.tensorrt_llm


def _transfer_path(path: str) -> Iterator[Finding]:
    if path != "auto":
        yield error(
            "trt_transfer_path",
            "transfer.path",
            (path, "auto"),
            f"is {path}; executors of TensorRT-LLM move their KV themselves",
            "leave it at auto, and choose with tensorrt_llm.transceiver",
        )


def _installation(pipeline: ResolvedPipeline, machine: Machine) -> Iterator[Finding]:
    asked = gpu_roles.target_release(pipeline.spec, machine)
    here = parse_release(machine.tensorrt_llm)
    if not asked.known:
        yield error(
            "trt_release_unknown",
            "tensorrt_llm.version",
            (asked.text, KNOWN_RELEASES),
            f"is {asked.text}; trtpd knows {KNOWN_RELEASES}",
            "use one of these",
        )
    elif here is None:
        yield warning(
            "trt_absent",
            "tensorrt_llm.version",
            (asked.text, machine.tensorrt_llm),
            "TensorRT-LLM isn't installed here, so this can be planned (`trtpd build --dry-run`) but not built",
            "build where it is installed (see docs/tensorrt-llm.md)",
        )
    elif here.line != asked.line:
        yield warning(
            "trt_release_differs",
            "tensorrt_llm.version",
            (asked.text, machine.tensorrt_llm),
            f"is {asked.text}, here is {machine.tensorrt_llm}: it can be planned here but not built",
            "leave it at auto, or build where that release is installed",
        )


def _precision(role: ResolvedRole, config: TensorRTConfig, architecture: Architecture) -> Iterator[Finding]:
    where, stored = f"pools.{role.role}.precision", "fp8" if architecture.quantization else "plain"
    if (role.precision == "fp8") != (stored == "fp8"):
        yield error(
            "trt_precision_source",
            where,
            (role.precision, stored),
            f"is {role.precision}, the model's weights are {stored}: trtpd neither calibrates FP8 nor undoes it",
            "use an FP8 checkpoint made by ModelOpt for precision fp8, a plain one otherwise",
        )
    if config.mode == "llm_api" and role.precision == "int8":
        yield error(
            "trt_llm_api_precision",
            where,
            (role.precision, config.release),
            f"is int8; TensorRT-LLM {config.release} has no int8 weights for plain checkpoints",
            "use bf16, or an FP8 checkpoint",
        )
    natural = natural_kv_dtype(architecture, role.precision)
    scales = architecture.quantization is not None and architecture.quantization.kv_cache_quant_algo == "FP8"
    fits = role.layout.dtype == natural or (role.layout.dtype == config_kv(config) and role.precision == "fp8")
    if not fits or (role.layout.dtype == "fp8" and not scales):
        yield error(
            "trt_kv_dtype_weights",
            f"pools.{role.role}.kv_dtype",
            (role.layout.dtype, natural),
            f"is {role.layout.dtype}; with {role.precision} weights of this model KV is {natural}",
            "leave kv.dtype at auto",
        )
    if role.precision == "f32":
        yield warning(
            "trt_f32",
            where,
            ("f32", "bf16"),
            "is f32, for which TensorRT-LLM has no fused attention: prompts aren't cut into chunks, and all is slow",
            "use bf16 but for comparisons",
        )


def config_kv(config: TensorRTConfig) -> str:
    """The KV dtype of a model's own type, by our names."""
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[config.dtype]


def _split(role: ResolvedRole, architecture: Architecture, paired: bool) -> Iterator[Finding]:
    faults = tp_faults(architecture, role.tp)
    if faults:
        sizes = [tp for tp in range(1, 2 * role.tp + 1) if not paired or tp & (tp - 1) == 0]
        fits = [tp for tp in sizes if not tp_faults(architecture, tp)]
        nearest = [tp for tp in fits if tp < role.tp][-1:] + [tp for tp in fits if tp > role.tp][:1]
        numbers = ", ".join(f"{number} ({what})" for what, number in faults)
        yield error(
            "trt_tp_split",
            f"pools.{role.role}.tp",
            (role.tp, faults[0][1]),
            f"is {role.tp}, over which the model's {numbers} can't be divided evenly",
            f"set it to {' or '.join(map(str, nearest))}",
        )


def _own_args(role: str, config: TensorRTConfig, given: Mapping[str, Any]) -> Iterator[Finding]:
    compiled = config.mode == "engine"
    owned = flags.OWNED if compiled else llm_args.OWNED
    for name, value in given.items():
        where = f"pools.{role}.engine_args.{name}"
        unknown = None if name in llm_args.KEYS else f"no argument of the LLM class of {config.release}"
        fault = flags.flag_fault(name, value) if compiled else unknown
        if fault:
            yield error(
                "trt_engine_arg",
                where,
                (f"{name}: {value}", config.release),
                f"is {value!r}: {fault}",
                "tensor parallelism is tp of the pool" if name in ("tp_size", "pp_size", "cp_size") else "leave it out",
            )
        elif name in owned:
            yield error(
                "trt_engine_arg_owned",
                where,
                (f"{name}: {value}", owned[name]),
                "is set by trtpd itself",
                f"say it with {owned[name]}",
            )


def _memory(
    pipeline: ResolvedPipeline, role: ResolvedRole, config: TensorRTConfig, architecture: Architecture, machine: Machine
) -> Iterator[Finding]:
    room = gpu_roles.estimate(pipeline.spec, role.precision, architecture, machine, role.layout)
    given, memory = pipeline.spec.tensorrt_llm, room.gpu.memory_bytes / _GIB
    usual = min(architecture.max_position_embeddings, given.prompt_tokens + given.answer_tokens)
    if room.kv_tokens < max(usual, pipeline.spec.kv.max_seq_tokens or 0):
        weights = room.weights_bytes / role.tp / _GIB
        yield error(
            "trt_gpu_memory",
            f"pools.{role.role}.tp",
            (f"{weights:.0f} GiB", f"{memory:.0f} GiB"),
            f"is {role.tp}: {weights:.0f} GiB of weights on each {room.gpu.name} ({memory:.0f} GiB) leave room for "
            f"{room.kv_tokens} tokens of KV",
            "raise tp, lower kv.max_seq_tokens, or name a larger tensorrt_llm.gpu",
        )
    elif given.max_prompt_tokens is None and config.max_prompt_tokens < min(
        pipeline.max_seq_tokens - 1, _SHORT * given.prompt_tokens
    ):
        yield warning(
            "trt_prompt_short",
            "tensorrt_llm.max_prompt_tokens",
            (config.max_prompt_tokens, pipeline.max_seq_tokens),
            f"is {config.max_prompt_tokens}: transfer buffers for longer prompts would take too much of what the "
            f"weights leave on {room.gpu.name}",
            "raise tp or name a larger tensorrt_llm.gpu, or set it yourself",
        )
    elif config.max_tokens_in_buffer > room.buffer_tokens + role.layout.tokens_per_block:
        buffers = 2 * config.max_tokens_in_buffer * room.kv_token_bytes / role.tp / _GIB
        yield warning(
            "trt_buffer_memory",
            "tensorrt_llm.max_prompt_tokens",
            (config.max_tokens_in_buffer, room.buffer_tokens),
            f"makes transfer buffers of {buffers:.1f} GiB on each GPU of {role.role}, much beside its KV cache: "
            "starting may fail for lack of memory (#13506)",
            f"set it to {room.buffer_tokens} or less, or leave it at auto",
        )
