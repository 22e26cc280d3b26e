"""Measure: one pass over a file's bytes that yields every checksum a manifest holds of it.

The bytes are cut where a chunk or a tensor begins or ends. Each piece's CRC32C is taken once, and
a chunk's, a tensor's and the file's are combined from those of their pieces; the SHA-256 and the
samples come from the same buffer. Memory: 16 MiB. Verification is the same pass over a blob.

:class:`Measuring` is the pass itself, for those who read in their own way: checksums of pieces are
taken by any thread, the rest in the order of the file. It can be put down, as a record for a
journal, and taken up again by another process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

from warmcast.manifests.checksum import combine, crc32c, from_hex, to_hex
from warmcast.manifests.errors import InvalidData
from warmcast.manifests.manifest import (
    CHUNK_SIZE,
    Crc32c,
    FileEntry,
    Record,
    Sample,
    Sha256,
    Size,
    TensorEntry,
)
from warmcast.manifests.sampling import element_nbytes, sample_indices, sampled_hash
from warmcast.manifests.sha256 import Sha256 as Hash

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


class Piece(NamedTuple):
    """A run of a file's bytes, ``begin`` to ``end``, that no bound cuts, and its CRC32C."""

    begin: int
    end: int
    crc32c: int


class OpenTensor(Record):
    """What is known of a tensor that was begun: its CRC32C so far, and its samples in hex."""

    crc32c: Crc32c
    samples: str
    taken: Size


class Progressed(Record):
    """A pass that was put down after ``nbytes`` bytes, as a journal keeps it.

    ``sha256`` is the hash's state; ``chunks`` are complete but for the last; ``tensors`` are those
    that are complete, in the order of their places.
    """

    nbytes: Size
    sha256: Sha256
    chunks: tuple[Crc32c, ...]
    tensors: tuple[tuple[Crc32c, Sample], ...]
    present: OpenTensor | None = None


