"""What a model needs of its checkpoint: names and shapes, worked out from config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_REQUIRED = ("architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads")
MODEL_MAP = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def read_config(checkpoint: Path) -> dict[str, Any]:
    """config.json with the constructor's defaults filled in."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    missing = [name for name in _REQUIRED if name not in config]
    if missing:
        raise TypeError(f"missing required keyword-only arguments: {missing}")
    assert config["architecture"] in MODEL_MAP, f"Unsupported model architecture: {config['architecture']}"
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_size", config["hidden_size"] // heads)
    mapping = {"world_size": 1, "tp_size": 1, "pp_size": 1, "cp_size": 1} | config.get("mapping", {})
    if mapping["tp_size"] * mapping["pp_size"] * mapping["cp_size"] != mapping["world_size"]:
        raise ValueError(f"world_size must equal to tp_size * pp_size * cp_size, but got {mapping}")
    quantization = {"quant_algo": None, "kv_cache_quant_algo": None, "group_size": 128, "exclude_modules": None}
    return config | {"mapping": mapping, "quantization": quantization | config.get("quantization", {})}


def required_weights(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (stored dtype, shape) of one rank."""
    tp, heads = config["mapping"]["tp_size"], config["num_attention_heads"]
    assert heads % tp == 0, "num_attention_heads must be divisible by tp_size"
    kv_heads = (config["num_key_value_heads"] + tp - 1) // tp
    size, hidden, plain = config["head_size"], config["hidden_size"], _STORED[config["dtype"]]
    width, rows = config["intermediate_size"] // tp, (heads // tp + 2 * kv_heads) * size
    vocabulary = -(-config["vocab_size"] // tp)
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "transformer.vocab_embedding.weight": (plain, (config["vocab_size"], hidden)),
        "transformer.ln_f.weight": (plain, (hidden,)),
        "lm_head.weight": (plain, (vocabulary, hidden)),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"transformer.layers.{index}."
        for norm in ("input_layernorm", "post_layernorm"):
            found[f"{layer}{norm}.weight"] = (plain, (hidden,))
        linears = {
            "attention.qkv": (rows, hidden), "attention.dense": (hidden, heads // tp * size),
            "mlp.fc": (width, hidden), "mlp.gate": (width, hidden), "mlp.proj": (hidden, width),
        }  # fmt: skip
        for name, shape in linears.items():
            found |= _linear(layer + name, shape, config, plain)
        if config.get("attn_bias"):
            found[f"{layer}attention.qkv.bias"] = (plain, (rows,))
        if config.get("qwen_type") == "qwen3":
            found |= {f"{layer}attention.{part}_layernorm.weight": (plain, (size,)) for part in "qk"}
        if config["quantization"]["kv_cache_quant_algo"]:
            found[f"{layer}attention.kv_cache_scaling_factor"] = ("F32", (1,))
    return found


def _linear(
    name: str, shape: tuple[int, int], config: dict[str, Any], plain: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    quantization = config["quantization"]
    if quantization["quant_algo"] != "FP8" or name in (quantization["exclude_modules"] or ()):
        return {f"{name}.weight": (plain, shape)}
    return {
        f"{name}.weight": ("F8_E4M3", shape),
        f"{name}.weights_scaling_factor": ("F32", (1,)),
        f"{name}.activation_scaling_factor": ("F32", (1,)),
    }


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def check_weights(path: Path, config: dict[str, Any], rank: int) -> None:
    """Raises RuntimeError, as loading a checkpoint does, for a name that is missing or another shape or type (and
    for one that isn't needed, of which the real one only warns)."""
    found = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in read_header(path).items()}
    wanted = required_weights(config)
    if missing := sorted(set(wanted) - set(found)):
        raise RuntimeError(f"Required but not provided tensors: {missing[:5]}")
    if extra := sorted(set(found) - set(wanted)):
        raise RuntimeError(f"Provided but not required tensors: {extra[:5]}")
    for name, value in wanted.items():
        if found[name] != value:
            raise RuntimeError(f"rank {rank}: parameter {name!r} is {found[name]}, expected {value}")
