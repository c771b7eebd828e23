"""Tiny checkpoints of every family, the same on every machine: each value follows from its tensor's name alone.

Used by the golden tests and by the script that asks transformers for what they are held to
(tests/golden/families/make_families.py), so nothing of trtpd is imported here.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

_SHARED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SHARED
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": _SHARED
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
        "sliding_window": 40,
    },
    "qwen2": _SHARED
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "use_sliding_window": True,
        "sliding_window": 50,
        "max_window_layers": 2,
    },
    "qwen3": _SHARED
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
    },
    "gemma3": _SHARED
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 20.0,
    },
}
PROMPT_TOKENS = (5, 31, 32, 33, 70, 104)
"""Below, at and beyond a KV block of 32, a chunk and every sliding window above."""


def weight(family: str, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Even noise; norms about 1 (with Gemma's offset), matrices lively enough that answers don't repeat a token."""
    size = int(np.prod(shape))
    noise = _noise(f"{family} {name}", size)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        noise = 0.4 * noise + (1.0 if family == "gemma3" else 1.5)
    elif name.endswith("norm.weight"):
        noise = 0.4 * noise + (0.0 if family == "gemma3" else 1.0)
    elif name.endswith(".bias"):
        noise = 0.5 * noise
    elif family == "gemma3" and "embed" in name:
        noise = 0.06 * noise  # It is scaled by 8, and the head: with larger ones the last token is answered again.
    else:
        noise = 0.35 * noise
    return noise.reshape(shape).astype(np.float32)


def prompt(family: str, tokens: int) -> list[int]:
    """Token ids of a prompt."""
    return [int(value) for value in (_noise(f"{family} prompt {tokens}", tokens) + 1) / 2 * 198]


def _noise(seed: str, size: int) -> npt.NDArray[np.float64]:
    """Numbers of [-1, 1)."""
    raw = hashlib.shake_128(seed.encode()).digest(2 * size)
    return np.frombuffer(raw, "<u2").astype(np.float64) / 32768 - 1
