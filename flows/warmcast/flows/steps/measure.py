"""Measure: one pass over a file's bytes that yields every checksum a manifest holds of it.

The bytes are cut where a chunk or a tensor begins or ends. Each piece's CRC32C is taken once, and
a chunk's, a tensor's and the file's are combined from those of their pieces; the SHA-256 and the
samples come from the same buffer. Memory: 16 MiB. Verification is the same pass over a blob.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from warmcast.manifests.checksum import combine, crc32c, to_hex
from warmcast.manifests.manifest import CHUNK_SIZE, FileEntry, TensorEntry
from warmcast.manifests.sampling import element_nbytes, sample_indices, sampled_hash

_BUFFER = 1 << 24

Read = Callable[[int, memoryview], None]
"""Fills a buffer from an offset of the file."""


class Stored(Protocol):
    """A tensor in a file: a header's, or a manifest's."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def begin(self) -> int: ...  # noqa: D102
    @property
    def end(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Measured:
    """What a manifest says of a file: its entry, and its tensors' in order of their place."""

    file: FileEntry
    tensors: tuple[TensorEntry, ...] = ()


def measure(
    path: str,
    size: int,
    tensors: Sequence[Stored],
    read: Read,
    tick: Callable[[int], None],
    chunk_size: int = CHUNK_SIZE,
) -> Measured:
    """Read a file of ``size`` bytes front to back and compute its entries.

    ``tensors`` do not overlap. ``tick`` is told the bytes of every piece, and may raise.
    """
    passes = [_TensorPass(t) for t in sorted(tensors, key=lambda t: (t.begin, t.end))]
    waiting = iter(passes)
    present = next(waiting, None)
    digest = hashlib.sha256()
    chunks: list[int] = []
    whole = 0
    buffer = memoryview(bytearray(min(_BUFFER, chunk_size, size)))
    for chunk_begin in range(0, size, chunk_size):
        chunk_end = min(chunk_begin + chunk_size, size)
        chunk = 0
        for start in range(chunk_begin, chunk_end, _BUFFER):
            view = buffer[: min(_BUFFER, chunk_end - start)]
            read(start, view)
            digest.update(view)
            for begin, end in _pieces(start, start + len(view), passes):
                piece = view[begin - start : end - start]
                checksum = crc32c(piece)
                chunk = combine(chunk, checksum, end - begin)
                while present is not None and present.tensor.end <= begin:
                    present = next(waiting, None)
                if present is not None and present.tensor.begin <= begin:
                    present.take(begin, piece, checksum)
            tick(len(view))
        chunks.append(chunk)
        whole = combine(whole, chunk, chunk_end - chunk_begin)
    entry = FileEntry(
        path=path,
        size=size,
        sha256=digest.hexdigest(),
        crc32c=to_hex(whole),
        chunks=tuple(map(to_hex, chunks)),
    )
    return Measured(entry, tuple(p.entry(path) for p in passes))


def _pieces(start: int, end: int, passes: Sequence[_TensorPass]) -> Iterator[tuple[int, int]]:
    """Cut ``start`` to ``end`` at the bounds of the tensors inside."""
    position = start
    first = bisect_right(passes, start, key=lambda p: p.tensor.end)
    for index in range(first, len(passes)):
        tensor = passes[index].tensor
        if tensor.begin >= end:
            break
        for bound in (tensor.begin, tensor.end):
            if position < bound < end:
                yield position, bound
                position = bound
    if position < end:
        yield position, end


@dataclass(slots=True)
class _TensorPass:
    """A tensor's checksum and samples, gathered piece by piece."""

    tensor: Stored
    _crc: int = 0
    _samples: bytearray = field(default_factory=bytearray)
    _indices: Sequence[int] = ()
    _width: int = 0
    _numel: int = 0
    _next: int = 0

    def __post_init__(self) -> None:
        self._width = element_nbytes(self.tensor.dtype)
        self._numel = (self.tensor.end - self.tensor.begin) // self._width

    def take(self, begin: int, piece: memoryview, checksum: int) -> None:
        """Take the bytes at ``begin`` of the file, all of them the tensor's."""
        self._crc = combine(self._crc, checksum, len(piece))
        if not self._indices:
            self._indices = sample_indices(self.tensor.name, self._numel)
        offset = begin - self.tensor.begin
        while self._next < len(self._indices):
            # An element may begin in one piece and end in another.
            done = len(self._samples) - self._next * self._width
            place = self._indices[self._next] * self._width + done
            if place >= offset + len(piece):
                return
            self._samples += piece[place - offset : place - offset + self._width - done]
            if len(self._samples) < (self._next + 1) * self._width:
                return
            self._next += 1

    def entry(self, path: str) -> TensorEntry:
        """What the manifest says of the tensor."""
        tensor = self.tensor
        return TensorEntry(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            file=path,
            begin=tensor.begin,
            end=tensor.end,
            crc32c=to_hex(self._crc),
            sample=sampled_hash(tensor.name, tensor.dtype, self._numel, bytes(self._samples)),
        )
