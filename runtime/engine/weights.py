"""Weights of one rank of an engine directory, checked against the architecture."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trtpd.build.backends.openvino import weights_file
from trtpd.build.decoding import plain_json
from trtpd.build.manifest import Architecture
from trtpd.build.quantise import widened_groups
from trtpd.build.shapes import EMBEDDING, HEAD
from trtpd.build.sharding import Shard
from trtpd.build.tensors import FETCH_AGAIN, NUMPY_DTYPES, TensorFile, from_bf16_bits
from trtpd.errors import CheckpointError, EngineError

F32 = npt.NDArray[np.float32]
MatrixType = Literal["f32", "bf16", "f16", "int8", "int4"]
BF16_KEY = "bf16_as_u16"


@dataclass(frozen=True, slots=True)
class Matrix:
    """Values as they are stored: bf16 as bit patterns; int8 with one f32 scale per row (`scales [rows, 1]`); int4 in
    pairs, `[rows, columns / 2]`, with one per group of columns (`scales [rows, groups]`)."""

    values: npt.NDArray[Any]
    type: MatrixType
    scales: F32 | None = None

    def widened(self) -> F32:
        """f32 of the same values, scales multiplied in."""
        if self.type == "bf16":
            return from_bf16_bits(self.values)
        if self.type == "int4":
            assert self.scales is not None, "int4 always has scales"
            return widened_groups(self.values, self.scales)
        wide = self.values if self.type == "f32" else self.values.astype(np.float32)
        return wide if self.scales is None else wide * self.scales

    def rows(self, start: int, stop: int) -> Matrix:
        return Matrix(self.values[start:stop], self.type, None if self.scales is None else self.scales[start:stop])


class Weights:
    """Reads a rank's tensors by their Hugging Face names, each when it is asked for: views of the mapped files, or
    copies, which are there as long as this is. Use it as a context manager: on leaving, the memory of what was read is
    given back to the kernel, and whoever still looks at a tensor reads it from the file again.

    What every rank has whole lies in rank 0's file, the rest in the rank's own. Every method raises EngineError for a
    tensor that is missing or of another shape or type than the architecture and the shard say.
    """

    def __init__(self, directory: Path, architecture: Architecture, shard: Shard) -> None:
        self._directory = directory
        self._architecture = architecture
        self._shard = shard
        self._stacks: list[npt.NDArray[Any]] = []

    def __enter__(self) -> Self:
        self._first = self._own = _File(self._directory / weights_file(0))
        if self._shard.rank:
            self._own = _File(self._directory / weights_file(self._shard.rank))
        return self

    def __exit__(self, *exc: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Gives the memory back: for when an engine has made its own copies."""
        for file in {self._first, self._own}:
            file.let_go()

    def vector(self, name: str, size: int) -> F32:
        """What every rank has whole."""
        return self._first.f32(name, (size,))

    def bias(self, name: str, rows: int) -> F32:
        """The rank's part of a bias, which has so many values."""
        return self._own.f32(name, (rows,))

    def embedding(self) -> Matrix:
        """Every call gives the same memory, so that a tied head costs no second one."""
        arch = self._architecture
        return self._first.matrix(EMBEDDING, (arch.vocab_size, arch.hidden_size))

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """The rank's part of a matrix, which has so many rows and columns."""
        return self._own.matrix(name, (rows, columns))

    def stacked(self, names: Sequence[str], rows: Sequence[int], columns: int) -> Matrix:
        """Several matrices of a rank on top of each other: a view where they lie so in the file, else a copy."""
        parts = [self.matrix(name, count, columns) for name, count in zip(names, rows, strict=True)]
        if len({part.type for part in parts}) > 1:
            raise EngineError(f"{self._directory}: {', '.join(names)} are of several types: build this role again")
        scales = [part.scales for part in parts if part.scales is not None]
        values = self._own.joined(names, [part.values for part in parts])
        self._stacks.append(values)
        return Matrix(values, parts[0].type, np.concatenate(scales) if scales else None)

    def head(self) -> Matrix:
        """The rank's rows of the output projection: a matrix of its own, or the embedding where the two are tied."""
        arch, rows = self._architecture, self._shard.vocabulary
        if arch.tie_word_embeddings and HEAD not in self._own.names:
            return self.embedding().rows(rows.start, rows.stop)
        return self.matrix(HEAD, len(rows), arch.hidden_size)


