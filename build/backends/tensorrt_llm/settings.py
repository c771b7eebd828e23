"""A role's settings for TensorRT-LLM: from what the pipeline says to flags of trtllm-build or LLM arguments. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from trtpd.build.backends.tensorrt_llm.llm_args import llm_args
from trtpd.build.backends.tensorrt_llm.release import Release
from trtpd.build.gpus import Gpu
from trtpd.build.manifest import Architecture, Precision, RoleName, RoleProfile, Settings, TensorRTConfig
from trtpd.build.spec import TensorRTSpec
from trtpd.kv_transfer.layout import KVDtype, KVLayout

DTYPES: dict[Precision, str] = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "int8": "bfloat16", "int4": "bfloat16", "fp8": "bfloat16"
}  # fmt: skip
QUANT_ALGOS: dict[Precision, str] = {"int8": "W8A16", "fp8": "FP8"}
_KV_OF_DTYPE: dict[str, KVDtype] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_REDUCE_FUSION_FAMILIES = ("llama",)
"""trtllm-build quietly drops reduce_fusion for any other architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleInput:
    """What a role's settings follow from."""

    spec: TensorRTSpec
    release: Release
    gpu: Gpu
    architecture: Architecture
    role: RoleName
    tp: int
    precision: Precision
    layout: KVLayout
    profile: RoleProfile
    max_seq_tokens: int
    max_prompt_tokens: int
    engine_args: Settings


def natural_kv_dtype(architecture: Architecture, precision: Precision) -> KVDtype:
    """The KV dtype such a role has unless told otherwise: FP8 where the checkpoint brings scales for it, else
    the type it computes in."""
    quantization = architecture.quantization
    if precision == "fp8" and quantization is not None and quantization.kv_cache_quant_algo == "FP8":
        return "fp8"
    return _KV_OF_DTYPE[DTYPES[precision]]


def fused_attention(precision: Precision) -> bool:
    """Whether context FMHA, and so chunked context, exists for a precision: not in 32 bits."""
    return precision != "f32"


def draft_tokens(spec: TensorRTSpec, role: RoleName) -> int:
    """Draft tokens of one step: decode only."""
    if role == "prefill" or spec.speculative_decoding_mode is None:
        return 0
    return spec.max_draft_len or 7


def role_settings(given: RoleInput) -> TensorRTConfig:
    """A role's settings with the pool's own `engine_args` in place of ours where they name the same thing."""
    spec, release = given.spec, given.release
    prompt = given.max_prompt_tokens
    block = given.layout.tokens_per_block
    ours = _build_flags(given) if release.mode == "engine" else {}
    config = TensorRTConfig(
        release=release.name if release.known else release.text,
        mode=release.mode,
        gpu=given.gpu.name,
        sm=given.gpu.sm,
        dtype=DTYPES[given.precision],
        quant_algo=QUANT_ALGOS.get(given.precision),
        kv_cache_quant_algo="FP8" if given.layout.dtype == "fp8" else None,
        transceiver=release.spelled(spec.transceiver),
        max_tokens_in_buffer=spec.max_tokens_in_buffer or -(-prompt // block) * block,
        kv_transfer_timeout_ms=spec.kv_transfer_timeout_ms,
        max_prompt_tokens=prompt,
        chunked_context=fused_attention(given.precision),
        free_gpu_memory_fraction=spec.free_gpu_memory_fraction,
        settings=ours | given.engine_args,
    )
    if release.mode == "engine":
        return config
    arguments = llm_args(config, given.role, given.profile, tp=given.tp, block=block, max_seq_len=given.max_seq_tokens)
    return TensorRTConfig(**{name: getattr(config, name) for name in config.__struct_fields__} | {
        "settings": arguments | given.engine_args
    })  # fmt: skip


def _build_flags(given: RoleInput) -> Settings:
    """Flags of trtllm-build, without paths."""
    profile, fmha = given.profile, "enable" if fused_attention(given.precision) else "disable"
    flags: Settings = {
        "max_batch_size": profile.max_batch,
        "max_num_tokens": profile.max_step_tokens,
        "max_seq_len": given.max_seq_tokens,
        "max_beam_width": 1,
        "kv_cache_type": "paged",
        "tokens_per_block": given.layout.tokens_per_block,
        "remove_input_padding": "enable",
        "context_fmha": fmha,
        "use_paged_context_fmha": fmha,
        "gpt_attention_plugin": "auto",
        "gemm_plugin": _gemm_plugin(given),
    }
    if given.role == "prefill":
        flags["opt_num_tokens"] = profile.max_step_tokens
    else:
        flags["multiple_profiles"] = "enable"
    flags |= _fp8_plugins(given)
    if given.role != "prefill" and given.tp > 1 and given.architecture.family in _REDUCE_FUSION_FAMILIES:
        flags["reduce_fusion"] = "enable"
    if drafts := draft_tokens(given.spec, given.role):
        flags |= {"speculative_decoding_mode": given.spec.speculative_decoding_mode, "max_draft_len": drafts}
    return flags


def _gemm_plugin(given: RoleInput) -> str:
    """With FP8 weights TensorRT's own kernels win at large batches; small ones have the low-latency plugin, or
    from Blackwell on, which has none, the FP8 one."""
    if given.precision != "fp8":
        return "auto"
    if given.role == "prefill":
        return "disable"
    return "auto" if given.gpu.sm < 100 else "fp8"


def _fp8_plugins(given: RoleInput) -> Settings:
    if given.precision != "fp8" or given.gpu.sm >= 100:
        return {}
    if given.role == "decode":
        return {"low_latency_gemm_plugin": "fp8", "low_latency_gemm_swiglu_plugin": "fp8"}
    return {"gemm_swiglu_plugin": "fp8"} if given.gpu.sm == 90 else {}
