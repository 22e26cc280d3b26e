"""The safetensors header, parsed as hostile input.

The format: 8 bytes, a little-endian N; N bytes of JSON, an object of tensors by name
(``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counted from the end of the header)
and perhaps ``"__metadata__"`` (strings by strings), padded with spaces; then the tensors' bytes,
which fill the rest of the file with neither gap nor overlap. Elements are little-endian and in
row-major order.

Everything is checked before anything is believed: a header of a file that was cut off, grew, or
was made to harm ends in :class:`InvalidHeader` naming the file and the tensor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmcast.manifests import dtypes
from warmcast.manifests.canonical import parse_json
from warmcast.manifests.errors import InvalidHeader

MAX_NBYTES = 100_000_000
"""The longest header that is read, in bytes; the limit of the format's own library."""


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor of a file: bytes ``begin`` to ``end`` of the file itself, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The tensor's length in bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: the tensors in order of their place in the file, and the metadata."""

    tensors: tuple[HeaderTensor, ...]
    metadata: Mapping[str, str]
    data_begin: int


def header_nbytes(prefix: bytes, size: int, where: str) -> int:
    """The header's length N in bytes, from a file's first 8 bytes and its ``size``."""
    if len(prefix) < 8 or size < 8:
        raise InvalidHeader(
            where, expected="a safetensors file", found=f"{size} bytes", do="the file is cut off"
        )
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_NBYTES or length < 2:
        raise InvalidHeader(
            where,
            expected=f"a header of 2 to {MAX_NBYTES:,} bytes",
            found=f"{length:,}",
            do="this is no safetensors file",
        )
    if 8 + length > size:
        raise InvalidHeader(
            where,
            expected=f"{8 + length:,} bytes of header",
            found=f"a file of {size:,} bytes",
            do="the file is cut off; fetch it again",
        )
    return length


def parse_header(raw: bytes, size: int, where: str) -> Header:
    """Parse ``raw``, a file's first 8 + N bytes; ``size`` is the whole file's length in bytes."""
    length = header_nbytes(raw, size, where)
    text = raw[8 : 8 + length]
    if len(text) != length:
        raise InvalidHeader(
            where,
            expected=f"{length:,} bytes of header",
            found=f"{len(text):,}",
            do="the file is cut off; fetch it again",
        )
    if text[:1] != b"{":
        raise InvalidHeader(where, expected="a header that starts with '{'", found=repr(text[:8]))
    record = parse_json(text, where, InvalidHeader)
    metadata = record.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise InvalidHeader(where, expected="__metadata__ of strings", found=repr(metadata)[:80])
    data_begin = 8 + length
    tensors = [_tensor(name, entry, data_begin, where) for name, entry in record.items()]
    tensors.sort(key=lambda t: (t.begin, t.end))
    position = data_begin
    for tensor in tensors:
        if tensor.begin != position:
            raise InvalidHeader(
                f"{where}: tensor {tensor.name!r}",
                expected=f"to begin at byte {position}",
                found=f"{tensor.begin}: a {'gap' if tensor.begin > position else 'overlap'}",
            )
        position = tensor.end
    if position != size:
        raise InvalidHeader(
            where,
            expected=f"{position:,} bytes, as its header says",
            found=f"{size:,}",
            do="the file is cut off; fetch it again" if size < position else None,
        )
    return Header(tuple(tensors), metadata, data_begin)


def read_header(path: Path) -> Header:
    """Read and parse the header of a safetensors file on disk; no more than the header is read."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = header_nbytes(prefix, size, str(path))
        return parse_header(prefix + file.read(length), size, str(path))


def _tensor(name: str, entry: Any, data_begin: int, where: str) -> HeaderTensor:
    where = f"{where}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise InvalidHeader(where, expected="dtype, shape, data_offsets", found=repr(entry)[:80])
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in dtypes.BITS:
        raise InvalidHeader(
            where, expected=f"a dtype of {', '.join(dtypes.BITS)}", found=repr(dtype)[:40]
        )
    if not _sizes(shape):
        raise InvalidHeader(where, expected="a shape of sizes", found=repr(shape)[:80])
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InvalidHeader(where, expected="data_offsets [begin, end]", found=repr(offsets)[:80])
    numel = dtypes.numel(shape)
    if numel is None:
        raise InvalidHeader(where, expected="a shape that fits memory", found=str(shape)[:80])
    needed = dtypes.nbytes(dtype, numel)
    begin, end = offsets
    if needed != end - begin:
        raise InvalidHeader(
            where,
            expected=f"{needed} bytes for {dtype} {shape}"
            if needed is not None
            else f"a shape that fills whole bytes of {dtype}",
            found=f"{end - begin} bytes",
        )
    return HeaderTensor(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _sizes(value: Any) -> bool:
    """Whether a JSON value is a list of lengths (``True`` is an int in Python, but no length)."""
    return isinstance(value, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= dtypes.MAX_NUMEL for v in value
    )
