"""Models for engines on GPUs: configurations of real ones, random small ones, and a converted checkpoint put back
together without any of the code that took it apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from trtpd.build.families import CONVERTED, FAMILIES
from trtpd.build.hf_config import architecture_from_config
from trtpd.build.shapes import expected_shapes
from trtpd.build.tensors import TensorSpec, write_tensors
from trtpd_testing.tiny import stored

Array = npt.NDArray[Any]

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "eos_token_id": [128001, 128008, 128009],
}
LLAMA_70B: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64
}  # fmt: skip

EIGHT_KV_HEADS: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 4,
    "vocab_size": 43,
    "max_position_embeddings": 256,
    "rope_scaling": None,
}
THREE_KV_HEADS: dict[str, Any] = EIGHT_KV_HEADS | {
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True
}  # fmt: skip
"""Split as SmolLM2 is."""


def config_only(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """A folder that holds nothing but a config.json."""
    folder.mkdir()
    kept = {key: value for key, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def write_random_model(
    folder: Path, config: dict[str, Any], *, family: str = "llama", dtype: str = "BF16", seed: int = 0
) -> Path:
    """A Hugging Face folder of a random model with `config`'s shapes."""
    config_only(folder, config, architectures=[FAMILIES[family].model_class], model_type=family)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    rng = np.random.default_rng(seed)
    architecture = architecture_from_config(
        json.loads((folder / "config.json").read_text()), folder / "config.json", CONVERTED
    )
    arrays = {
        name: stored(rng.standard_normal(shape).astype(np.float32), dtype)
        for name, shape in expected_shapes(architecture).items()
    }
    write_stored(folder / "model.safetensors", {name: (dtype, array) for name, array in arrays.items()})
    return folder


def write_stored(path: Path, tensors: dict[str, tuple[str, Array]]) -> None:
    specs = [TensorSpec(name=name, dtype=dtype, shape=array.shape) for name, (dtype, array) in tensors.items()]
    for _ in write_tensors(path, specs, [array for _, array in tensors.values()], {}):
        pass


_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8}


def read_stored(path: Path) -> dict[str, tuple[str, Array]]:
    """Every tensor of a safetensors file, read by the safetensors library; bf16 and FP8 as bit patterns."""
    found = {}
    for name, entry in safetensors.deserialize(path.read_bytes()):
        dtype = {"F8_E4M3": "F8_E4M3"}.get(entry["dtype"], entry["dtype"])
        array = np.frombuffer(bytes(entry["data"]), _NUMPY[dtype]).reshape(entry["shape"])
        found[name] = (dtype, array)
    return found


def reassembled(checkpoint: Path) -> dict[str, tuple[str, Array]]:
    """A TensorRT-LLM checkpoint's tensors by their Hugging Face names, whole. Asserts that what several ranks hold
    is equal, and that padding is zero."""
    config = json.loads((checkpoint / "config.json").read_text())
    tp = config["mapping"]["tp_size"]
    ranks = [read_stored(checkpoint / f"rank{rank}.safetensors") for rank in range(tp)]
    assert len({frozenset(rank) for rank in ranks}) == 1
    whole: dict[str, tuple[str, Array]] = {}
    for name in ranks[0]:
        parts = [rank[name][1] for rank in ranks]
        dtype = ranks[0][name][0]
        for target, array in _joined(name, parts, config):
            whole[target] = (dtype, array)
    return whole


def _joined(name: str, parts: list[Array], config: dict[str, Any]) -> list[tuple[str, Array]]:
    target = name.replace("transformer.layers", "model.layers").replace("attention.", "self_attn.")
    if name == "lm_head.weight":
        rows = np.concatenate(parts)
        assert not rows[config["vocab_size"] :].any()
        return [(name, rows[: config["vocab_size"]])]
    if ".qkv." in name:
        return _qkv(target, parts, config)
    for ours, theirs, axis in (
        ("self_attn.dense.weight", "self_attn.o_proj.weight", 1),
        ("mlp.proj.weight", "mlp.down_proj.weight", 1),
        ("mlp.fc.weight", "mlp.gate_proj.weight", 0),
        ("mlp.gate.weight", "mlp.up_proj.weight", 0),
    ):
        if target.endswith(ours):
            return [(target.replace(ours, theirs), np.concatenate(parts, axis=axis))]
    assert all(np.array_equal(part, parts[0]) for part in parts)
    for ours, theirs in (
        ("transformer.vocab_embedding", "model.embed_tokens"),
        ("transformer.ln_f", "model.norm"),
        ("post_layernorm", "post_attention_layernorm"),
        ("self_attn.q_layernorm", "self_attn.q_norm"),
        ("self_attn.k_layernorm", "self_attn.k_norm"),
    ):
        target = target.replace(ours, theirs)
    return [(target, parts[0])]


def _qkv(target: str, parts: list[Array], config: dict[str, Any]) -> list[tuple[str, Array]]:
    if target.endswith("_factor"):
        assert all(np.array_equal(part, parts[0]) for part in parts)
        return [(target, parts[0])]
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_size"]
    tp = len(parts)
    q_rows, kv_rows = heads // tp * size, max(1, kv_heads // tp) * size
    found = {"q": [], "k": [], "v": []}  # type: dict[str, list[Array]]
    for part in parts:
        assert part.shape[0] == q_rows + 2 * kv_rows
        found["q"].append(part[:q_rows])
        found["k"].append(part[q_rows : q_rows + kv_rows])
        found["v"].append(part[q_rows + kv_rows :])
    copies = max(1, tp // kv_heads)
    for letter in "kv":
        for rank, part in enumerate(found[letter]):
            assert np.array_equal(part, found[letter][rank // copies * copies])
        found[letter] = found[letter][::copies]
    return [(target.replace(".qkv.", f".{letter}_proj."), np.concatenate(found[letter])) for letter in "qkv"]
