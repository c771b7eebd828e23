"""What `resolve` needs to know of roles that run on GPUs: their estimates, defaults and TensorRT-LLM settings.
Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trtpd.build.backends.tensorrt_llm import settings
from trtpd.build.backends.tensorrt_llm.release import Release, choose_release
from trtpd.build.backends.tensorrt_llm.shards import tp_faults
from trtpd.build.engines import engine_layout, weights_bytes
from trtpd.build.gpus import WEIGHT_BYTES, Estimate, Gpu, choose_gpu, kv_token_bytes
from trtpd.build.machine import Machine
from trtpd.build.manifest import Architecture, Precision, RoleName, RoleProfile, TensorRTConfig
from trtpd.build.roles import RoleDefaults, gpu_defaults
from trtpd.build.spec import PipelineSpec
from trtpd.kv_transfer.layout import KVLayout


def target_release(spec: PipelineSpec, machine: Machine) -> Release:
    """The release of TensorRT-LLM that a pipeline is built for."""
    return choose_release(spec.tensorrt_llm.version, machine.tensorrt_llm)


def target_gpu(spec: PipelineSpec, machine: Machine) -> Gpu:
    """The GPU that a pipeline is built for."""
    return choose_gpu(spec.tensorrt_llm.gpu, machine.gpus)


def estimate(
    spec: PipelineSpec, precision: Precision, architecture: Architecture, machine: Machine, layout: KVLayout
) -> Estimate:
    """What one instance with such weights and KV can hold and do on the pipeline's GPU."""
    # The embedding isn't split: every rank has all of it.
    copies = (layout.tp - 1) * architecture.vocab_size * architecture.hidden_size * max(2, WEIGHT_BYTES[precision])
    return Estimate(
        gpu=target_gpu(spec, machine),
        tp=layout.tp,
        weights_bytes=weights_bytes(spec.engine, architecture, precision, layout.tp) + int(copies),
        kv_token_bytes=kv_token_bytes(architecture, itemsize_bytes=layout.itemsize_bytes, tp=layout.tp),
        memory_share=spec.tensorrt_llm.free_gpu_memory_fraction,
    )


def longest_prompt(
    spec: PipelineSpec,
    precisions: Mapping[RoleName, Precision],
    architecture: Architecture,
    machine: Machine,
    layouts: Mapping[RoleName, KVLayout],
    max_seq_tokens: int,
) -> int:
    """The longest prompt of a pipeline: as the file says, else one that leaves a token to answer with and whose KV
    every role has transfer buffers for."""
    if spec.tensorrt_llm.max_prompt_tokens is not None:
        return spec.tensorrt_llm.max_prompt_tokens
    buffers = [
        estimate(spec, precisions[role], architecture, machine, layout).buffer_tokens
        for role, layout in layouts.items()
    ]
    return max(1, min(max_seq_tokens - 1, *buffers))


def fitting_tp(spec: PipelineSpec, architecture: Architecture, machine: Machine) -> int:
    """The smallest TP, a power of two, with which the model's weights and usual requests fit; 1 if none does."""
    given = spec.tensorrt_llm
    wanted = min(architecture.max_position_embeddings, 8 * (given.prompt_tokens + given.answer_tokens))
    precision: Precision = "fp8" if architecture.quantization else spec.precision or "bf16"
    for tp in (1, 2, 4, 8):
        layout = engine_layout(spec.engine, architecture, tokens_per_block=32, dtype="bf16", tp=tp)
        room = estimate(spec, precision, architecture, machine, layout)
        if not tp_faults(architecture, tp) and room.kv_tokens >= wanted:
            return tp
    return 1


def role_defaults(
    spec: PipelineSpec,
    role: RoleName,
    precision: Precision,
    architecture: Architecture,
    machine: Machine,
    layout: KVLayout,
    max_prompt_tokens: int,
) -> RoleDefaults:
    """A role's defaults on the pipeline's GPU."""
    given = spec.tensorrt_llm
    tpot_s = spec.slo.tpot_ms / 1000 if spec.slo.tpot_ms else None
    batch = estimate(spec, precision, architecture, machine, layout).batch(
        prompt_tokens=given.prompt_tokens, answer_tokens=given.answer_tokens, tpot_s=tpot_s
    )
    whole = 0 if settings.fused_attention(precision) else max_prompt_tokens
    return gpu_defaults(
        role,
        decode_batch=batch,
        prompt_tokens=given.prompt_tokens,
        least_step_tokens=whole,
        draft_tokens=settings.draft_tokens(given, role),
    )


def role_config(
    spec: PipelineSpec,
    role: RoleName,
    precision: Precision,
    architecture: Architecture,
    machine: Machine,
    layout: KVLayout,
    profile: RoleProfile,
    max_seq_tokens: int,
    max_prompt_tokens: int,
) -> TensorRTConfig:
    """A role's settings for TensorRT-LLM."""
    return settings.role_settings(
        settings.RoleInput(
            spec=spec.tensorrt_llm,
            release=target_release(spec, machine),
            gpu=target_gpu(spec, machine),
            architecture=architecture,
            role=role,
            tp=layout.tp,
            precision=precision,
            layout=layout,
            profile=profile,
            max_seq_tokens=max_seq_tokens,
            max_prompt_tokens=max_prompt_tokens,
            engine_args=spec.pools.given()[role].engine_args,
        )
    )
