"""A Llama in numpy, written after the published model and sharing nothing with the engine's graph."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from trtpd.build.manifest import Architecture, Llama3Scaling

F64 = npt.NDArray[np.float64]


def logits(arch: Architecture, weights: dict[str, npt.NDArray[np.float32]], ids: list[int]) -> F64:
    """Logits after every token of `ids`, in double precision."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    hidden = w["model.embed_tokens.weight"][ids]
    for layer in range(arch.num_hidden_layers):
        p = f"model.layers.{layer}."
        hidden = hidden + _attention(arch, w, p, _norm(hidden, w[f"{p}input_layernorm.weight"], arch))
        normed = _norm(hidden, w[f"{p}post_attention_layernorm.weight"], arch)
        gate = normed @ w[f"{p}mlp.gate_proj.weight"].T
        up = normed @ w[f"{p}mlp.up_proj.weight"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ w[f"{p}mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    found: F64 = _norm(hidden, w["model.norm.weight"], arch) @ head.T
    return found


def inverse_frequencies(arch: Architecture) -> list[float]:
    """One pair of dimensions at a time, the llama3 rule as three plain cases."""
    result = []
    for pair in range(arch.head_dim // 2):
        frequency = arch.rope_theta ** (-2 * pair / arch.head_dim)
        scaling = arch.rope_scaling
        if scaling is not None:
            assert isinstance(scaling, Llama3Scaling)
            turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
            if turns < scaling.low_freq_factor:
                frequency /= scaling.factor
            elif turns <= scaling.high_freq_factor:
                share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
                frequency = (1 - share) * frequency / scaling.factor + share * frequency
        result.append(frequency)
    return result


def _attention(arch: Architecture, w: dict[str, F64], prefix: str, hidden: F64) -> F64:
    tokens, dim = len(hidden), arch.head_dim
    query, key, value = (
        (hidden @ w[f"{prefix}self_attn.{name}_proj.weight"].T).reshape(tokens, -1, dim) for name in "qkv"
    )
    query, key = _turn(arch, query), _turn(arch, key)
    group = arch.num_attention_heads // arch.num_key_value_heads
    key, value = key.repeat(group, axis=1), value.repeat(group, axis=1)
    scores = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(dim)
    scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    attended = np.einsum("hqk,khd->qhd", shares, value).reshape(tokens, -1)
    projected: F64 = attended @ w[f"{prefix}self_attn.o_proj.weight"].T
    return projected


def _turn(arch: Architecture, heads: F64) -> F64:
    angles = np.outer(np.arange(len(heads)), inverse_frequencies(arch))
    turns = np.exp(1j * angles)[:, None, :]
    half = arch.head_dim // 2
    turned = (heads[..., :half] + 1j * heads[..., half:]) * turns
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _norm(hidden: F64, weight: F64, arch: Architecture) -> F64:
    normed: F64 = hidden / np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + arch.rms_norm_eps) * weight
    return normed
