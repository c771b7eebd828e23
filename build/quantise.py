"""Weights in few bits: int8 with a scale for each output channel, int4 with one for each group of inputs. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trtpd.build.tensors import F32Array

GROUPS = (64, 32)
"""Sizes of a group of int4: the first that divides the inputs. Smaller ones are slower on a CPU than int8."""

_TINY = np.finfo(np.float32).tiny
_STRETCHES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of the full range tried for a group: a smaller one cuts its largest weight off and is finer for the others."""


def quantise(weight: F32Array) -> tuple[npt.NDArray[np.int8], F32Array]:
    """Symmetric int8 per output channel: `(values, scale)` with scale of shape [out, 1] such that no weight
    is further than half a scale from values * scale."""
    largest = np.abs(weight).max(axis=1, keepdims=True)
    scale = np.maximum(largest / np.float32(127), _TINY).astype(np.float32)
    values = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
    return values, scale


def group_of(columns: int) -> int | None:
    """Inputs that share a scale in int4; None where no size divides them, and such a matrix stays int8."""
    return next((group for group in GROUPS if columns % group == 0), None)


def quantise_groups(weight: F32Array, group: int) -> tuple[npt.NDArray[np.uint8], F32Array]:
    """int4 by groups of inputs: `(packed, scale)`, two values a byte with the first in the low half, `[out, in / 2]`,
    and scales `[out, in / group]`, which may be negative: a group's largest weight lies at -8, the longer end of the
    range. Of some ranges the one with the least squared error is taken."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // group, group)
    where = np.abs(grouped).argmax(axis=2, keepdims=True)
    largest = np.take_along_axis(grouped, where, axis=2)
    best = np.full(largest.shape, np.inf, np.float32)
    values, scales = np.zeros(grouped.shape, np.int8), np.ones(largest.shape, np.float32)
    for stretch in _STRETCHES:
        scale = (largest * np.float32(-stretch / 8)).astype(np.float32)
        scale = np.where(np.abs(scale) < _TINY, _TINY, scale)
        tried = np.clip(np.rint(grouped / scale), -8, 7)
        error = np.square(np.float32(tried) - grouped / scale).sum(axis=2, keepdims=True) * stretch**2
        better = error < best
        best, scales = np.where(better, error, best), np.where(better, scale, scales)
        values = np.where(better, tried, values).astype(np.int8)
    return pack(values.reshape(rows, columns)), scales[:, :, 0]


def pack(values: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Two values of -8 to 7 a byte, the first in the low half."""
    halves = values.view(np.uint8) & np.uint8(15)
    return np.ascontiguousarray(halves[:, ::2] | (halves[:, 1::2] << np.uint8(4)))


def unpack(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """The values of `pack`."""
    both = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=2).reshape(len(packed), -1)
    values: npt.NDArray[np.int8] = (both.view(np.int8) ^ np.int8(8)) - np.int8(8)
    return values


def widened_groups(packed: npt.NDArray[np.uint8], scales: F32Array) -> F32Array:
    """The weights that packed values and the scales of their groups stand for."""
    values = unpack(packed).astype(np.float32)
    grouped = values.reshape(*scales.shape, -1) * scales[:, :, None]
    return grouped.reshape(values.shape)
