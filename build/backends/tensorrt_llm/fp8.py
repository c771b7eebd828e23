"""FP8 (E4M3, no infinities) as bit patterns: to float32 and back, by table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trtpd.build.tensors import F32Array

_NAN_BITS = 0x7F


def _value(bits: int) -> float:
    sign, exponent, mantissa = -1.0 if bits & 0x80 else 1.0, (bits >> 3) & 15, bits & 7
    if bits & 0x7F == _NAN_BITS:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return sign * size


E4M3_VALUES: F32Array = np.array([_value(bits) for bits in range(256)], dtype=np.float32)
_SIZES = E4M3_VALUES[:_NAN_BITS]
_BORDERS = (_SIZES[:-1] + _SIZES[1:]) / 2
"""Between the sizes of bits 0, 1, 2, ...: a value on a border goes to the even one."""


def decode_e4m3(bits: npt.NDArray[np.uint8]) -> F32Array:
    """The values of FP8 bit patterns, exactly."""
    return E4M3_VALUES[bits]


def encode_e4m3(values: F32Array) -> npt.NDArray[np.uint8]:
    """The FP8 bit patterns nearest to `values` (ties to even; beyond the largest size the largest)."""
    size = np.abs(values)
    below = np.searchsorted(_BORDERS, size, side="left").astype(np.uint8)
    above = np.searchsorted(_BORDERS, size, side="right").astype(np.uint8)
    nearest = np.where(below & 1, above, below)
    nearest[np.isnan(values)] = _NAN_BITS
    bits: npt.NDArray[np.uint8] = nearest | (np.signbit(values).astype(np.uint8) << 7)
    return bits


def rescaled(bits: npt.NDArray[np.uint8], scale: np.float32, new_scale: np.float32) -> npt.NDArray[np.uint8]:
    """The weights `bits` * `scale` as bits of `new_scale`; the same bits where the scales are equal."""
    if scale == new_scale:
        return np.ascontiguousarray(bits)
    return encode_e4m3(decode_e4m3(bits) * scale / new_scale)
