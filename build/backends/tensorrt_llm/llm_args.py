"""Arguments of the LLM class (PyTorch backend) for one role, as releases from 1.3 on take them in a YAML file.

Those releases refuse a file with a key they don't know, so every key here is one of theirs, and a pool's own
`engine_args` are checked against the same list.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from trtpd.build.manifest import RoleName, RoleProfile, Settings, TensorRTConfig

LLM_ARGS_FILE = "llm_args.yaml"
MODEL_DIR = "model"

KEYS = frozenset((
    "model", "tokenizer", "tokenizer_mode", "custom_tokenizer", "skip_tokenizer_init", "trust_remote_code",
    "tensor_parallel_size", "dtype", "revision", "tokenizer_revision", "model_kwargs", "pipeline_parallel_size",
    "context_parallel_size", "gpus_per_node", "moe_cluster_parallel_size", "moe_tensor_parallel_size",
    "moe_expert_parallel_size", "enable_attention_dp", "enable_lm_head_tp_in_adp", "pp_partition", "cp_config",
    "load_format", "enable_lora", "lora_config", "kv_cache_config", "enable_chunked_prefill",
    "guided_decoding_backend", "batched_logits_processor", "iter_stats_max_iterations",
    "request_stats_max_iterations", "peft_cache_config", "scheduler_config", "cache_transceiver_config",
    "sparse_attention_config", "speculative_config", "max_batch_size", "max_input_len", "max_seq_len",
    "max_beam_width", "max_num_tokens", "gather_generation_logits", "num_postprocess_workers",
    "postprocess_tokenizer_dir", "reasoning_parser", "decoding_config", "mpi_session", "otlp_traces_endpoint",
    "backend", "return_perf_metrics", "perf_metrics_max_requests", "orchestrator_type", "env_overrides",
    "garbage_collection_gen0_threshold", "cuda_graph_config", "attention_dp_config", "disable_overlap_scheduler",
    "moe_config", "nvfp4_gemm_config", "attn_backend", "sampler_type", "enable_iter_perf_stats",
    "enable_iter_req_stats", "print_iter_log", "batch_wait_timeout_ms", "batch_wait_timeout_iters",
    "batch_wait_max_tokens_ratio", "torch_compile_config", "enable_autotuner", "enable_min_latency",
    "stream_interval", "force_dynamic_quantization", "allreduce_strategy", "checkpoint_format",
    "kv_connector_config", "max_stats_len",
))  # fmt: skip

OWNED = {
    "model": "model",
    "tensor_parallel_size": "tp of the pool",
    "max_batch_size": "max_batch of the pool",
    "max_num_tokens": "max_step_tokens of the pool",
    "max_seq_len": "kv.max_seq_tokens",
    "cache_transceiver_config": "tensorrt_llm.transceiver, max_tokens_in_buffer, kv_transfer_timeout_ms",
}
"""Arguments that trtpd sets itself, and where to say what they should be."""


def llm_args(
    config: TensorRTConfig, role: RoleName, profile: RoleProfile, *, tp: int, block: int, max_seq_len: int
) -> Settings:
    """One role's arguments, without the model's place.

    Prefill runs without the overlap scheduler, as a context server must, and without CUDA graphs, whose batches
    are those of decode steps. The KV dtype is left to the checkpoint unless it is FP8. Blocks aren't reused between
    requests: reuse has sent blocks that were evicted under the transfer (#12542), and without it the count of used
    blocks tells what is held for others.
    """
    transceiver: Settings = {
        "backend": config.transceiver,
        "max_tokens_in_buffer": config.max_tokens_in_buffer,
    }
    if config.kv_transfer_timeout_ms is not None:
        transceiver["kv_transfer_timeout_ms"] = config.kv_transfer_timeout_ms
    graphs = None if role == "prefill" else {"max_batch_size": profile.max_batch, "enable_padding": True}
    return {
        "backend": "pytorch",
        "tensor_parallel_size": tp,
        "dtype": config.dtype,
        "max_batch_size": profile.max_batch,
        "max_num_tokens": profile.max_step_tokens,
        "max_seq_len": max_seq_len,
        "max_beam_width": 1,
        "attn_backend": "TRTLLM",
        "enable_chunked_prefill": config.chunked_context,
        "disable_overlap_scheduler": role == "prefill",
        "cuda_graph_config": graphs,
        "kv_cache_config": {
            "enable_block_reuse": False,
            "free_gpu_memory_fraction": config.free_gpu_memory_fraction,
            "tokens_per_block": block,
            "dtype": "fp8" if config.kv_cache_quant_algo == "FP8" else "auto",
        },
        "cache_transceiver_config": transceiver,
        "enable_iter_perf_stats": True,
        "enable_iter_req_stats": True,
    }


def write_llm_args(directory: Path, settings: Settings) -> None:
    """Writes the arguments file of an engine directory; the model is the folder MODEL_DIR beside it."""
    text = yaml.safe_dump(msgspec.to_builtins(settings), sort_keys=False)
    (directory / LLM_ARGS_FILE).write_text(text, encoding="utf-8")
