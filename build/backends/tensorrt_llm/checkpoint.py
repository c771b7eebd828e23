"""Converts a model to a TensorRT-LLM checkpoint: config.json and rank<N>.safetensors. CPU only.

One tensor of one rank is in memory at a time. A rank's file appears under its name when it is whole, so a
conversion that was cut off goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtpd.build.backends.tensorrt_llm.fp8 import rescaled
from trtpd.build.backends.tensorrt_llm.shards import Shard, excluded, rank_shards, tp_faults
from trtpd.build.checkpoint import Checkpoint, StoredTensor
from trtpd.build.families import FAMILIES
from trtpd.build.manifest import Architecture, Settings, TensorRTConfig
from trtpd.build.tensors import NUMPY_DTYPES, TensorSpec, bf16_bits, from_bf16_bits, write_tensors
from trtpd.errors import CheckpointError

Array = npt.NDArray[Any]
CHECKPOINT_FORMAT = 1
_CHUNK_VALUES = 16 << 20
_GPUS_PER_NODE = 8


def checkpoint_config(architecture: Architecture, config: TensorRTConfig, tp: int) -> Settings:
    """config.json of the checkpoint."""
    a = architecture
    found: Settings = {
        "architecture": FAMILIES[a.family].model_class,
        "dtype": config.dtype,
        "logits_dtype": "float32",
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position_embeddings,
        "hidden_size": a.hidden_size,
        "num_hidden_layers": a.num_hidden_layers,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_key_value_heads,
        "head_size": a.head_dim,
        "qk_layernorm": a.qk_norm,
        "hidden_act": "silu",
        "intermediate_size": a.intermediate_size,
        "norm_epsilon": a.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "rotary_embedding_dim": a.head_dim,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1, "cp_size": 1, "gpus_per_node": _GPUS_PER_NODE},
        "quantization": {
            "quant_algo": config.quant_algo,
            "kv_cache_quant_algo": config.kv_cache_quant_algo,
            "exclude_modules": _exclude_modules(a) if config.quant_algo == "FP8" else None,
        },
        "attn_bias": a.attention_bias,
        "mlp_bias": False,
        "rotary_base": a.rope_theta,
        "rotary_scaling": _rotary_scaling(a),
        "tie_word_embeddings": a.tie_word_embeddings,
    }
    return found | ({"qwen_type": a.family} if a.family.startswith("qwen") else {})


def _rotary_scaling(architecture: Architecture) -> Settings | None:
    scaling = architecture.rope_scaling
    if scaling is None:
        return None
    numbers = {name: getattr(scaling, name) for name in scaling.__struct_fields__}
    return {"type": "llama3", "rope_type": "llama3", **numbers}


def _exclude_modules(architecture: Architecture) -> list[str]:
    """Modules that aren't quantised, by their new names. The head never is."""
    names = {
        "self_attn.q_proj": "attention.qkv", "self_attn.o_proj": "attention.dense",
        "mlp.gate_proj": "mlp.fc", "mlp.up_proj": "mlp.gate", "mlp.down_proj": "mlp.proj",
    }  # fmt: skip
    found = ["lm_head"]
    for layer in range(architecture.num_hidden_layers):
        for source, target in names.items():
            if excluded(architecture, f"model.layers.{layer}.{source}"):
                found.append(f"transformer.layers.{layer}.{target}")
    return found


