"""One TensorRT-LLM engine as lint looks at it: planned, built, or live. What isn't known is None.

The keys are TensorRT-LLM's own, so a live engine may describe itself as a plain dict of the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import msgspec

from trtpd.build.backends.tensorrt_llm.checkpoint import checkpoint_config
from trtpd.build.backends.tensorrt_llm.engine_dir import engine_ranks, read_engine_dir
from trtpd.build.backends.tensorrt_llm.flags import PLUGIN_SWITCHES
from trtpd.build.manifest import Architecture, RoleName, Settings, TensorRTConfig
from trtpd.errors import InputError
from trtpd.kv_transfer.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """`where` names it in findings. `ranks` are its ranks in a shared MPI world, leader first; `device_ids` its
    GPUs on `host`; `environment` what of UCX_*, NCCL_* and TRTLLM_* its processes see (None: unknown)."""

    where: str
    role: RoleName | None = None
    version: str | None = None
    sm: int | None = None
    architecture: str | None = None
    model_type: str | None = None
    dtype: str | None = None
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    num_hidden_layers: int | None = None
    num_key_value_heads: int | None = None
    head_size: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    cp_size: int | None = None
    world_size: int | None = None
    engine_files: int | None = None
    build: Settings = field(default_factory=dict)
    transceiver: str | None = None
    transceiver_given: bool = False
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None
    max_prompt_tokens: int | None = None
    max_answer_tokens: int | None = None
    enable_chunked_context: bool | None = None
    disable_overlap_scheduler: bool | None = None
    attn_backend: str | None = None
    host_cache_size: int | None = None
    enable_block_reuse: bool | None = None
    free_gpu_memory_fraction: float | None = None
    host: str | None = None
    device_ids: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    environment: Mapping[str, str] | None = None

    def flag(self, name: str) -> Any:
        """A build setting; switches as booleans, whether they were given as "enable" or read back as true."""
        value = self.build.get(name)
        if name in PLUGIN_SWITCHES and isinstance(value, str):
            return value == "enable"
        return None if value == "disable" else value

    @property
    def kv_dtype(self) -> str | None:
        """What KV is stored in: the quantisation's type, else the model's."""
        return self.kv_cache_quant_algo or self.dtype

    @classmethod
    def from_dict(cls, where: str, found: Mapping[str, Any]) -> Self:
        """Of a live engine's own words. Raises InputError for a key that isn't known or a value of another type."""
        known = {one.name for one in fields(cls)} - {"where"}
        if unknown := sorted(set(found) - known):
            raise InputError(
                f"{where}: {', '.join(unknown)}: unknown in a descriptor; known: {', '.join(sorted(known))}"
            )
        try:
            return msgspec.convert({"transceiver_given": "transceiver" in found, **found, "where": where}, cls)
        except msgspec.ValidationError as error:
            raise InputError(f"{where}: {error}") from error


def planned(
    role: RoleName,
    where: str,
    config: TensorRTConfig,
    architecture: Architecture,
    layout: KVLayout,
    *,
    max_seq_tokens: int,
    version: str,
) -> Descriptor:
    """Of what a pipeline file asks for."""
    model = checkpoint_config(architecture, config, layout.tp)
    build = dict(config.settings) if config.mode == "engine" else {}
    arguments: Mapping[str, Any] = config.settings if config.mode == "llm_api" else {}
    kv_cache = arguments.get("kv_cache_config")
    kv_cache = kv_cache if isinstance(kv_cache, dict) else {}
    return Descriptor(
        where=where,
        role=role,
        version=version,
        sm=config.sm,
        architecture=model["architecture"],
        model_type="DECODER_ONLY",
        dtype=config.dtype,
        quant_algo=config.quant_algo,
        kv_cache_quant_algo=config.kv_cache_quant_algo,
        num_hidden_layers=architecture.num_hidden_layers,
        num_key_value_heads=architecture.num_key_value_heads,
        head_size=architecture.head_dim,
        tp_size=layout.tp,
        pp_size=layout.pp,
        cp_size=1,
        world_size=layout.tp * layout.pp,
        build=build or _as_build(arguments, layout.tokens_per_block),
        transceiver=config.transceiver,
        transceiver_given=True,
        max_tokens_in_buffer=config.max_tokens_in_buffer,
        kv_transfer_timeout_ms=config.kv_transfer_timeout_ms,
        max_prompt_tokens=config.max_prompt_tokens,
        max_answer_tokens=max(1, max_seq_tokens - config.max_prompt_tokens),
        enable_chunked_context=arguments.get("enable_chunked_prefill", config.chunked_context),
        disable_overlap_scheduler=arguments.get("disable_overlap_scheduler"),
        attn_backend=arguments.get("attn_backend"),
        host_cache_size=kv_cache.get("host_cache_size"),
        enable_block_reuse=kv_cache.get("enable_block_reuse"),
        free_gpu_memory_fraction=config.free_gpu_memory_fraction,
    )


def _as_build(arguments: Mapping[str, Any], tokens_per_block: int) -> Settings:
    """LLM arguments under the names a compiled engine has for the same things."""
    names = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width")
    return {name: arguments[name] for name in names if name in arguments} | {"tokens_per_block": tokens_per_block}


def built(directory: Path, where: str, *, role: RoleName | None = None) -> Descriptor:
    """Of a directory that trtllm-build wrote. Raises InputError."""
    found = read_engine_dir(directory)
    model, build = found["pretrained_config"], dict(found["build_config"])
    mapping, quantization = model.get("mapping") or {}, model.get("quantization") or {}
    plugins = build.pop("plugin_config", None) or {}
    heads = model.get("num_attention_heads")
    return Descriptor(
        where=where,
        role=role,
        version=str(found["version"]),
        architecture=model.get("architecture"),
        dtype=model.get("dtype"),
        quant_algo=quantization.get("quant_algo"),
        kv_cache_quant_algo=quantization.get("kv_cache_quant_algo"),
        num_hidden_layers=model.get("num_hidden_layers"),
        num_key_value_heads=model.get("num_key_value_heads") or heads,
        head_size=model.get("head_size") or (model["hidden_size"] // heads if heads else None),
        tp_size=mapping.get("tp_size", 1),
        pp_size=mapping.get("pp_size", 1),
        cp_size=mapping.get("cp_size", 1),
        world_size=mapping.get("world_size", 1),
        engine_files=engine_ranks(directory),
        build=build | plugins,
    )
