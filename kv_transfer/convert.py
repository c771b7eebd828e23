"""KV from f32 to bf16 (rounded to nearest, ties to even) and back (exact), on the bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trtpd.errors import InternalError
from trtpd.kv_transfer.layout import KVDtype

_INFINITY, _QUIET = np.uint32(0x7F800000), np.uint32(0x400000)
_MAGNITUDE, _HALF, _ONE, _SHIFT = np.uint32(0x7FFFFFFF), np.uint32(0x7FFF), np.uint32(1), np.uint32(16)


def to_bf16(f32_bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """A NaN stays one: rounding its bits could carry it over to infinity or zero."""
    rounded = f32_bits + (_HALF + ((f32_bits >> _SHIFT) & _ONE))
    is_nan = (f32_bits & _MAGNITUDE) > _INFINITY
    if is_nan.any():
        rounded = np.where(is_nan, f32_bits | _QUIET, rounded)
    return (rounded >> _SHIFT).astype(np.uint16)


def to_f32(bf16_bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    return bf16_bits.astype(np.uint32) << _SHIFT


def convert(of: npt.NDArray[np.generic], source: KVDtype, to: npt.NDArray[np.generic], sink: KVDtype) -> None:
    """Writes `of` into `to`, arrays of one shape but for the last axis, which holds the same elements as words
    of any width."""
    if (source, sink) == ("f32", "bf16"):
        to.view(np.uint16)[...] = to_bf16(of.view(np.uint32))
    elif (source, sink) == ("bf16", "f32"):
        to.view(np.uint32)[...] = to_f32(of.view(np.uint16))
    else:
        raise InternalError(f"no conversion of KV from {source} to {sink}")
