from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from trtpd.build.tensors import TensorFile, TensorSpec, bf16_bits, from_bf16_bits, write_tensors
from trtpd.errors import CheckpointError


def write(path: Path, arrays: dict[str, np.ndarray[Any, Any]], dtypes: dict[str, str]) -> list[int]:
    specs = [TensorSpec(name=name, dtype=dtypes[name], shape=array.shape) for name, array in arrays.items()]
    return list(write_tensors(path, specs, arrays.values(), {"made": "here"}))


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


@given(hnp.arrays(np.float32, 8, elements=FLOATS))
def test_bf16_is_the_nearest_of_its_neighbours(values: np.ndarray[Any, Any]) -> None:
    bits = bf16_bits(values)
    error = np.abs(from_bf16_bits(bits).astype(np.float64) - values)
    for step in (-1, 1):
        beside = from_bf16_bits((bits.astype(np.int32) + step).astype(np.uint16)).astype(np.float64)
        assert (error <= np.abs(np.where(np.isfinite(beside), beside, np.inf) - values)).all()


def test_bf16_keeps_infinity_and_nan() -> None:
    back = from_bf16_bits(bf16_bits(np.array([np.inf, -np.inf, np.nan], np.float32)))
    assert back[0] == np.inf
    assert back[1] == -np.inf
    assert np.isnan(back[2])


@given(bits=st.integers(0, 0x7F7F))
def test_bf16_values_survive_the_way_there_and_back(bits: int) -> None:
    value = np.array([bits], np.uint16)
    assert bf16_bits(from_bf16_bits(value)) == value


def test_what_is_written_is_what_the_library_reads(tmp_path: Path) -> None:
    six: np.ndarray[Any, Any] = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {"a": six, "b": np.array([[-3]], np.int8)}
    progress = write(tmp_path / "w.safetensors", arrays, {"a": "F32", "b": "I8"})
    assert progress == [24, 25]
    loaded = load_file(tmp_path / "w.safetensors")
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())


def test_a_written_file_is_read_back_with_its_metadata(tmp_path: Path) -> None:
    write(tmp_path / "w.safetensors", {"a": np.zeros((0, 4), np.float32)}, {"a": "F32"})
    file = TensorFile(tmp_path / "w.safetensors")
    assert file.metadata == {"made": "here"}
    assert file.read("a").shape == (0, 4)


@pytest.mark.parametrize("keep", [0, 5, 12, 60, 100])
def test_a_file_cut_anywhere_is_refused_in_one_line(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "w.safetensors"
    write(path, {"a": np.zeros(64, np.float32)}, {"a": "F32"})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"w\.safetensors: .*") as caught:
        TensorFile(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{nonsense",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, ' + b"9" * 4000 + b"]}}",
        b'{"a": {"dtype": "F32", "shape": [' + b",".join([b"1"] * 1000) + b'], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
    ],
    ids=lambda header: repr(header[:70]),
)
def test_a_corrupt_header_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"corrupt|not an object"):
        TensorFile(path)
