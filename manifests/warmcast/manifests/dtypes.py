"""The element types of safetensors: their names, widths, and which are floating point.

Source: the safetensors format's ``Dtype``. Types narrower than a byte are counted in bits; a
tensor of them must still fill whole bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits an element, by the dtype's name in a header."""


MAX_NUMEL = 1 << 62
"""The most elements that a shape may have; sizes and offsets in bytes stay below it too."""


def numel(shape: Sequence[int]) -> int | None:
    """The elements of a shape, or None where its lengths multiply to more than any memory."""
    count = 1
    for length in shape:
        count *= length
        if count > MAX_NUMEL:
            return None
    return count


def nbytes(dtype: str, numel: int) -> int | None:
    """Bytes that ``numel`` elements take, or None where they do not fill whole bytes."""
    bits = BITS[dtype] * numel
    return None if bits % 8 else bits // 8
