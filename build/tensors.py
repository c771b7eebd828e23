"""Safetensors files, read lazily and written as a stream, so that no more than one tensor is in memory.

Both sides go one tensor at a time through this module because the library's numpy interface has no bf16 and
writes only whole dictionaries. The files are plain safetensors; any reader opens them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trtpd.build.decoding import plain_json
from trtpd.errors import CheckpointError

F32Array = npt.NDArray[np.float32]

FETCH_AGAIN = "; download it again"
HEADER_LIMIT_BYTES = 100 << 20
MOST_DIMENSIONS = 16
MOST_BYTES = 1 << 50
ALIGNMENT_BYTES = 64
"""What the data of a written file is aligned to: a cache line and the widest vector of a CPU."""

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
}
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a file. `dtype` is the format's own name ("F32", "BF16", ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


def bf16_bits(values: F32Array) -> npt.NDArray[np.uint16]:
    """The bf16 bit patterns nearest to `values` (ties to even; NaN stays NaN)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = np.uint16(0x7FC0)
    return rounded


def from_bf16_bits(bits: npt.NDArray[np.uint16]) -> F32Array:
    """The float32 values of bf16 bit patterns, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class TensorFile:
    """One safetensors file, mapped; tensors are read when asked for. Raises CheckpointError for a file that
    is missing, truncated or not safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.specs: dict[str, TensorSpec] = {}
        self._offsets: dict[str, int] = {}
        self._data_start = 0
        try:
            self._read_header()
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read ({error.strerror or error})") from error

    def _read_header(self) -> None:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, HEADER_LIMIT_BYTES):
                raise CheckpointError(
                    f"{self.path}: not a whole safetensors file (header of {length} bytes in a file of "
                    f"{size}); "
                    "download it again"
                )
            raw = file.read(length)
        try:
            header = plain_json(raw)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: its safetensors header is corrupt ({error}); download it again"
            ) from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: its safetensors header is not an object; download it again")
        self._data_start = 8 + length
        metadata = header.pop("__metadata__", {})
        self.metadata = dict(metadata) if isinstance(metadata, dict) else {}
        for name, entry in header.items():
            self._add(name, entry, size - self._data_start)

    def _add(self, name: str, entry: Any, data_bytes: int) -> None:
        try:
            dtype, shape, (start, end) = str(entry["dtype"]), _sizes(entry["shape"]), _sizes(entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: the header entry of {name[:80]} is corrupt; download it again"
            ) from error
        spec = TensorSpec(name=name, dtype=dtype, shape=shape)
        if dtype in NUMPY_DTYPES and end - start != spec.size_bytes:
            raise CheckpointError(
                f"{self.path}: {name} is {dtype} of shape {list(shape)} but {end - start} bytes long; "
                "the file is corrupt: download it again"
            )
        if end > data_bytes:
            raise CheckpointError(
                f"{self.path}: truncated: {name} ends at byte {end} of its data, the file holds "
                f"{data_bytes}; "
                "download it again"
            )
        self.specs[name] = spec
        self._offsets[name] = start

    def extent(self, name: str) -> tuple[int, int]:
        """Where in the file a tensor begins and ends."""
        start = self._data_start + self._offsets[name]
        return start, start + self.specs[name].size_bytes

    def read_stored(self, name: str) -> npt.NDArray[Any]:
        """The tensor as stored, read-only over the mapped file; BF16 and F8_E4M3 as their bit
        patterns."""
        spec = self.specs[name]
        if spec.dtype not in NUMPY_DTYPES:
            raise CheckpointError(
                f"{self.path}: {name} has dtype {spec.dtype}; trtpd reads {', '.join(FLOATS)}: convert the checkpoint"
            )
        if spec.size_bytes == 0:
            return np.zeros(spec.shape, NUMPY_DTYPES[spec.dtype])
        return np.memmap(
            self.path,
            dtype=NUMPY_DTYPES[spec.dtype],
            mode="r",
            offset=self._data_start + self._offsets[name],
            shape=spec.shape,
        )

    def read(self, name: str) -> F32Array:
        """The tensor's values as float32, in memory of its own."""
        stored, dtype = self.read_stored(name), self.specs[name].dtype
        if dtype not in FLOATS:
            raise CheckpointError(f"{self.path}: {name} has dtype {dtype}; a weight must be {', '.join(FLOATS)}")
        return from_bf16_bits(stored) if dtype == "BF16" else np.array(stored, dtype=np.float32)


def _sizes(numbers: Any) -> tuple[int, ...]:
    """Raises TypeError, ValueError for what is no list of sizes that a file may have."""
    if not isinstance(numbers, list) or len(numbers) > MOST_DIMENSIONS:
        raise TypeError("not a short list")
    if any(type(number) is not int or not 0 <= number <= MOST_BYTES for number in numbers):
        raise ValueError("not sizes")
    return tuple(numbers)


class TensorWriter:
    """Writes one safetensors file, tensor by tensor in the order of `specs`. Use it as a context manager: on
    leaving, the file is on disk (fsync).

    Raises OSError as the file system does; the caller writes into a folder it throws away then.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> None:
        self.written_bytes = 0
        self._path = path
        self._specs = iter(specs)
        self._header = _header(specs, metadata)

    def __enter__(self) -> Self:
        self._file = self._path.open("xb")
        self._file.write(len(self._header).to_bytes(8, "little") + self._header)
        return self

    def write(self, array: npt.NDArray[Any]) -> None:
        """The next tensor."""
        spec = next(self._specs)
        assert array.shape == spec.shape, (spec, array.shape)
        assert array.dtype == NUMPY_DTYPES[spec.dtype], (spec, array.dtype)
        self._file.write(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
        self.written_bytes += spec.size_bytes

    def __exit__(self, error_type: type[BaseException] | None, *rest: object) -> None:
        with self._file:
            if error_type is None:
                missing = next(self._specs, None)
                assert missing is None, missing
                self._file.flush()
                os.fsync(self._file.fileno())


def write_tensors(
    path: Path,
    specs: Sequence[TensorSpec],
    arrays: Iterable[npt.NDArray[Any]],
    metadata: Mapping[str, str],
) -> Iterator[int]:
    """Writes `path` as TensorWriter does, while being iterated: `arrays` are taken in the order of `specs`, and
    after each the bytes written so far are yielded."""
    with TensorWriter(path, specs, metadata) as writer:
        for array in arrays:
            writer.write(array)
            yield writer.written_bytes


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        end = offset + spec.size_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    return raw + b" " * (-(8 + len(raw)) % ALIGNMENT_BYTES)
