import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpd.errors import InternalError
from trtpd.kv_transfer.convert import convert, to_bf16, to_f32

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST_BF16_BITS = 0x7F7F


def bits(value):
    return np.array([struct.unpack("<I", struct.pack("<f", value))[0]], np.uint32)


def value(bf16_bits):
    return struct.unpack("<f", struct.pack("<I", int(bf16_bits) << 16))[0]


@given(FINITE)
def test_f32_becomes_the_nearest_bf16_and_of_two_equally_near_the_even_one(number):
    found = int(to_bf16(bits(number))[0])
    sign, magnitude = found & 0x8000, found & 0x7FFF
    if magnitude > LARGEST_BF16_BITS:  # rounds to infinity, as IEEE does beyond half a step above the largest
        assert abs(Fraction(number)) >= Fraction(value(LARGEST_BF16_BITS)) + Fraction(2) ** 119
        return
    distance = abs(Fraction(value(found)) - Fraction(number))
    neighbours = [sign | m for m in (magnitude - 1, magnitude + 1) if 0 <= m <= LARGEST_BF16_BITS]
    for other in neighbours:
        other_distance = abs(Fraction(value(other)) - Fraction(number))
        assert distance < other_distance or (distance == other_distance and found % 2 == 0)


@given(st.integers(0, 0xFFFF))
def test_bf16_survives_the_way_through_f32(pattern):
    word = np.array([pattern], np.uint16)
    there_and_back = int(to_bf16(to_f32(word))[0])
    is_nan = pattern & 0x7FFF > 0x7F80
    assert there_and_back == (pattern | 0x40 if is_nan else pattern)


@pytest.mark.parametrize("pattern", [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_nan_stays_a_nan(pattern):
    assert np.isnan(value(to_bf16(np.array([pattern], np.uint32))[0]))


def test_arrays_are_converted_whatever_words_they_are_seen_as():
    f32 = np.arange(12, dtype=np.float32).reshape(2, 6)
    there, back = np.zeros((2, 3), np.uint32), np.zeros((2, 3), np.uint64)
    convert(f32.view(np.uint64), "f32", there, "bf16")
    convert(there, "bf16", back, "f32")
    assert np.array_equal(back.view(np.float32), f32)


def test_other_conversions_are_a_bug_of_the_caller():
    with pytest.raises(InternalError, match="f16"):
        convert(np.zeros(2, np.uint16), "f16", np.zeros(2, np.uint32), "f32")
