"""Sampled hashes: 100 elements of each tensor, the same on every machine and in every version.

A tensor of ``numel`` elements is divided into 100 strata of (nearly) equal length and one element
is drawn from each, so no element is drawn twice and a corrupt run longer than two strata is always
seen; a tensor of up to 100 elements is taken whole. Draws come from SHAKE-128 over a fixed seed
and the tensor's name: no library's random generator is involved.

Floating-point samples (F64, F32, F16, BF16 and the four F8 formats that are numbers) are normalised
through float32 and then float16 (round to nearest even, overflow to infinity, one NaN), so that a
tensor which crossed a wider dtype on its way keeps its hash; other dtypes are taken as raw bytes.
The hash is SHA-256 over the normalised samples in order
of position, cut to 32 hex digits. :func:`fold` folds the hashes of one layer's tensors into one.

Source: the sampled hashing of NCCLBack (layer 5 of its protocol), with strata in place of
independent draws.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Literal

from warmcast.manifests.dtypes import BITS
from warmcast.manifests.errors import InvalidData

SAMPLES = 100
"""Elements sampled from each tensor."""

_SEED = b"warmcast sampled hash 1\0"
_DIGITS = 32
_NAN = b"\x00\x7e"
_DRAWS = struct.Struct(f"<{SAMPLES}Q")
_NATIVE: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def sample_indices(name: str, numel: int) -> Sequence[int]:
    """The sampled positions in a tensor's row-major order, ascending; all, if at most 100."""
    if numel <= SAMPLES:
        return range(numel)
    return [
        begin + (draw * length >> 64)
        for draw, (begin, length) in zip(_DRAWS.unpack(draws(name)), _strata(numel), strict=True)
    ]


def draws(name: str) -> bytes:
    """What a tensor's samples are drawn with: for each stratum 8 bytes, little-endian.

    A draw is a fraction of its stratum's length, in units of 2**-64.
    """
    return hashlib.shake_128(_SEED + name.encode("utf-8")).digest(_DRAWS.size)


