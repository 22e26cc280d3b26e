"""Memory for chunks under way: bounded in bytes, and kept from one chunk to the next.

What is held is what the system is asked for, page by page, and given back: no allocator keeps more.
"""

from __future__ import annotations

import mmap

_LEAST = 1 << 16

_KEPT = 16
"""Pieces that wait to be used again, at most."""


class Buffers:
    """Pieces of memory. Not safe between threads: the caller has a lock."""

    def __init__(self) -> None:
        self.used = 0
        self._free: list[mmap.mmap] = []

    @property
    def held(self) -> int:
        """Bytes of all pieces: those in use, and those that wait."""
        return self.used + sum(map(len, self._free))

    def take(self, length: int, most: int) -> mmap.mmap | None:
        """A piece of ``length`` bytes or more; None if more than ``most`` bytes would be in use.

        One is always had, however long it is. :attr:`held` stays at ``most``, or one such piece.
        """
        least = max(length, _LEAST)
        # Not one much longer than it has to be, of which all would count.
        fitting = [piece for piece in self._free if length <= len(piece) <= 2 * least]
        best = min(fitting, key=len, default=None)
        nbytes = least if best is None else len(best)
        if self.used and self.used + nbytes > most:
            return None
        if best is not None:
            self._free.remove(best)
        while self._free and self.held + nbytes > most:
            self._free.pop(0)
        self.used += nbytes
        return mmap.mmap(-1, nbytes) if best is None else best

    def give_back(self, piece: mmap.mmap) -> None:
        """Have a piece used again. Nobody may look at it any more."""
        self.used -= len(piece)
        self._free.append(piece)
        del self._free[:-_KEPT]
