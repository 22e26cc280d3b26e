"""Safetensors: read as a source, and written as a stream.

The library's own writer wants the whole state in memory. The header needs only names, dtypes and
shapes, so it is written first, and each tensor's bytes as they come. Tensors stand in order of
their elements' width, widest first, so that each is aligned to its elements, and in load order
among equals. The same tensors give the same bytes, which is what lets a deploy be run again.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from warmcast.flows.convert.tensors import PIECE, Checkpoint, Extent, Files, Tensor, in_files
from warmcast.flows.errors import InvalidCheckpoint
from warmcast.flows.steps.order import load_order
from warmcast.flows.steps.weights import add_names, metadata_ties
from warmcast.manifests import dtypes
from warmcast.manifests.header import MAX_NBYTES, header_nbytes, parse_header

_NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
_COPY = 1 << 26


def open_safetensors(files: Files, numbers: Sequence[int]) -> Checkpoint:
    """The tensors of some files, and the ties that their metadata tell of."""
    headers = {}
    tensors = []
    holder: dict[str, str] = {}
    for number in numbers:
        source = files.sources[number]
        prefix = files.read(Extent(number, 0, min(8, source.size)))
        length = header_nbytes(prefix, source.size, source.path)
        header = parse_header(files.read(Extent(number, 0, 8 + length)), source.size, source.path)
        headers[source.path] = header
        add_names(holder, (t.name for t in header.tensors), source.path)
        tensors += [
            in_files(files, t.name, t.dtype, t.shape, (Extent(number, t.begin, t.nbytes),))
            for t in header.tensors
        ]
    return Checkpoint(tuple(tensors), metadata_ties(headers), holder=holder)


def write_safetensors(
    location: Path,
    tensors: Sequence[Tensor],
    metadata: Mapping[str, str],
    files: Files,
    tell: Callable[[int], None],
) -> None:
    """Write a new file of ``tensors``, whose extents are of ``files``; ``tell`` counts bytes.

    Raises ``OSError``, and :class:`InvalidCheckpoint` for a header beyond the format's limit.
    """
    ordered = sorted(tensors, key=lambda t: (-dtypes.BITS[t.dtype], load_order(t.name)))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_NBYTES:
        raise InvalidCheckpoint(
            "safetensors header", expected=f"{MAX_NBYTES} bytes at most", found=len(text)
        )
    with location.open("xb", buffering=0) as file:
        _write(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in ordered:
            if tensor.extents is not None:
                for extent in tensor.extents:
                    _copy(files, extent, file.fileno(), tell)
                continue
            written = 0
            for piece in tensor.pieces():
                _write(file.fileno(), piece)
                written += len(piece)
                tell(len(piece))
            if written != tensor.nbytes:
                raise InvalidCheckpoint(
                    f"tensor {tensor.name!r}", expected=f"{tensor.nbytes} bytes", found=written
                )


def _copy(files: Files, extent: Extent, out: int, tell: Callable[[int], None]) -> None:
    """Append an extent's bytes to ``out``: by the kernel, or through memory where it will not."""
    done = 0
    while done < extent.nbytes:
        try:
            count = os.copy_file_range(
                files.fileno(extent.file), out, min(_COPY, extent.nbytes - done),
                extent.offset + done,
            )  # fmt: skip
        except OSError as cause:
            if cause.errno not in _NO_KERNEL_COPY:
                raise
            count = 0
        if not count:
            break
        done += count
        tell(count)
    rest = Extent(extent.file, extent.offset + done, extent.nbytes - done)
    for piece in files.pieces((rest,), PIECE):
        _write(out, piece)
        tell(len(piece))


def _write(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