@lru_cache(maxsize=1024)  # a model's tensors are of a few sizes
def _strata(numel: int) -> tuple[tuple[int, int], ...]:
    """Each stratum's first position and its length."""
    edges = [stratum * numel // SAMPLES for stratum in range(SAMPLES + 1)]
    return tuple((begin, end - begin) for begin, end in pairwise(edges))


@cache
def element_nbytes(dtype: str) -> int:
    """Bytes of the unit that is sampled: an element, or a byte where elements are narrower."""
    return max(1, BITS[dtype] // 8)


def sampled_hash(name: str, dtype: str, numel: int, samples: bytes) -> str:
    """The hash (32 hex digits) of a tensor's samples.

    ``numel`` counts the tensor's units (see :func:`element_nbytes`); ``samples`` are the raw
    little-endian bytes of the units at :func:`sample_indices`, in order.

    Raises :class:`InvalidData` if ``samples`` are not of that many units.
    """
    needed = min(numel, SAMPLES) * element_nbytes(dtype)
    if len(samples) != needed:
        raise InvalidData(
            f"samples of {name!r}", expected=f"{needed} bytes", found=f"{len(samples)}"
        )
    return hash_normalised(name, dtype, numel, normalised(dtype, samples))


def normalised(dtype: str, samples: bytes) -> bytes:
    """The samples of one tensor or of several, one after another, as they are hashed."""
    return _NORMALISE[dtype](samples) if dtype in _NORMALISE else samples


def hash_normalised(name: str, dtype: str, numel: int, samples: bytes) -> str:
    """The hash (32 hex digits) of a tensor's :func:`normalised` samples."""
    kind = "float" if dtype in _NORMALISE else "raw"
    return hashlib.sha256(f"{kind}\0{numel}\0{name}\0".encode() + samples).hexdigest()[:_DIGITS]


def sampled_hash_of(name: str, dtype: str, data: bytes | memoryview) -> str:
    """The sampled hash of a whole tensor, from its row-major bytes.

    Raises :class:`InvalidData` if they are not whole elements.
    """
    view = memoryview(data)
    units = view.cast("B") if view.nbytes else memoryview(b"")
    width = element_nbytes(dtype)
    if units.nbytes % width:
        raise InvalidData(
            f"tensor {name!r}",
            expected=f"whole elements of {width} bytes",
            found=f"{units.nbytes} bytes",
        )
    units = units.cast(_NATIVE[width])
    # Read and written in the same byte order: the bytes themselves.
    taken = [units[index] for index in sample_indices(name, len(units))]
    samples = struct.pack(f"={len(taken)}{_NATIVE[width]}", *taken)
    return sampled_hash(name, dtype, len(units), samples)


def fold(hashes: Iterable[tuple[str, str]]) -> str:
    """One hash (32 hex digits) for a layer, from its tensors' ``(name, sampled hash)``."""
    state = hashlib.sha256()
    for name, value in sorted(hashes):
        state.update(f"{name}\0{value}\0".encode())
    return state.hexdigest()[:_DIGITS]


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name up to the first number, that one included.

    ``model.layers.11.mlp.up.weight`` is of ``model.layers.11``; a name without a number is of
    its own module, ``embeddings.word.weight`` of ``embeddings.word``.
    """
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:-1]) or name


def _half(value: float) -> bytes:
    """A float32 value as float16, little-endian; overflow goes to infinity, as IEEE 754 rounds."""
    if math.isnan(value):
        return _NAN
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", math.copysign(math.inf, value))


def _single(value: float) -> float:
    """A float64 rounded to float32, overflow going to infinity."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _halves(values: Sequence[float]) -> bytes:
    # The sum is NaN if one of the values is; where it is so for infinities, nothing is lost.
    if not math.isnan(sum(values)):
        try:
            return struct.pack(f"<{len(values)}e", *values)
        except OverflowError:
            pass
    return b"".join(map(_half, values))


def _from_f16(samples: bytes) -> bytes:
    return _halves(struct.unpack(f"<{len(samples) // 2}e", samples))


def _from_bf16(samples: bytes) -> bytes:
    widened = bytearray(2 * len(samples))  # a bfloat16 is a float32's upper half
    widened[2::4] = samples[0::2]
    widened[3::4] = samples[1::2]
    return _from_f32(bytes(widened))


def _from_f32(samples: bytes) -> bytes:
    return _halves(struct.unpack(f"<{len(samples) // 4}f", samples))


def _from_f64(samples: bytes) -> bytes:
    values = struct.unpack(f"<{len(samples) // 8}d", samples)
    try:
        return _from_f32(struct.pack(f"<{len(values)}f", *values))
    except OverflowError:
        return _halves([_single(value) for value in values])


def _small_float(exponent_bits: int, bias: int, *, finite: bool, unsigned_zero: bool) -> bytes:
    """The float16 bits, two little-endian bytes each, of an 8-bit float format's 256 values.

    ``finite``: the format has no infinity, and its largest exponent holds numbers (E4M3FN: but for
    the all-ones NaN). ``unsigned_zero``: 0x80 is the only NaN (the FNUZ formats).
    """
    mantissa_bits = 7 - exponent_bits
    top = (1 << exponent_bits) - 1
    table = bytearray()
    for byte in range(256):
        sign = -1.0 if byte & 0x80 else 1.0
        exponent = (byte >> mantissa_bits) & top
        mantissa = byte & ((1 << mantissa_bits) - 1)
        nan = byte == 0x80 if unsigned_zero else finite and byte & 0x7F == 0x7F
        if nan:
            value = float("nan")
        elif not finite and exponent == top:
            value = sign * float("inf") if mantissa == 0 else float("nan")
        elif exponent == 0:
            value = sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        table += _half(value)
    return bytes(table)


def _from_table(table: bytes) -> Callable[[bytes], bytes]:
    low, high = table[0::2], table[1::2]

    def normalise(samples: bytes) -> bytes:
        halves = bytearray(2 * len(samples))
        halves[0::2] = samples.translate(low)
        halves[1::2] = samples.translate(high)
        return bytes(halves)

    return normalise


_NORMALISE: dict[str, Callable[[bytes], bytes]] = {
    "F16": _from_f16,
    "BF16": _from_bf16,
    "F32": _from_f32,
    "F64": _from_f64,
    "F8_E4M3": _from_table(_small_float(4, 7, finite=True, unsigned_zero=False)),
    "F8_E5M2": _from_table(_small_float(5, 15, finite=False, unsigned_zero=False)),
    "F8_E4M3FNUZ": _from_table(_small_float(4, 8, finite=True, unsigned_zero=True)),
    "F8_E5M2FNUZ": _from_table(_small_float(5, 16, finite=True, unsigned_zero=True)),
}
