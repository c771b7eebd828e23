"""Tiny models and machines made on the spot: nothing is downloaded, nothing looked up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from trtpd.build.hf_config import architecture_from_config
from trtpd.build.machine import Machine
from trtpd.build.shapes import expected_shapes
from trtpd.build.tensors import TensorSpec, bf16_bits, write_tensors
from trtpd_testing import families

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}

GIB = 1 << 30
Weights = dict[str, np.ndarray[Any, Any]]


def random_weights(config: dict[str, Any], seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    shapes = expected_shapes(architecture_from_config(config, Path("config.json")))
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def stored(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """What a safetensors file of that dtype holds of `array`."""
    if dtype == "BF16":
        return bf16_bits(array)
    return array.astype({"F32": np.float32, "F16": np.float16}[dtype])


def write_weights_file(path: Path, weights: Weights, dtype: str = "F32") -> None:
    specs = [TensorSpec(name=name, dtype=dtype, shape=array.shape) for name, array in weights.items()]
    for _ in write_tensors(path, specs, [stored(array, dtype) for array in weights.values()], {}):
        pass


def make_machine(**changes: Any) -> Machine:
    values: dict[str, Any] = {
        "cores": (0, 1),
        "memory_bytes": 8 * GIB,
        "memory_free_bytes": 6 * GIB,
        "shm_bytes": 4 * GIB,
        "shm_free_bytes": 4 * GIB,
        "cpu_features": ("avx2",),
    }
    return Machine(**(values | changes))


def write_model(folder: Path, *, dtype: str = "F32", seed: int = 0, **changes: Any) -> Path:
    """A Hugging Face folder of a model with CONFIG's shapes; `changes` go into its config.json (None removes)."""
    folder.mkdir()
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    write_weights_file(folder / "model.safetensors", random_weights(CONFIG, seed), dtype)
    return folder


def write_family(folder: Path, family: str, *, dtype: str = "F32", **changes: Any) -> Path:
    """A Hugging Face folder of a family's tiny model, but for a tokenizer; `changes` go into its config.json."""
    folder.mkdir()
    config = families.CONFIGS[family] | changes
    (folder / "config.json").write_text(json.dumps(config))
    write_weights_file(folder / "model.safetensors", family_weights(family), dtype)
    return folder


def family_weights(family: str) -> Weights:
    shapes = expected_shapes(architecture_from_config(families.CONFIGS[family], Path("config.json")))
    return {name: families.weight(family, name, shape) for name, shape in shapes.items()}
