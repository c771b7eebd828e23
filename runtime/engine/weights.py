"""Weights of one rank of an engine directory, checked against the architecture."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from trtpd.build.backends.openvino import weights_file
from trtpd.build.manifest import Architecture
from trtpd.build.shapes import EMBEDDING, HEAD
from trtpd.build.sharding import Shard
from trtpd.errors import EngineError

F32 = npt.NDArray[np.float32]
BF16_KEY = "bf16_as_u16"


@dataclass(frozen=True, slots=True)
class Matrix:
    """f32 values, or int8 values with one f32 scale per row (`scales [rows, 1]`)."""

    values: npt.NDArray[Any]
    scales: F32 | None


class Weights:
    """Reads a rank's tensors by their Hugging Face names, each when it is asked for. Use it as a context manager.

    What every rank has whole lies in rank 0's file, the rest in the rank's own. bf16 (held as uint16, named in a
    file's metadata) is widened to f32, which is exact. Every method raises EngineError for a tensor that is missing
    or of another shape or type than the architecture and the shard say.
    """

    def __init__(self, directory: Path, architecture: Architecture, shard: Shard) -> None:
        self._directory = directory
        self._architecture = architecture
        self._shard = shard
        self._embedding: F32 | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._first = stack.enter_context(_File(self._directory / weights_file(0)))
            self._own = self._first
            if self._shard.rank:
                self._own = stack.enter_context(_File(self._directory / weights_file(self._shard.rank)))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def vector(self, name: str, size: int) -> F32:
        """What every rank has whole."""
        return self._first.f32(name, (size,))

    def bias(self, name: str, rows: int) -> F32:
        """The rank's part of a bias, which has so many values."""
        return self._own.f32(name, (rows,))

    def embedding(self) -> F32:
        """Every call gives the same array, so that a tied head costs no second one."""
        if self._embedding is None:
            arch = self._architecture
            self._embedding = self._first.f32(EMBEDDING, (arch.vocab_size, arch.hidden_size))
        return self._embedding

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """The rank's part of a matrix, which has so many rows and columns."""
        values = self._own.tensor(name, (rows, columns))
        if values.dtype == np.int8:
            return Matrix(values, self._own.f32(f"{name}.scale", (rows, 1)))
        return Matrix(self._own.as_f32(name, values), None)

    def head(self) -> Matrix:
        """The rank's rows of the output projection: a matrix of its own, or the embedding where the two are tied."""
        arch, rows = self._architecture, self._shard.vocabulary
        if arch.tie_word_embeddings and HEAD not in self._own.names:
            return Matrix(self.embedding()[rows.start : rows.stop], None)
        return self.matrix(HEAD, len(rows), arch.hidden_size)


class _File:
    """One safetensors file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        opener: Any = safe_open
        try:
            self._file = opener(str(self._path), framework="numpy").__enter__()
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{self._path} can't be read ({error}): build this role again") from error
        self.names = frozenset(self._file.keys())
        self._bf16 = frozenset(json.loads((self._file.metadata() or {}).get(BF16_KEY, "[]")))
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(*exc)

    def f32(self, name: str, shape: tuple[int, ...]) -> F32:
        return self.as_f32(name, self.tensor(name, shape))

    def tensor(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        if name not in self.names:
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

    def as_f32(self, name: str, values: npt.NDArray[Any]) -> F32:
        if values.dtype == np.float32:
            return values
        if values.dtype == np.uint16 and name in self._bf16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        raise EngineError(f"{self._path}: {name} holds {values.dtype}, expected f32 or bf16: build this role again")
