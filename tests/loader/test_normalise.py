"""Samples normalised together are, bit for bit, what they are one by one."""

from __future__ import annotations

import math
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.loader.normalise import normalised
from warmcast.manifests import sampling
from warmcast.manifests.dtypes import BITS

DTYPES = sorted(BITS)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_value_of_16_bits(dtype):
    samples = struct.pack("<65536H", *range(1 << 16))
    assert normalised([dtype], [samples]) == [sampling.normalised(dtype, samples)]


def halves_and_ties() -> list[float]:
    """Each finite float16 of one sign, and the middle between it and the next."""
    values = []
    for half in range(0x7C00):
        here, there = struct.unpack("<2e", struct.pack("<2H", half, half + 1))
        # Rounding goes to infinity from half a step above the largest number.
        values += [here, 65520.0 if math.isinf(there) else (here + there) / 2]
    return values


@pytest.mark.parametrize(("dtype", "floats", "integers"), [("F32", "f", "I"), ("F64", "d", "Q")])
def test_floats_about_every_float16_and_between_two(dtype, floats, integers):
    """A float64 just beside the middle is the middle as a float32: it is rounded twice."""
    values = halves_and_ties()
    patterns = struct.unpack(
        f"<{len(values)}{integers}", struct.pack(f"<{len(values)}{floats}", *values)
    )
    sign = 1 << (8 * struct.calcsize(integers) - 1)
    bits = [
        near | negative
        for pattern in patterns
        for near in (max(pattern, 1) - 1, pattern, pattern + 1)
        for negative in (0, sign)
    ]
    samples = struct.pack(f"<{len(bits)}{integers}", *bits)
    assert normalised([dtype], [samples]) == [sampling.normalised(dtype, samples)]


@pytest.mark.parametrize(("dtype", "letter"), [("F32", "I"), ("F64", "Q")])
def test_any_bits(dtype, letter):
    generator = random.Random(7)
    width = 8 * struct.calcsize(letter)
    edges = [0, 1, (1 << width) - 1, 1 << (width - 1)]
    bits = edges + [generator.getrandbits(width) for _ in range(20_000)]
    if dtype == "F64":  # random exponents are nearly all out of a float32's range
        numbers = [generator.gauss(0, 1) * 2.0 ** generator.randrange(-160, 140) for _ in bits]
        bits += struct.unpack(f"<{len(bits)}Q", struct.pack(f"<{len(bits)}d", *numbers))
    samples = struct.pack(f"<{len(bits)}{letter}", *bits)
    assert normalised([dtype], [samples]) == [sampling.normalised(dtype, samples)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.integers(0, 100)).flatmap(
            lambda row: st.tuples(
                st.just(row[0]),
                st.binary(
                    min_size=row[1] * sampling.element_nbytes(row[0]),
                    max_size=row[1] * sampling.element_nbytes(row[0]),
                ),
            )
        ),
        max_size=8,
    )
)
def test_tensors_of_any_dtypes(rows):
    dtypes, samples = [dtype for dtype, _ in rows], [raw for _, raw in rows]
    expected = [sampling.normalised(dtype, raw) for dtype, raw in rows]
    assert normalised(dtypes, samples) == expected
