"""Weights of an engine directory: one safetensors file per rank, checked against the architecture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from trtpd.build.manifest import Architecture
from trtpd.errors import EngineError

F32 = npt.NDArray[np.float32]
BF16_KEY = "bf16_as_u16"


@dataclass(frozen=True, slots=True)
class Matrix:
    """f32 values, or int8 values with one f32 scale per row (`scales [rows, 1]`)."""

    values: npt.NDArray[Any]
    scales: F32 | None


class Weights:
    """Reads tensors by their Hugging Face names, each when it is asked for. Use it as a context manager.

    bf16 (held as uint16, named in the file's metadata) is widened to f32, which is exact. Every method raises
    EngineError for a tensor that is missing or of another shape or type than the architecture says.
    """

    def __init__(self, path: Path, architecture: Architecture) -> None:
        self._path = path
        self._architecture = architecture

    def __enter__(self) -> Self:
        opener: Any = safe_open
        try:
            self._file = opener(str(self._path), framework="numpy").__enter__()
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{self._path} can't be read ({error}): build this role again") from error
        self._names = frozenset(self._file.keys())
        self._bf16 = frozenset(json.loads((self._file.metadata() or {}).get(BF16_KEY, "[]")))
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(*exc)

    def vector(self, name: str, size: int) -> F32:
        return self._f32(name, (size,))

    def embedding(self) -> F32:
        arch = self._architecture
        return self._f32("model.embed_tokens.weight", (arch.vocab_size, arch.hidden_size))

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        values = self._tensor(name, (rows, columns))
        if values.dtype == np.int8:
            return Matrix(values, self._f32(f"{name}.scale", (rows, 1)))
        return Matrix(self._as_f32(name, values), None)

    def head(self) -> Matrix:
        """The output projection: a matrix of its own, or the embedding where the two are tied."""
        arch = self._architecture
        if arch.tie_word_embeddings and "lm_head.weight" not in self._names:
            return Matrix(self.embedding(), None)
        return self.matrix("lm_head.weight", arch.vocab_size, arch.hidden_size)

    def _f32(self, name: str, shape: tuple[int, ...]) -> F32:
        return self._as_f32(name, self._tensor(name, shape))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        if name not in self._names:
            raise EngineError(f"{self._path} holds no tensor {name}: build this role again")
        try:
            values: npt.NDArray[Any] = self._file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{self._path}: {name} can't be read ({error}): build this role again") from error
        if values.shape != shape:
            raise EngineError(
                f"{self._path}: {name} is {list(values.shape)}, the architecture in config.json says "
                f"{list(shape)}: build this role again"
            )
        return values

    def _as_f32(self, name: str, values: npt.NDArray[Any]) -> F32:
        if values.dtype == np.float32:
            return values
        if values.dtype == np.uint16 and name in self._bf16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        raise EngineError(f"{self._path}: {name} holds {values.dtype}, expected f32 or bf16: build this role again")
