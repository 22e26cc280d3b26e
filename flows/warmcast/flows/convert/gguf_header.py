"""The header of a GGUF file, parsed as hostile input.

The format (versions 2 and 3, little-endian): ``GGUF``, version u32, tensors u64, pairs u64; the
pairs, each a string, a type u32 and a value; the tensors, each a string, dimensions u32, as many
lengths u64 (the innermost first), a type u32 and an offset u64; then, aligned, the tensors' data.
A string is its length u64 and UTF-8; an array is a type u32, a count u64 and the values.

Source: the GGUF specification of ggml. Every count is held to the bytes that are left and to a
limit before anything is allocated by it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from warmcast.flows.convert.tensors import Extent, Files
from warmcast.flows.errors import InvalidCheckpoint
from warmcast.manifests import dtypes

TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip
"""Name, elements a block and bytes a block of each type, by its number in a file."""

_MOST_NBYTES = 1 << 28
_MOST_TENSORS = 1 << 20
_MOST_PAIRS = 1 << 16
_MOST_ELEMENTS = 1 << 22
_MOST_DEPTH = 3
_MOST_ALIGNMENT = 1 << 20
_ALIGNMENT = "general.alignment"

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: its type's name, its row-major shape in elements, and where its blocks lie."""

    name: str
    type: str
    shape: tuple[int, ...]
    extent: Extent
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The pairs and the tensors of a file."""

    pairs: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_header(files: Files, number: int) -> GgufHeader:
    """Read the header of a source file; raises :class:`InvalidCheckpoint`."""
    reader = _Reader(files, number)
    if reader.take(4) != b"GGUF":
        raise reader.error("a file that begins with GGUF", "another")
    version = reader.scalar("I")
    if version not in (2, 3):
        big = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        raise reader.error("little-endian GGUF, version 2 or 3", "big-endian" if big else version)
    count = reader.count("tensors", reader.scalar("Q"), 24, _MOST_TENSORS)
    pairs: dict[str, Any] = {}
    for _ in range(reader.count("pairs", reader.scalar("Q"), 13, _MOST_PAIRS)):
        key = reader.string()
        if not key or key in pairs:
            raise reader.error("keys, each once", f"{key!r:.80}")
        pairs[key] = reader.value(reader.scalar("I"), _MOST_DEPTH)
    found = [_tensor(reader) for _ in range(count)]
    alignment = pairs.get(_ALIGNMENT, 32)
    usable = isinstance(alignment, int) and 8 <= alignment <= _MOST_ALIGNMENT
    if not usable or alignment % 8:
        raise reader.error(f"{_ALIGNMENT} in steps of 8", f"{alignment!r:.40}")
    begin = -(-reader.position // alignment) * alignment
    placed = []
    for name, kind, shape, offset in found:
        if offset % alignment:
            raise reader.error(f"{name!r} at a multiple of {alignment}", offset)
        placed.append(_placed(reader, name, kind, shape, begin + offset))
    _check_tensors(reader, placed)
    return GgufHeader(pairs, tuple(placed))


class _Reader:
    """The header's bytes in order; nothing beyond the file or the limit is asked for."""

    def __init__(self, files: Files, number: int) -> None:
        self.files, self.number = files, number
        self.position = 0
        self.size = files.sources[number].size
        self._elements = 0
        self._buffer, self._begin = b"", 0

    def error(self, expected: str, found: object) -> InvalidCheckpoint:
        return InvalidCheckpoint(
            self.files.sources[self.number].path, expected=expected, found=found
        )

    def take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if end > min(self.size, _MOST_NBYTES):
            raise self.error("a whole header", f"its end at byte {self.size}")
        if end > self._begin + len(self._buffer):
            length = min(max(nbytes, 1 << 20), self.size - self.position)
            self._buffer = self.files.read(Extent(self.number, self.position, length))
            self._begin = self.position
        data = self._buffer[self.position - self._begin : end - self._begin]
        self.position = end
        return data

    def scalar(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def count(self, what: str, count: int, least: int, most: int) -> int:
        """A count of things that take ``least`` bytes each, held to what is left."""
        if count > most or count * least > self.size - self.position:
            raise self.error(f"{what} that the file can hold, {most} at most", count)
        return count

    def string(self) -> str:
        data = self.take(self.count("bytes of a string", self.scalar("Q"), 1, _MOST_NBYTES))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            # Tokens of a vocabulary may be single bytes of a character.
            return data.decode("latin-1")

    def value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or not depth:
            raise self.error("a value of a type that GGUF knows", f"type {kind}")
        kind = self.scalar("I")
        width = struct.calcsize(f"<{_SCALARS[kind]}") if kind in _SCALARS else 8
        count = self.count("elements", self.scalar("Q"), width, _MOST_ELEMENTS - self._elements)
        self._elements += count
        if kind in _SCALARS:
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self.take(count * width)))
        return [self.value(kind, depth - 1) for _ in range(count)]


def _tensor(reader: _Reader) -> tuple[str, int, tuple[int, ...], int]:
    name = reader.string()
    dimensions = reader.scalar("I")
    if not 1 <= dimensions <= 4:
        raise reader.error(f"1 to 4 dimensions of {name!r:.80}", dimensions)
    shape = tuple(reader.scalar("Q") for _ in range(dimensions))[::-1]
    return name, reader.scalar("I"), shape, reader.scalar("Q")


def _placed(
    reader: _Reader, name: str, kind: int, shape: tuple[int, ...], offset: int
) -> GgufTensor:
    if kind not in TYPES:
        raise reader.error(f"tensor {name!r:.80} of a type that is known", f"type {kind}")
    type_, elements, nbytes = TYPES[kind]
    numel = dtypes.numel(shape)
    if numel is None or max(shape) > dtypes.MAX_NUMEL or shape[-1] % elements:
        raise reader.error(
            f"tensor {name!r:.80} of whole blocks of {type_} that fit memory", list(shape)
        )
    length = numel // elements * nbytes
    if offset + length > reader.size:
        raise reader.error(
            f"tensor {name!r:.80} inside the file", f"bytes {offset} to {offset + length}"
        )
    return GgufTensor(name, type_, shape, Extent(reader.number, offset, length), (elements, nbytes))


def _check_tensors(reader: _Reader, tensors: Iterable[GgufTensor]) -> None:
    names: set[str] = set()
    end = 0
    for tensor in sorted(tensors, key=lambda t: (t.extent.offset, t.extent.nbytes)):
        if not tensor.name or tensor.name in names:
            raise reader.error("tensors' names, each once", f"{tensor.name!r:.80}")
        names.add(tensor.name)
        if tensor.extent.nbytes and tensor.extent.offset < end:
            raise reader.error("tensors side by side", f"{tensor.name!r:.80} over another")
        end = max(end, tensor.extent.offset + tensor.extent.nbytes)
