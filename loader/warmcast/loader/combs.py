"""Where a file's bytes go: the runs of a file that belong to one tensor, or to a slice of one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from warmcast.manifests.manifest import SliceEntry, TensorEntry


class Move(NamedTuple):
    """``rows`` runs of ``width`` bytes, each ``pitch`` bytes after the last, that go to one place.

    The first begins at ``at`` in a buffer; ``to`` is where they go in the comb's target, packed.
    """

    at: int
    to: int
    rows: int
    width: int
    pitch: int


@dataclass(frozen=True, slots=True)
class Comb:
    """A comb of a file's bytes and the memory where its teeth go, one after another.

    From ``begin`` on, of each of ``rows`` rows of ``pitch`` bytes, the bytes ``low`` to ``high``
    belong to ``target`` (1-D, uint8). A whole tensor is a comb of one row.
    """

    begin: int
    rows: int
    pitch: int
    low: int
    high: int
    target: Tensor

    @classmethod
    def of(cls, entry: TensorEntry, part: SliceEntry | None, target: Tensor) -> Comb:
        """The comb of a tensor, or of a slice of it, whose row-major bytes ``target`` takes."""
        if part is None or part.axis is None or not entry.nbytes:
            return cls(entry.begin, 1, entry.nbytes, 0, entry.nbytes, target)
        rows = math.prod(entry.shape[: part.axis])
        pitch = entry.nbytes // rows
        inner = pitch // entry.shape[part.axis]
        low = part.start * inner
        return cls(entry.begin, rows, pitch, low, low + part.length * inner, target)

    @property
    def first(self) -> int:
        """The file's first byte that is wanted."""
        return self.begin + self.low

    @property
    def end(self) -> int:
        """The end of the last byte that is wanted; not after :attr:`first` where none is."""
        if not self.rows or self.low == self.high:
            return self.first
        return self.begin + (self.rows - 1) * self.pitch + self.high

    @property
    def address(self) -> int:
        """Where the target begins."""
        return self.target.data_ptr()

    def solid(self, at: int, nbytes: int) -> Tensor | None:
        """The memory of ``nbytes`` bytes of the file from ``at``, if all of them lie there."""
        if self.rows != 1 or at < self.first or at + nbytes > self.end:
            return None
        return self.target[at - self.first : at - self.first + nbytes]

    def moves(self, begin: int, nbytes: int) -> Iterator[Move]:
        """What goes from a buffer of the file's ``nbytes`` bytes from ``begin`` to the target."""
        start = max(begin - self.begin, 0)
        stop = min(begin + nbytes - self.begin, self.rows * self.pitch)
        if start >= stop:
            return
        offset = self.begin - begin
        width = self.high - self.low
        first, last = -(-start // self.pitch), stop // self.pitch
        if first < last:
            at = offset + first * self.pitch + self.low
            yield Move(at, first * width, last - first, width, self.pitch)
        # A row that begins before the buffer or ends after it.
        for row in {start // self.pitch, last} if first <= last else {last}:
            if first <= row < last or row >= self.rows:
                continue
            low = max(row * self.pitch + self.low, start)
            high = min(row * self.pitch + self.high, stop)
            if low < high:
                yield Move(offset + low, row * width + low - row * self.pitch - self.low, 1,
                           high - low, 0)  # fmt: skip

    def copy(self, buffer: Tensor, begin: int) -> None:
        """Copy what ``buffer``, the file's bytes from ``begin``, holds of this comb."""
        for at, to, rows, width, pitch in self.moves(begin, buffer.numel()):
            teeth = torch.as_strided(
                buffer, (rows, width), (pitch, 1), buffer.storage_offset() + at
            )
            place = self.target[to : to + rows * width].view(rows, width)
            place.copy_(teeth, non_blocking=True)
