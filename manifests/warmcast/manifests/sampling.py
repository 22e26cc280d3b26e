"""Sampled hashes: 100 elements of each tensor, the same on every machine and in every version.

A tensor of ``numel`` elements is divided into 100 strata of (nearly) equal length and one element
is drawn from each, so no element is drawn twice and a corrupt run longer than two strata is always
seen; a tensor of up to 100 elements is taken whole. Draws come from SHAKE-128 over a fixed seed
and the tensor's name: no library's random generator is involved.

Floating-point samples are normalised through float32 and then float16 (round to nearest even,
overflow to infinity, one NaN), so that a tensor which crossed a wider dtype on its way keeps its
hash; other dtypes are taken as raw bytes. The hash is SHA-256 over the normalised samples in order
of position, cut to 32 hex digits. :func:`fold` folds the hashes of one layer's tensors into one.

Source: the sampled hashing of NCCLBack (layer 5 of its protocol), with strata in place of
independent draws.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from warmcast.manifests.dtypes import BITS

SAMPLES = 100
"""Elements sampled from each tensor."""

_SEED = b"warmcast sampled hash 1\0"
_DIGITS = 32
_NAN = 0x7E00


def sample_indices(name: str, numel: int) -> Sequence[int]:
    """The sampled positions in a tensor's row-major order, ascending; all, if at most 100."""
    if numel <= SAMPLES:
        return range(numel)
    stream = hashlib.shake_128(_SEED + name.encode("utf-8")).digest(8 * SAMPLES)
    draws = struct.unpack(f"<{SAMPLES}Q", stream)
    indices = []
    for stratum, draw in enumerate(draws):
        begin = stratum * numel // SAMPLES
        end = (stratum + 1) * numel // SAMPLES
        indices.append(begin + (draw * (end - begin) >> 64))
    return indices


def element_nbytes(dtype: str) -> int:
    """Bytes of the unit that is sampled: an element, or a byte where elements are narrower."""
    return max(1, BITS[dtype] // 8)


def sampled_hash(name: str, dtype: str, numel: int, samples: bytes) -> str:
    """The hash (32 hex digits) of a tensor's samples.

    ``numel`` counts the tensor's units (see :func:`element_nbytes`); ``samples`` are the raw
    little-endian bytes of the units at :func:`sample_indices`, in order.
    """
    kind = "float" if dtype in _NORMALISE else "raw"
    state = hashlib.sha256(f"{kind}\0{numel}\0{name}\0".encode())
    state.update(_NORMALISE[dtype](samples) if kind == "float" else samples)
    return state.hexdigest()[:_DIGITS]


def sampled_hash_of(name: str, dtype: str, data: bytes | memoryview) -> str:
    """The sampled hash of a whole tensor, from its row-major bytes."""
    view = memoryview(data).cast("B")
    width = element_nbytes(dtype)
    numel = len(view) // width
    samples = b"".join(view[i * width : (i + 1) * width] for i in sample_indices(name, numel))
    return sampled_hash(name, dtype, numel, samples)


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


def _half_bits(value: float) -> int:
    """The float16 bits of a float32 value, overflow going to infinity as IEEE 754 rounds it."""
    if math.isnan(value):
        return _NAN
    try:
        return int.from_bytes(struct.pack("<e", value), "little")
    except OverflowError:
        return 0xFC00 if value < 0 else 0x7C00


def _pack(bits: Iterable[int]) -> bytes:
    values = list(bits)
    return struct.pack(f"<{len(values)}H", *values)


def _from_f16(samples: bytes) -> bytes:
    bits = struct.unpack(f"<{len(samples) // 2}H", samples)
    return _pack(_NAN if b & 0x7FFF > 0x7C00 else b for b in bits)


def _from_bf16(samples: bytes) -> bytes:
    table = _bf16_table()
    return _pack(table[b] for b in struct.unpack(f"<{len(samples) // 2}H", samples))


@cache
def _bf16_table() -> array[int]:
    """The float16 bits of every bfloat16, by its bits: a bfloat16 is a float32's upper half."""
    values = struct.unpack("<65536f", b"".join(struct.pack("<I", b << 16) for b in range(65536)))
    return array("H", map(_half_bits, values))


def _from_f32(samples: bytes) -> bytes:
    return _pack(map(_half_bits, struct.unpack(f"<{len(samples) // 4}f", samples)))


def _from_f64(samples: bytes) -> bytes:
    return _pack(_half_bits(_single(v)) for v in struct.unpack(f"<{len(samples) // 8}d", samples))


def _single(value: float) -> float:
    """A float64 rounded to float32, overflow going to infinity."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("-inf") if value < 0 else float("inf")


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
        table += _half_bits(value).to_bytes(2, "little")
    return bytes(table)


def _from_table(table: bytes) -> Callable[[bytes], bytes]:
    return lambda samples: b"".join(table[2 * b : 2 * b + 2] for b in samples)


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
