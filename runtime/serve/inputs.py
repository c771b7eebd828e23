"""Typed access to the tensors of one request. Pure; knows nothing of Triton."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from trtpd.errors import RequestError

Tensor = npt.NDArray[Any]

MAX_DEADLINE_S = 24 * 3600.0


class Inputs:
    """Every method raises RequestError naming the input at fault. [1], [1, 1] and the like are one value."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def values(self, name: str) -> Sequence[object]:
        """All elements as plain Python values; none if the input is absent."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return ()
        return [self._decode(name, value) for value in tensor.reshape(-1).tolist()]

    def texts(self, name: str) -> list[str]:
        return [str(value) for value in self.values(name)]

    def text(self, name: str) -> str | None:
        value = self._single(name)
        return None if value is None else str(value)

    def number(self, name: str) -> float | None:
        value = self._single(name)
        return None if value is None else float(value)

    def numbers(self, name: str) -> list[float]:
        return [float(value) for value in self._tensors[name].reshape(-1).tolist()] if name in self._tensors else []

    def flag(self, name: str) -> bool:
        return bool(self._single(name))

    def integer(self, name: str, *, low: int | None = None, high: int | None = None) -> int | None:
        value = self._single(name)
        if value is None:
            return None
        number = int(value)
        if (low is not None and number < low) or (high is not None and number > high):
            raise RequestError(f"{name} is {number}; it must lie between {low} and {high}")
        return number

    def integers(self, name: str) -> list[int]:
        return [int(value) for value in self._tensors[name].reshape(-1).tolist()] if name in self._tensors else []

    def either(self, name: str, older: str, *, low: int | None = None, high: int | None = None) -> int | None:
        """An input that has two names."""
        value, other = self.integer(name, low=low, high=high), self.integer(older, low=low, high=high)
        if value is not None and other is not None and value != other:
            raise RequestError(f"{name} is {value} and {older} is {other}; they mean the same: send one of them")
        return value if value is not None else other

    def milliseconds(self, name: str) -> float | None:
        """In seconds."""
        value = self.number(name)
        if value is None:
            return None
        if not (math.isfinite(value) and 0 < value <= MAX_DEADLINE_S * 1e3):
            raise RequestError(f"{name} is {value:g}; it must lie above 0 and up to {MAX_DEADLINE_S * 1e3:g}")
        return value / 1e3

    def _single(self, name: str) -> Any:
        values = self.values(name)
        if len(values) > 1:
            raise RequestError(f"{name} holds {len(values)} values; send one")
        return values[0] if values else None

    @staticmethod
    def _decode(name: str, value: object) -> object:
        if not isinstance(value, bytes):
            return value
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"{name} is not valid UTF-8 (byte {error.start} of {len(value)})") from error
