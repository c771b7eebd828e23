"""What a file claims of itself is bounded before it is believed."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from trtpd.build.gguf_header import read_header
from trtpd.errors import CheckpointError

TEXT, ARRAY, U32 = 8, 9, 4


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, *dimensions: int, kind: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + packed + struct.pack("<IQ", kind, offset)


def head(
    tmp_path: Path,
    *parts: bytes,
    fields: int = 0,
    tensors: int = 0,
    magic: bytes = b"GGUF",
    version: int = 3,
) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(magic + struct.pack("<IQQ", version, tensors, fields) + b"".join(parts))
    return path


def test_fields_and_tensors_are_read_with_their_places(tmp_path: Path) -> None:
    fields = [
        field("name", TEXT, text("é")),
        field("on", 7, b"\x01"),
        field("few", ARRAY, struct.pack("<IQ3i", 5, 3, -1, 0, 7)),
        field("words", ARRAY, struct.pack("<IQ", TEXT, 2) + text("a") + text("")),
        field("general.alignment", U32, struct.pack("<I", 64)),
    ]
    path = head(tmp_path, *fields, tensor("t", 4, 2, kind=1, offset=128), fields=5, tensors=1)
    found = read_header(path)
    assert found.metadata == {"name": "é", "on": True, "few": [-1, 0, 7], "words": ["a", ""], "general.alignment": 64}
    start = -(-path.stat().st_size // 64) * 64
    assert (found.tensors["t"].shape, found.tensors["t"].kind) == ((2, 4), 1)
    assert found.tensors["t"].offset == start + 128


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("parts", "counts", "said"),
    [
        ([], {"magic": b"PK\3\4"}, "its first bytes are"),
        ([], {"version": 1}, "GGUF version 1"),
        ([], {"version": 3 << 24}, "GGUF version 50331648"),
        ([], {"fields": HUGE}, f"it claims {HUGE} metadata fields; 10,000 are read at most"),
        ([], {"tensors": HUGE}, f"it claims {HUGE} tensors; 100,000 are read at most"),
        ([], {"fields": 1}, "truncated"),
        ([struct.pack("<Q", HUGE)], {"fields": 1}, "truncated"),
        ([field("a", TEXT, struct.pack("<Q", HUGE))], {"fields": 1}, "truncated"),
        ([field("a", ARRAY, struct.pack("<IQ", 0, HUGE))], {"fields": 1}, f"a is an array of {HUGE} values"),
        ([field("a", ARRAY, struct.pack("<IQ", 0, 1 << 20))], {"fields": 1}, "truncated"),
        ([field("a", ARRAY, struct.pack("<IQ", ARRAY, 2))], {"fields": 1}, "array of type 9, which isn't read"),
        ([field("a", 77, b"")], {"fields": 1}, "a is of unknown type 77"),
        ([field("general.alignment", U32, struct.pack("<I", 0))], {"fields": 1}, "general.alignment is 0"),
        ([tensor("t", 1 << 32, 1 << 32)], {"tensors": 1}, "t has shape"),
        ([tensor("t", 0)], {"tensors": 1}, "t has shape"),
        ([tensor("t", *[1] * 9)], {"tensors": 1}, "t has 9 dimensions"),
        ([tensor("t", 1), tensor("t", 2)], {"tensors": 2}, "two tensors have the same name"),
    ],
)
def test_what_cannot_be_believed_is_named(
    tmp_path: Path, parts: list[bytes], counts: dict[str, int], said: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_header(head(tmp_path, *parts, **counts))  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_an_empty_and_a_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="it is empty"):
        read_header(tmp_path / "empty.gguf")
    with pytest.raises(CheckpointError, match=r"absent\.gguf: can't be read"):
        read_header(tmp_path / "absent.gguf")