_TYPES: dict[str, MatrixType] = {"F32": "f32", "F16": "f16", "I8": "int8", "U8": "int4"}


class _File:
    """One mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = TensorFile(path)
            # Private and writable, since OpenVINO shares only writable arrays; nobody writes.
            with path.open("rb") as opened:
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            self._bf16 = frozenset(plain_json(self._file.metadata.get(BF16_KEY, "[]")))
        except (OSError, ValueError, TypeError, CheckpointError) as error:
            reason = str(error).removeprefix(f"{path}: ").removesuffix(FETCH_AGAIN)
            raise EngineError(f"{path} can't be read ({reason}): build this role again") from error
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.names = frozenset(self._file.specs)

    def let_go(self) -> None:
        """See Weights."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def f32(self, name: str, shape: tuple[int, ...]) -> F32:
        return self._matrix_of(name, self._tensor(name, shape)).widened()

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        rows, columns = shape
        if name in self.names and self._file.specs[name].dtype == "U8":
            packed = self._tensor(name, (rows, columns // 2))
            return Matrix(packed, "int4", self._group_scales(f"{name}.scale", rows, columns))
        matrix = self._matrix_of(name, self._tensor(name, shape))
        if matrix.type != "int8":
            return matrix
        return Matrix(matrix.values, "int8", self.f32(f"{name}.scale", (rows, 1)))

    def _group_scales(self, name: str, rows: int, columns: int) -> F32:
        shape = self._file.specs[name].shape if name in self.names else ()
        groups = shape[1] if len(shape) == 2 else 0
        if groups < 1 or columns % groups:
            raise EngineError(
                f"{self._path}: {name} is {list(shape)}, which are no groups of {columns} inputs: build this role again"
            )
        return self.f32(name, (rows, groups))

    def joined(self, names: Sequence[str], parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """`parts`, which are those tensors, as one array: a view if the file has them one behind the other."""
        extents = [self._file.extent(name) for name in names]
        if any(end != start for (_, end), (start, _) in pairwise(extents)):
            return np.concatenate(parts)
        whole = self._bytes[extents[0][0] : extents[-1][1]].view(parts[0].dtype)
        return whole.reshape(sum(len(part) for part in parts), *parts[0].shape[1:])

    def _tensor(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        spec = self._file.specs.get(name)
        if spec is None:
            raise EngineError(f"{self._path} holds no tensor {name}: build this role again")
        if spec.shape != shape:
            raise EngineError(
                f"{self._path}: {name} is {list(spec.shape)}, the architecture in config.json says "
                f"{list(shape)}: build this role again"
            )
        if spec.dtype not in NUMPY_DTYPES:
            raise self._foreign(name, spec.dtype)
        start, end = self._file.extent(name)
        return self._bytes[start:end].view(NUMPY_DTYPES[spec.dtype]).reshape(shape)

    def _matrix_of(self, name: str, values: npt.NDArray[Any]) -> Matrix:
        dtype = self._file.specs[name].dtype
        if dtype == "U16" and name in self._bf16:
            return Matrix(values, "bf16")
        if dtype not in _TYPES:
            raise self._foreign(name, dtype)
        return Matrix(values, _TYPES[dtype])

    def _foreign(self, name: str, dtype: str) -> EngineError:
        return EngineError(
            f"{self._path}: {name} holds {dtype}, expected F32, F16, I8, U8 or declared bf16: build this role again"
        )
