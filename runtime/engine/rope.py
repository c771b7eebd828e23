"""Rotary position embedding: the angles a Llama turns its queries and keys by."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from trtpd.build.manifest import Architecture, RopeScaling

F32 = npt.NDArray[np.float32]


def frequencies(architecture: Architecture) -> F32:
    """One angular frequency per pair of dimensions, "llama3" scaling applied where the model has it."""
    half = np.arange(0, architecture.head_dim, 2, dtype=np.float32) / np.float32(architecture.head_dim)
    plain = (np.float32(1.0) / np.float32(architecture.rope_theta) ** half).astype(np.float32)
    return plain if architecture.rope_scaling is None else _scaled(plain, architecture.rope_scaling)


def tables(architecture: Architecture, positions: int) -> tuple[F32, F32]:
    """cos and sin of every angle, `[positions, head_dim / 2]`."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies(architecture)[None, :]
    return np.cos(angles), np.sin(angles)


def _scaled(plain: F32, scaling: RopeScaling) -> F32:
    """Long waves are slowed by `factor`, short ones kept, and those between blended."""
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    slowed = plain / scaling.factor
    blend = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * slowed + blend * plain
    long = wavelengths > original / scaling.low_freq_factor
    short = wavelengths < original / scaling.high_freq_factor
    return np.where(long, slowed, np.where(short, plain, blended)).astype(np.float32)
