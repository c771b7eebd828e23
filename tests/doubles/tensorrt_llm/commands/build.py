"""trtllm-build: parses and refuses as the real one does, reads a checkpoint as it does, and writes engine files
that hold the rank's weights, so that a stand-in executor can compute with them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tensorrt_llm._api import API, SM, VERSION, device_count
from tensorrt_llm.builder import NOT_WRITTEN, BuildConfig
from tensorrt_llm.engine_file import write_engine
from tensorrt_llm.models import check_weights, read_config
from tensorrt_llm.plugin import FIELDS, PluginConfig

_KINDS: dict[str, Any] = {"int": int, "str": str, "enum": str, "list[str]": str}


def parse_arguments() -> argparse.ArgumentParser:
    """The parser, flag by flag from the table."""
    parser = argparse.ArgumentParser(prog="trtllm-build", allow_abbrev=True)
    for flag, entry in API["build_flags"].items():
        names = [flag, *entry.get("aliases", [])]
        default = argparse.SUPPRESS if entry["default"] == "<absent>" else entry["default"]
        if entry["type"] == "store_true":
            parser.add_argument(*names, action="store_true", default=default, dest=flag[2:])
            continue
        choices = None if entry["type"] == "enum" else entry.get("choices")
        nargs = "+" if entry["type"] == "list[str]" else None
        kind = _KINDS[entry["type"]]
        parser.add_argument(*names, type=kind, default=default, choices=choices, nargs=nargs, dest=flag[2:])
    return parser


def build_config_of(args: argparse.Namespace, plugins: PluginConfig) -> Any:
    """BuildConfig from the command line, with the refusals that come before anything is built."""
    if args.gather_all_token_logits:
        args.gather_context_logits = True
    if args.gather_context_logits and args.max_draft_len > 0:
        raise RuntimeError("Gather context logits is not supported with draft len > 0.")
    if args.multiple_profiles == "enable" and args.opt_num_tokens is not None:
        raise RuntimeError("multiple_profiles is enabled, while opt_num_tokens is set.")
    fields = BuildConfig.__dataclass_fields__
    config = BuildConfig(**{name: value for name, value in vars(args).items() if name in fields})
    config.plugin_config = plugins
    kind = getattr(args, "kv_cache_type", None)
    if kind is not None and kind.lower() not in API["build_flags"]["--kv_cache_type"]["choices"]:
        raise RuntimeError(f"Invalid kv cache type: {kind}")
    config.kv_cache_type = (kind or "paged").upper()
    plugins.set("paged_kv_cache", config.kv_cache_type == "PAGED")
    return config


def settle(config: Any, model: dict[str, Any]) -> None:
    """What building changes in the settings, and what it refuses."""
    plugins: PluginConfig = config.plugin_config
    quant, kv = model["quantization"]["quant_algo"], model["quantization"]["kv_cache_quant_algo"]
    assert not plugins.streamingllm, "StreamingLLM is no longer supported"
    assert not plugins.pp_reduce_scatter or model["architecture"] == "MixtralForCausalLM", "only supported in mixtral"
    plugins.set("dtype", model["dtype"])
    if config.max_seq_len is None:
        config.max_seq_len = model["max_position_embeddings"]
    config.max_input_len = min(config.max_input_len, config.max_seq_len)
    if kv == "INT8" or (kv == "FP8" and quant != "FP8"):
        plugins.set("use_paged_context_fmha", False)
    if 100 <= SM < 120 and (quant in ("W8A16", "W4A16") or kv == "INT8"):
        raise NotImplementedError(f"{quant} weights and {kv} KV are not supported on SM {SM}")
    for name in ("low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin", "gemm_swiglu_plugin"):
        if plugins.to_dict()[name] == "fp8" and 100 <= SM < 120:
            raise NotImplementedError(f"{name} is not supported on SM {SM}")
        if plugins.to_dict()[name] == "fp8" and quant != "FP8":
            raise RuntimeError(f"{name} needs FP8 weights")
    if model["mapping"]["tp_size"] == 1 or model["architecture"] not in ("LlamaForCausalLM", "Gemma2ForCausalLM"):
        plugins.set("reduce_fusion", False)
    if model["mapping"]["world_size"] == 1:
        plugins.set("nccl_plugin", None)
    drafts = config.max_draft_len
    if drafts:
        config.max_num_tokens = max(config.max_num_tokens, config.max_batch_size * (drafts + 1))


def profiles_of(config: Any) -> dict[str, list[list[list[int]]]]:
    """Shape ranges of an engine's inputs, one for each profile."""
    tops = [1024, config.max_num_tokens] if config.plugin_config.multiple_profiles else [config.max_num_tokens]
    steps = [top for top in tops if top <= config.max_num_tokens]
    tokens = [[[1], [max(1, top // 2)], [top]] for top in steps]
    batch = config.max_batch_size * config.max_beam_width
    return {
        "input_ids": tokens,
        "position_ids": tokens,
        "context_lengths": [[[1], [max(1, batch // 2)], [batch]] for _ in steps],
    }


def told_to_fail(args: argparse.Namespace) -> None:
    """Writes the call down where a test wants to count them, and fails where it wants a failure."""
    if journal := os.environ.get("TRTPD_DOUBLE_JOURNAL"):
        with open(journal, "a") as file:
            file.write(f"{args.output_timing_cache} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    failing = os.environ.get("TRTPD_DOUBLE_FAIL")
    if failing and failing in args.output_timing_cache:
        raise RuntimeError("CUDA out of memory (told to by a test)")


def main() -> None:
    """Builds every rank of the checkpoint, one after the other."""
    args = parse_arguments().parse_args()
    told_to_fail(args)
    if device_count() == 0:
        raise ValueError("max_workers must be greater than 0 (no CUDA device)")
    plugins = PluginConfig.from_arguments(args)
    config = build_config_of(args, plugins)
    checkpoint = Path(args.checkpoint_dir)
    model = read_config(checkpoint)
    settle(config, model)
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    for rank in range(model["mapping"]["world_size"]):
        weights = checkpoint / f"rank{rank}.safetensors"
        assert weights.is_file(), f"{weights} is missing"
        check_weights(weights, model, rank)
        print(f"[TensorRT-LLM] building rank {rank} of {checkpoint} with {VERSION}", flush=True)
        write_engine(
            output / f"rank{rank}.engine", weights, {"version": VERSION, "sm": SM, "profiles": profiles_of(config)}
        )
        if rank == 0:
            _write_config(output, model, config)
    Path(args.output_timing_cache).write_bytes(b"timing cache of the stand-in\n")


def _write_config(output: Path, model: dict[str, Any], config: Any) -> None:
    build = {name: getattr(config, name) for name in BuildConfig.__dataclass_fields__ if name not in NOT_WRITTEN}
    build |= {"plugin_config": config.plugin_config.to_dict(), "lora_config": {}}
    assert set(build["plugin_config"]) == set(FIELDS)
    document = {"version": VERSION, "pretrained_config": model, "build_config": build}
    (output / "config.json").write_text(json.dumps(document, indent=4))


if __name__ == "__main__":
    main()
