"""What a stream reads: the chunks of a manifest, and where each of their bytes goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from warmcast.loader.combs import Comb
from warmcast.loader.containers import flat_bytes
from warmcast.loader.plan import Targets
from warmcast.manifests.manifest import FileEntry, Manifest

_PART = 0.75
"""The part of a chunk's bytes beneath which only what is wanted of it is read."""


@dataclass(slots=True, eq=False)
class Incoming:
    """One tensor that is to come: its number in the plan, the file at ``path`` and the comb that
    its bytes are there, and how many of them are left to come.

    ``lay_out`` brings what was read aside to its place. The last three are of the comb, which
    would have to work them out each time.
    """

    number: int
    path: str
    comb: Comb
    left: int
    lay_out: Callable[[], None] | None
    first: int
    end: int
    address: int

    @classmethod
    def of(cls, targets: Targets, number: int) -> Incoming | None:
        """What is to come for one placement; None for weights that no file has."""
        placement, tensor = targets.plan.placements[number], targets.tensors[number]
        if placement.entry is None:
            return None
        target, lay_out = tensor, None
        if not tensor.is_contiguous():
            # Read aside on the device, and laid out as it should be when all is there.
            target = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            lay_out = partial(_copy_over, tensor, target)
        comb = Comb.of(placement.entry, placement.slice, flat_bytes(target))
        path, nbytes = placement.entry.file, target.nbytes
        return cls(number, path, comb, nbytes, lay_out, comb.first, comb.end, comb.address)

    def came(self, begin: int, length: int) -> int:
        """How many of its bytes are among the file's ``length`` bytes from ``begin``."""
        if self.comb.rows == 1:
            return max(0, min(begin + length, self.end) - max(begin, self.first))
        return sum(move.rows * move.width for move in self.comb.moves(begin, length))


def _copy_over(tensor: Tensor, source: Tensor) -> None:
    tensor.copy_(source)


Copy = tuple[int, int, int, int, int]
"""(to this address, from where in the piece, bytes of a row, bytes from row to row, rows)"""


class Piece(NamedTuple):
    """What is read at once: ``nbytes`` of a file from ``begin``, and the copies of them."""

    begin: int
    nbytes: int
    copies: list[Copy]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is read of one chunk of a file, and the tensors that are (partly) there.

    ``crc32c`` is None where that is not all of the chunk.
    """

    file: FileEntry
    begin: int
    length: int
    crc32c: str | None
    incoming: Sequence[Incoming]

    def combs(self) -> list[tuple[int, int, int, int, int]]:
        """Where its bytes go, in the order of the file.

        Each is (the file's first byte, bytes of a row, bytes from row to row, rows, address).
        """
        return sorted(
            (t.first, t.comb.high - t.comb.low, t.comb.pitch, t.comb.rows, t.address)
            for t in self.incoming
            if t.first < t.end
        )

    def pieces(self, nbytes: int) -> list[Piece]:
        """The chunk in pieces of ``nbytes``; the last is what remains."""
        end = self.begin + self.length
        pieces = [Piece(at, min(nbytes, end - at), []) for at in range(self.begin, end, nbytes)]
        for tensor in self.incoming:
            first, last = max(self.begin, tensor.first), min(end, tensor.end)
            if first >= last:
                continue
            begun = (first - self.begin) // nbytes
            for begin, length, copies in pieces[begun : -((self.begin - last) // nbytes)]:
                if tensor.comb.rows == 1:
                    low, high = max(first, begin), min(last, begin + length)
                    to = tensor.address + low - tensor.first
                    copies.append((to, low - begin, high - low, 0, 1))
                else:
                    for at, to, rows, width, pitch in tensor.comb.moves(begin, length):
                        copies.append((tensor.address + to, at, width, pitch, rows))
        return pieces


def joined(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Chunks that need not be checked; those that follow each other in a file are one."""
    last: Chunk | None = None
    for chunk in chunks:
        if last is not None and chunk.file is last.file and chunk.begin == last.begin + last.length:
            incoming = list(dict.fromkeys([*last.incoming, *chunk.incoming]))
            last = Chunk(last.file, last.begin, last.length + chunk.length, None, incoming)
            continue
        if last is not None:
            yield last
        last = chunk
    if last is not None:
        yield last


@dataclass(slots=True)
class _Wanted:
    """The tensors of one chunk, in load order, and the span that they want of it."""

    begin: int
    end: int
    incoming: list[Incoming] = field(default_factory=list)


def chunks_of(
    manifest: Manifest, incoming: Sequence[Incoming], *, careful: bool
) -> Iterator[Chunk]:
    """What to read, in load order: that of the first tensor which needs each chunk.

    Of a chunk that little is wanted of only that is read, unless ``careful``.
    """
    size = manifest.chunk_size
    tangled = _tangled(incoming)
    spread = [(tensor, _numbers(tensor, size)) for tensor in incoming if tensor.first < tensor.end]
    wanted: dict[tuple[str, int], _Wanted] = {}
    for tensor, numbers in spread:
        for number in numbers if tensor.path in tangled else {numbers[0], numbers[-1]}:
            begin, end = max(tensor.first, number * size), min(tensor.end, (number + 1) * size)
            span = wanted.setdefault((tensor.path, number), _Wanted(begin, end))
            span.begin, span.end = min(span.begin, begin), max(span.end, end)
            span.incoming.append(tensor)
    for tensor, numbers in spread:
        file = manifest.file[tensor.path]
        for number in numbers:
            begin = number * size
            length = min(size, file.size - begin)
            if number in (numbers[0], numbers[-1]) or tensor.path in tangled:
                found = wanted.pop((tensor.path, number), None)
                if found is None:  # it came for another
                    continue
            else:
                found = _Wanted(begin, begin + length, [tensor])
            if careful or found.end - found.begin > _PART * length:
                yield Chunk(file, begin, length, file.chunks[number], found.incoming)
            else:
                yield Chunk(file, found.begin, found.end - found.begin, None, found.incoming)


def _numbers(tensor: Incoming, size: int) -> range:
    """The chunks of ``size`` bytes that a tensor lies in."""
    return range(tensor.first // size, -(-tensor.end // size))


def _tangled(incoming: Iterable[Incoming]) -> set[str]:
    """The files of which some bytes belong to several tensors.

    In others a chunk amid a tensor is nobody else's: there is no need to look at all tensors, and
    at all their chunks, before the first can be read.
    """
    found: set[str] = set()
    ends: dict[str, int] = {}
    for tensor in sorted(incoming, key=attrgetter("path", "first")):
        if tensor.first < min(tensor.end, ends.get(tensor.path, 0)):
            found.add(tensor.path)
        ends[tensor.path] = max(tensor.end, ends.get(tensor.path, 0))
    return found
