"""Where a file's bytes go: the runs of a file that belong to one tensor, or to a slice of one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from warmcast.manifests.manifest import SliceEntry, TensorEntry


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

    def solid(self, at: int, nbytes: int) -> Tensor | None:
        """The memory of ``nbytes`` bytes of the file from ``at``, if all of them lie there."""
        if self.rows != 1 or at < self.first or at + nbytes > self.end:
            return None
        return self.target[at - self.first : at - self.first + nbytes]

    def copy(self, buffer: Tensor, at: int) -> None:
        """Copy what ``buffer``, the file's bytes from ``at``, holds of this comb."""
        start = max(at - self.begin, 0)
        stop = min(at + buffer.numel() - self.begin, self.rows * self.pitch)
        if start >= stop:
            return
        offset = self.begin - at
        first, last = -(-start // self.pitch), stop // self.pitch
        if first < last:
            width = self.high - self.low
            teeth = buffer[offset + first * self.pitch : offset + last * self.pitch]
            teeth = teeth.view(last - first, self.pitch)[:, self.low : self.high]
            place = self.target[first * width : last * width].view(last - first, width)
            place.copy_(teeth, non_blocking=True)
        # A row that begins before the buffer or ends after it.
        for row in {start // self.pitch, last} if first <= last else {last}:
            if first <= row < last or row >= self.rows:
                continue
            low = max(row * self.pitch + self.low, start)
            high = min(row * self.pitch + self.high, stop)
            if low < high:
                first_byte = row * (self.high - self.low) + low - row * self.pitch - self.low
                self.target[first_byte : first_byte + high - low].copy_(
                    buffer[offset + low : offset + high], non_blocking=True
                )