def convert(
    checkpoint: Checkpoint,
    architecture: Architecture,
    config: TensorRTConfig,
    tp: int,
    directory: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Writes the checkpoint for `tp` ranks into `directory`, but for the ranks whose files are there.

    `progress(done, total)` counts bytes. Raises CheckpointError for a model that can't be split so or holds
    values that aren't finite, OSError as the file system does.
    """
    if faults := tp_faults(architecture, tp):
        told = " and ".join(f"{number} {what}" for what, number in faults)
        raise CheckpointError(f"{checkpoint.path}: can't be split over tp {tp}: {told} don't divide")
    directory.mkdir(parents=True, exist_ok=True)
    plans = [
        rank_shards(architecture, dtype=config.dtype, quant_algo=config.quant_algo, tp=tp, rank=rank)
        for rank in range(tp)
    ]
    total = sum(_spec(shard).size_bytes for shards in plans for shard in shards)
    done = 0
    for rank, shards in enumerate(plans):
        target = directory / f"rank{rank}.safetensors"
        size = sum(_spec(shard).size_bytes for shard in shards)
        if not target.is_file():
            part = target.with_suffix(".part")
            part.unlink(missing_ok=True)
            arrays = (shard_array(checkpoint, shard) for shard in shards)
            for written in write_tensors(part, [_spec(shard) for shard in shards], arrays, {"format": "pt"}):
                progress(done + written, total)
            part.rename(target)
        done += size
    text = json.dumps(checkpoint_config(architecture, config, tp), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def _spec(shard: Shard) -> TensorSpec:
    return TensorSpec(name=shard.name, dtype=shard.dtype, shape=shard.shape)


def shard_array(checkpoint: Checkpoint, shard: Shard) -> Array:
    """A shard's values as they are stored. Raises CheckpointError as `convert`."""
    scales = [_scale(checkpoint, name) for name in shard.scales]
    if not shard.pieces:
        return np.array([max(scales)], np.float32)
    parts = list(_parts(checkpoint, shard, scales))
    missing = shard.shape[0] - sum(part.shape[0] for part in parts)
    if missing:
        parts.append(np.zeros((missing, *shard.shape[1:]), parts[0].dtype))
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _parts(checkpoint: Checkpoint, shard: Shard, scales: list[np.float32]) -> Iterator[Array]:
    for index, piece in enumerate(shard.pieces):
        stored = checkpoint.source.stored(piece.source)
        span = slice(piece.start, piece.stop)
        values = stored.values[span] if piece.axis == 0 else stored.values[:, span]
        if shard.dtype == "F8_E4M3":
            if stored.dtype != "F8_E4M3":
                raise CheckpointError(f"{checkpoint.path}: {piece.source} is {stored.dtype}; its quantisation says FP8")
            yield rescaled(values, scales[index], max(scales))
        else:
            yield _converted(checkpoint, piece.source, StoredTensor(stored.dtype, values), shard.dtype)


def _converted(checkpoint: Checkpoint, name: str, stored: StoredTensor, dtype: str) -> Array:
    """Values in another stored dtype, exactly where it is the same; some rows at a time, to save memory."""
    if stored.dtype not in ("F32", "F16", "BF16"):
        raise CheckpointError(f"{checkpoint.path}: {name} is {stored.dtype}; a weight must be F32, F16 or BF16 here")
    values = stored.values
    result = values if stored.dtype == dtype else np.empty(values.shape, NUMPY_DTYPES[dtype])
    rows = max(1, _CHUNK_VALUES // max(1, values[:1].size))
    for start in range(0, values.shape[0], rows):
        span = slice(start, start + rows)
        numbers = from_bf16_bits(values[span]) if stored.dtype == "BF16" else values[span].astype(np.float32)
        if dtype == "F16":
            with np.errstate(over="ignore"):
                numbers = numbers.astype(np.float16)
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{checkpoint.path}: {name} holds values that aren't finite numbers in {dtype}")
        if result is not values:
            result[span] = bf16_bits(numbers) if dtype == "BF16" else numbers
    return result


def _scale(checkpoint: Checkpoint, name: str) -> np.float32:
    stored = checkpoint.source.stored(name)
    if stored.dtype != "F32" or stored.values.size != 1:
        shape = list(stored.values.shape)
        raise CheckpointError(
            f"{checkpoint.path}: {name} is {stored.dtype} of shape {shape}; it must be one F32 number"
        )
    scale = np.float32(stored.values.reshape(-1)[0])
    if not (np.isfinite(scale) and scale > 0):
        raise CheckpointError(f"{checkpoint.path}: {name} is {scale}; a scale must be above 0")
    return scale
