"""What `trtllm-build` takes. The list is the same in 1.0, 1.1 and 1.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DTYPES = ("auto", "float16", "float32", "bfloat16", "int32", "disable")
_FP8 = ("fp8", "disable")
_SWITCH = ("enable", "disable")

FLAGS: dict[str, str | tuple[str, ...]] = {
    "checkpoint_dir": "path",
    "model_config": "path",
    "build_config": "path",
    "model_cls_file": "path",
    "model_cls_name": "text",
    "output_dir": "path",
    "max_batch_size": "count",
    "max_input_len": "count",
    "max_seq_len": "count",
    "max_beam_width": "count",
    "max_num_tokens": "count",
    "opt_num_tokens": "count",
    "max_encoder_input_len": "count",
    "max_prompt_embedding_table_size": "count",
    "kv_cache_type": ("continuous", "paged", "disabled"),
    "paged_kv_cache": "text",
    "input_timing_cache": "path",
    "output_timing_cache": "path",
    "profiling_verbosity": ("layer_names_only", "detailed", "none"),
    "strip_plan": "bare",
    "weight_sparsity": "bare",
    "weight_streaming": "bare",
    "fast_build": "bare",
    "workers": "count",
    "log_level": "text",
    "enable_debug_output": "bare",
    "visualize_network": "path",
    "dry_run": "bare",
    "monitor_memory": "bare",
    "logits_dtype": ("float16", "float32"),
    "gather_context_logits": "bare",
    "gather_generation_logits": "bare",
    "gather_all_token_logits": "bare",
    "lora_dir": "path",
    "lora_ckpt_source": ("hf", "nemo"),
    "lora_target_modules": "text",
    "max_lora_rank": "count",
    "speculative_decoding_mode": (
        "draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle",
    ),
    "max_draft_len": "count",
    "bert_attention_plugin": _DTYPES,
    "gpt_attention_plugin": _DTYPES,
    "gemm_plugin": (*_DTYPES[:-1], "fp8", "nvfp4", "disable"),
    "gemm_swiglu_plugin": _FP8,
    "fp8_rowwise_gemm_plugin": _DTYPES,
    "lora_plugin": _DTYPES,
    "dora_plugin": _SWITCH,
    "moe_plugin": _DTYPES,
    "mamba_conv1d_plugin": _DTYPES,
    "nccl_plugin": _DTYPES,
    "low_latency_gemm_plugin": _FP8,
    "low_latency_gemm_swiglu_plugin": _FP8,
    "gemm_allreduce_plugin": ("float16", "bfloat16", "disable"),
    "context_fmha": _SWITCH,
    "bert_context_fmha_fp32_acc": _SWITCH,
    "remove_input_padding": _SWITCH,
    "tokens_per_block": "count",
    "use_paged_context_fmha": _SWITCH,
    "use_fp8_context_fmha": _SWITCH,
    "fuse_fp4_quant": _SWITCH,
    "multiple_profiles": _SWITCH,
    "paged_state": _SWITCH,
    "streamingllm": _SWITCH,
    "norm_quant_fusion": _SWITCH,
    "reduce_fusion": _SWITCH,
    "user_buffer": _SWITCH,
    "use_fused_mlp": _SWITCH,
    "pp_reduce_scatter": _SWITCH,
}  # fmt: skip
"""Flag → its choices, or what kind of value it takes ("bare": none)."""

OWNED = {
    "checkpoint_dir": "model",
    "output_dir": "the -o of trtpd build",
    "model_config": "model",
    "build_config": "engine_args",
    "input_timing_cache": "nothing: each role has its own",
    "output_timing_cache": "nothing: each role has its own",
    "workers": "CUDA_VISIBLE_DEVICES",
    "dry_run": "--dry-run of trtpd build",
    "max_batch_size": "max_batch of the pool",
    "max_num_tokens": "max_step_tokens of the pool",
    "max_seq_len": "kv.max_seq_tokens",
    "tokens_per_block": "kv.tokens_per_block",
}
"""Flags that trtpd sets itself, and where to say what they should be."""

PLUGIN_SWITCHES = frozenset(name for name, kind in FLAGS.items() if kind == _SWITCH)


def flag_fault(name: str, value: Any) -> str | None:
    """What is wrong with one flag and its value, None if trtllm-build would take it."""
    kind = FLAGS.get(name)
    if kind is None:
        return "no flag of trtllm-build"
    if isinstance(kind, tuple):
        return None if value in kind else f"must be one of {', '.join(kind)}"
    if kind == "bare":
        return None if isinstance(value, bool) else "takes no value: write true or false"
    if kind == "count":
        good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return None if good else "must be a whole number"
    return None if isinstance(value, str) and value else "must be a text"


def command_words(flags: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words += [f"--{name}"] if value else []
        else:
            words += [f"--{name}", str(value)]
    return words
