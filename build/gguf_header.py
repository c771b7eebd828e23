"""The head of a GGUF file: its metadata, and where its tensors lie. Every number in it is bounded before it is used.

Read here and not by the gguf package's reader, which makes an array of every element: 20 s for a vocabulary of
262,144, and without end for a file that claims more.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtpd.errors import CheckpointError

MOST_FIELDS = 10_000
MOST_TENSORS = 100_000
MOST_ELEMENTS = 30_000_000
"""Of one array, and of all together."""
MOST_DIMENSIONS = 4
_MOST_VALUES = 1 << 40

_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_TEXT, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies. `shape` is in Hugging Face's order of dimensions; `kind` is a number of the gguf package's
    GGMLQuantizationType; `offset` counts from the begin of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata values are int, float, bool, str or lists of one of these."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Raises CheckpointError for a file that is missing, ends within its head, or isn't GGUF version 2 or 3."""
    try:
        if path.stat().st_size == 0:  # which can't be mapped
            raise CheckpointError(f"{path}: not a GGUF file (it is empty); download it again")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror or error})") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._elements = 0

    def header(self) -> GgufHeader:
        magic, version = self._take(4), self._int("<I")
        if magic != b"GGUF" or version not in _VERSIONS:
            said = f"GGUF version {version}" if magic == b"GGUF" else f"its first bytes are {magic!r}"
            raise CheckpointError(f"{self._path}: not a GGUF file of version 2 or 3 ({said}); download it again")
        tensors = self._count("tensors", MOST_TENSORS)
        metadata: dict[str, Any] = {}
        for _ in range(self._count("metadata fields", MOST_FIELDS)):
            key = self._text()
            metadata[key] = self._value(self._int("<I"), key)
        found = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._wrong(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        placed = {
            name: GgufTensor(name=name, shape=shape, kind=kind, offset=start + offset)
            for name, shape, kind, offset in found
        }
        if len(placed) != tensors:
            raise self._wrong("two tensors have the same name")
        return GgufHeader(metadata=metadata, tensors=placed)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._text(), self._int("<I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self._wrong(f"{name[:80]} has {dimensions} dimensions")
        shape = tuple(reversed([self._int("<Q") for _ in range(dimensions)]))
        kind, offset = self._int("<I"), self._int("<Q")
        if math.prod(shape) > _MOST_VALUES or min(shape) < 1:
            raise self._wrong(f"{name[:80]} has shape {list(shape)}")
        return name, shape, kind, offset

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return np.frombuffer(self._take(np.dtype(_NUMBERS[kind]).itemsize), _NUMBERS[kind])[0].item()
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise self._wrong(f"{key[:80]} is of unknown type {kind}")
        of, length = self._int("<I"), self._int("<Q")
        self._elements += length
        if self._elements > MOST_ELEMENTS:
            raise self._wrong(f"{key[:80]} is an array of {length} values; {MOST_ELEMENTS:,} are read at most")
        if length == 0:
            return []
        if of in _NUMBERS:
            return np.frombuffer(self._take(length * np.dtype(_NUMBERS[of]).itemsize), _NUMBERS[of]).tolist()
        if of != _TEXT:
            raise self._wrong(f"{key[:80]} is an array of type {of}, which isn't read")
        return [self._text() for _ in range(length)]

    def _count(self, of: str, most: int) -> int:
        found = self._int("<Q")
        if found > most:
            raise self._wrong(f"it claims {found} {of}; {most:,} are read at most")
        return found

    def _int(self, kind: str) -> int:
        return int(struct.unpack(kind, self._take(struct.calcsize(kind)))[0])

    def _text(self) -> str:
        return self._take(self._int("<Q")).decode("utf-8", errors="replace")

    def _take(self, size_bytes: int) -> bytes:
        end = self._at + size_bytes
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path}: truncated: its head goes on to byte {end}, the file holds {len(self._data)}; "
                "download it again"
            )
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: its head is corrupt: {what}; download it again")