class Measuring:
    """A pass over a file of ``size`` bytes whose ``tensors`` do not overlap."""

    def __init__(
        self, path: str, size: int, tensors: Sequence[Stored], chunk_size: int = CHUNK_SIZE
    ) -> None:
        self.path = path
        self.size = size
        self.nbytes = 0
        """Bytes that were taken."""
        self._chunk_size = chunk_size
        self._passes = [_TensorPass(t) for t in sorted(tensors, key=lambda t: (t.begin, t.end))]
        self._present = 0
        self._hash = Hash()
        self._chunks: list[int] = []

    def pieces(self, start: int, view: memoryview) -> list[Piece]:
        """The checksums of the bytes at ``start``; in any thread, in any order."""
        return [
            Piece(begin, end, crc32c(view[begin - start : end - start]))
            for begin, end in self._cut(start, start + len(view))
        ]

    def take(self, view: memoryview, pieces: Sequence[Piece]) -> None:
        """Take the next bytes of the file, with what :meth:`pieces` said of them."""
        start = self.nbytes
        self._hash.update(view)
        for begin, end, checksum in pieces:
            piece = view[begin - start : end - start]
            if begin % self._chunk_size:
                self._chunks[-1] = combine(self._chunks[-1], checksum, end - begin)
            else:
                self._chunks.append(checksum)
            self._skip(begin)
            if self._present < len(self._passes):
                present = self._passes[self._present]
                if present.tensor.begin <= begin:
                    present.take(begin, piece, checksum)
        self.nbytes += len(view)

    def measured(self) -> Measured:
        """What the manifest says of the file, all of which was taken."""
        whole = 0
        for index, chunk in enumerate(self._chunks):
            begin = index * self._chunk_size
            whole = combine(whole, chunk, min(self._chunk_size, self.size - begin))
        entry = FileEntry(
            path=self.path,
            size=self.size,
            sha256=self._hash.hexdigest(),
            crc32c=to_hex(whole),
            chunks=tuple(map(to_hex, self._chunks)),
        )
        return Measured(entry, tuple(p.entry(self.path) for p in self._passes))

    def progressed(self) -> Progressed | None:
        """The pass as it stands, after a multiple of 64 bytes; None where it cannot be known."""
        state = self._hash.state()
        if state is None:
            return None
        self._skip(self.nbytes)
        done, rest = self._passes[: self._present], self._passes[self._present :]
        return Progressed(
            nbytes=self.nbytes,
            sha256=state,
            chunks=tuple(map(to_hex, self._chunks)),
            tensors=tuple(p.checks() for p in done),
            present=rest[0].begun() if rest and rest[0].tensor.begin < self.nbytes else None,
        )

    def resume(self, record: Progressed) -> bool:
        """Go on from where an earlier pass over the same file was put down, if that can be done.

        Raises :class:`InvalidData` if it was a pass over another file.
        """
        done = len(record.tensors)
        ended = sum(p.tensor.end <= record.nbytes for p in self._passes)
        begun = any(p.tensor.begin < record.nbytes < p.tensor.end for p in self._passes)
        chunks = -(-record.nbytes // self._chunk_size)
        if (
            record.nbytes > self.size
            or (done, begun) != (ended, record.present is not None)
            or chunks != len(record.chunks)
        ):
            raise InvalidData("journal", expected="a pass over this file", found="another")
        resumed = Hash.resume(record.sha256, record.nbytes)
        if resumed is None:
            return False
        for tensor, checks in zip(self._passes, record.tensors, strict=False):
            tensor.restore_checks(*checks)
        if record.present is not None and done < len(self._passes):
            self._passes[done].restore_begun(record.present)
        self._hash = resumed
        self._chunks = [from_hex(text) for text in record.chunks]
        self.nbytes = record.nbytes
        self._present = done
        return True

    def _skip(self, position: int) -> None:
        """Pass over the tensors that end at ``position`` or before."""
        while (
            self._present < len(self._passes) and self._passes[self._present].tensor.end <= position
        ):
            self._present += 1

    def _cut(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut ``start`` to ``end`` at the bounds of chunks and tensors inside."""
        size = self._chunk_size
        edges = chain(range(start // size * size + size, end, size), (end,))
        for edge in edges:
            yield from _pieces(start, edge, self._passes)
            start = edge


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
    measuring = Measuring(path, size, tensors, chunk_size)
    buffer = memoryview(bytearray(min(_BUFFER, size)))
    for start in range(0, size, _BUFFER):
        view = buffer[: min(_BUFFER, size - start)]
        read(start, view)
        measuring.take(view, measuring.pieces(start, view))
        tick(len(view))
    return measuring.measured()


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
    _sample: str | None = None

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

    def checks(self) -> tuple[str, str]:
        """The CRC32C and the sampled hash of the tensor, all of which was taken."""
        if self._sample is None:
            tensor = self.tensor
            samples = bytes(self._samples)
            self._sample = sampled_hash(tensor.name, tensor.dtype, self._numel, samples)
        return to_hex(self._crc), self._sample

    def begun(self) -> OpenTensor:
        """What is known so far."""
        return OpenTensor(crc32c=to_hex(self._crc), samples=self._samples.hex(), taken=self._next)

    def restore_checks(self, checksum: str, sample: str) -> None:
        """Be complete, as :meth:`checks` told."""
        self._crc, self._sample = from_hex(checksum), sample

    def restore_begun(self, record: OpenTensor) -> None:
        """Be as :meth:`begun` told."""
        try:
            self._samples = bytearray.fromhex(record.samples)
        except ValueError as cause:
            raise InvalidData("journal", expected="samples in hex", found=cause) from None
        self._crc, self._next = from_hex(record.crc32c), record.taken

    def entry(self, path: str) -> TensorEntry:
        """What the manifest says of the tensor."""
        tensor = self.tensor
        checksum, sample = self.checks()
        return TensorEntry(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            file=path,
            begin=tensor.begin,
            end=tensor.end,
            crc32c=checksum,
            sample=sample,
        )
