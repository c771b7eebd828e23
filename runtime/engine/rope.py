"""Rotary position embedding: the angles a decoder turns its queries and keys by."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from trtpd.build.manifest import (
    Architecture,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)

F32 = npt.NDArray[np.float32]


def frequencies(architecture: Architecture, *, windowed: bool = False) -> F32:
    """One angular frequency per pair of dimensions, scaled as the model says; `windowed`: those of the layers with
    a sliding window."""
    theta, scaling = _rotation(architecture, windowed)
    half = np.arange(0, architecture.head_dim, 2, dtype=np.float32) / np.float32(architecture.head_dim)
    plain = (np.float32(1.0) / np.float32(theta) ** half).astype(np.float32)
    match scaling:
        case None:
            return plain
        case LinearScaling():
            return plain / np.float32(scaling.factor)
        case Llama3Scaling():
            return _llama3(plain, scaling)
        case YarnScaling():
            return _yarn(plain, theta, scaling)
        case FactorScaling():
            return plain / np.array(scaling.factors, np.float32)


def tables(architecture: Architecture, positions: int, *, windowed: bool = False) -> tuple[F32, F32]:
    """cos and sin of every angle, `[positions, head_dim / 2]`."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies(architecture, windowed=windowed)[None, :]
    _, scaling = _rotation(architecture, windowed)
    size = np.float32(scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0)
    return np.cos(angles) * size, np.sin(angles) * size


def _rotation(architecture: Architecture, windowed: bool) -> tuple[float, RopeScaling | None]:
    if windowed and architecture.local_rope_theta is not None:
        return architecture.local_rope_theta, None
    return architecture.rope_theta, architecture.rope_scaling


def _llama3(plain: F32, scaling: Llama3Scaling) -> F32:
    """Long waves are slowed by `factor`, short ones kept, and those between blended."""
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    slowed = plain / scaling.factor
    blend = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * slowed + blend * plain
    long = wavelengths > original / scaling.low_freq_factor
    short = wavelengths < original / scaling.high_freq_factor
    return np.where(long, slowed, np.where(short, plain, blended)).astype(np.float32)


def _yarn(plain: F32, theta: float, scaling: YarnScaling) -> F32:
    """Pairs that turn at least `beta_fast` times within the original length are kept, those that turn at most
    `beta_slow` times are slowed by `factor`, and between the two the share of either changes evenly."""
    dimensions = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        length = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return dimensions * math.log(length) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dimensions - 1)
    steps = np.arange(len(plain), dtype=np.float32) - np.float32(first)
    slowed_share = np.clip(steps / np.float32((last - first) or 0.001), 0, 1)
    return (plain / np.float32(scaling.factor) * slowed_share + plain * (1 - slowed_share)).astype(np.float32)
