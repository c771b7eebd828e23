"""The architecture that a GGUF file's metadata describe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trtpd.build.bounds import MOST_LAYERS, MOST_POSITIONS, MOST_TOKENS, MOST_WIDE
from trtpd.build.families import FAMILIES, Family
from trtpd.build.gguf_names import HEAD_TENSOR, ROPE_FACTORS
from trtpd.build.hf_config import pattern_layers
from trtpd.build.hf_rope import yarn_attention_factor
from trtpd.build.manifest import Architecture, FactorScaling, LinearScaling, RopeScaling, YarnScaling
from trtpd.errors import CheckpointError

_UNREAD = (
    "expert_count",
    "attn_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
)
"""What would make another model than the family's. Absent and 0 mean without."""


class Metadata:
    """A file's metadata, its architecture's own keys by their last part. Every method raises CheckpointError."""

    def __init__(self, values: Mapping[str, Any], where: Path, kind: str) -> None:
        self._values = values
        self._where = where
        self._kind = kind

    def get(self, key: str) -> Any:
        return self._values.get(f"{self._kind}.{key}")

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def count(self, key: str, default: int | None = None, *, most: int = MOST_WIDE) -> int:
        value = self._found(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(key, f"it must be a whole number of at least 1 and at most {most:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._found(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e30:
            raise self.wrong(key, "it must be a number above 0 and at most 1e+30")
        return shortest(value)

    def wrong(self, key: str, rule: str) -> CheckpointError:
        value = self.get(key)
        said = f"{len(value)} values" if isinstance(value, list) else repr(value)[:80]
        return CheckpointError(f"{self._where}: {self._kind}.{key} is {said}; {rule}")

    def _found(self, key: str, default: Any) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self._where}: {self._kind}.{key} is missing from the GGUF metadata")
        return value


def gguf_family(kind: Any, where: Path) -> Family:
    """The family of an architecture named in a GGUF file. Raises CheckpointError for one that isn't read."""
    known = {family.gguf: family for family in FAMILIES.values() if family.gguf is not None}
    if kind not in known:
        raise CheckpointError(
            f"{where}: architecture {str(kind)[:80]!r}; {', '.join(map(str, known))} are read from GGUF files"
        )
    return known[kind]


def architecture_of(
    meta: Metadata, family: Family, where: Path, *, tensors: Iterable[str], tokens: int
) -> Architecture:
    """`tokens` is the size of the file's vocabulary. Rotary factors that are a tensor aren't in it yet. Raises
    CheckpointError for a variant of the family that would be another model."""
    for key in _UNREAD:
        if meta.get(key):
            raise meta.wrong(key, f"a {family.name} model with it isn't supported")
    if family.gguf_interleaved and meta.has("attention.sliding_window"):
        family = FAMILIES["mistral"]
    names = frozenset(tensors)
    hidden, heads = meta.count("embedding_length"), meta.count("attention.head_count")
    kv_heads = meta.count("attention.head_count_kv", heads)
    head_dim = meta.count("attention.key_length", hidden // heads or None)
    _check_heads(meta, where, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    layers, positions = meta.count("block_count", most=MOST_LAYERS), meta.count("context_length", most=MOST_POSITIONS)
    window, window_layers = _windows(meta, family, layers, positions)
    local = family.local_rope_theta
    return Architecture(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=meta.count("feed_forward_length"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=meta.count("vocab_size", tokens or None, most=MOST_TOKENS),
        rms_norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        rope_theta=meta.number("rope.freq_base", family.rope_theta),
        max_position_embeddings=positions,
        tie_word_embeddings=HEAD_TENSOR not in names,
        rope_scaling=_rope_scaling(meta, where, positions, has_factors=ROPE_FACTORS in names),
        family=family.name,
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        sliding_window=window,
        window_layers=window_layers,
        local_rope_theta=None if local is None else meta.number("rope.freq_base_swa", local),
        query_pre_attn_scalar=_query_scalar(family, hidden=hidden, heads=heads, head_dim=head_dim, layers=layers),
        final_logit_softcapping=meta.number("final_logit_softcapping") if meta.get("final_logit_softcapping") else None,
    )


def _check_heads(meta: Metadata, where: Path, *, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise meta.wrong("attention.head_count_kv", f"it must divide the {heads} heads")
    if head_dim % 2:
        raise CheckpointError(f"{where}: heads have {head_dim} dimensions; rotary embedding needs an even number")
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.count(key, head_dim) != head_dim:
            raise meta.wrong(key, f"only the {head_dim} dimensions of a key are supported")


def _query_scalar(family: Family, *, hidden: int, heads: int, head_dim: int, layers: int) -> float | None:
    """Not in GGUF files: it is the head's size, but for the largest Gemma 3, known by its 62 layers as in llama.cpp."""
    if family.query_pre_attn_scalar is None:
        return None
    return float(hidden // heads if layers == 62 else head_dim)


def _windows(meta: Metadata, family: Family, layers: int, positions: int) -> tuple[int | None, tuple[int, ...]]:
    if family.window_rule not in ("all", "pattern") or not meta.get("attention.sliding_window"):
        return None, ()
    window = meta.count("attention.sliding_window", most=MOST_POSITIONS)
    if window >= positions:
        return None, ()
    if family.window_rule == "all":
        return window, tuple(range(layers))
    kinds = meta.get("attention.sliding_window_pattern")
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise meta.wrong("attention.sliding_window_pattern", f"it must have one for each of {layers} layers")
        chosen = tuple(layer for layer, windowed in enumerate(kinds) if windowed)
    else:
        chosen = pattern_layers(layers, meta.count("attention.sliding_window_pattern", 6))
    return (window, chosen) if chosen else (None, ())


def _rope_scaling(meta: Metadata, where: Path, positions: int, *, has_factors: bool) -> RopeScaling | None:
    kind = meta.get("rope.scaling.type") or "none"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise meta.wrong("rope.scaling.type", "none, linear and yarn are read from GGUF files")
    if has_factors:
        raise CheckpointError(f"{where}: has {kind} rope scaling and {ROPE_FACTORS} as well, which isn't supported")
    factor = meta.number("rope.scaling.factor")
    if kind == "linear":
        return LinearScaling(factor=factor)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=meta.count(
            "rope.scaling.original_context_length", positions, most=MOST_POSITIONS
        ),
        attention_factor=yarn_attention_factor(factor),
        beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def factor_scaling(factors: Iterable[float], where: Path, *, head_dim: int) -> FactorScaling:
    """The rotary factors that a file holds as a tensor. Raises CheckpointError for others than there must be."""
    found = tuple(float(value) for value in factors)
    if len(found) != head_dim // 2 or not all(math.isfinite(value) and value > 0 for value in found):
        raise CheckpointError(f"{where}: {ROPE_FACTORS} must hold {head_dim // 2} numbers above 0")
    return FactorScaling(factors=found)


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF stores 1e-05 as 9.99999974e-06."""
    return float(str(np.float32(value)))
