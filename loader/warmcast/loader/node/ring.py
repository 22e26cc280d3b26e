"""Which node owns a chunk: consistent hashing over the nodes that are alive.

Every node has ``POINTS`` points on a circle of 64 bits, a chunk has one; the chunk belongs to the
nodes whose points follow it, the first of them being its owner and the next ones those to turn to
when it is gone. All of it follows from the nodes' names and the blob's SHA-256 alone, so whoever
knows the same nodes computes the same owners; and who knows of one node more or less disagrees
about that node's chunks only.

With 1024 points the largest share among 10,000 nodes is 1.13 times the mean.

Source: Karger et al., "Consistent Hashing and Random Trees", 1997. Points are SHAKE-128 of a node's
name, and of a blob's digest, as little-endian words of 64 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

POINTS = 1024

_MOST = 1 << 16
_INDEX = np.uint64(_MOST - 1)
"""The bits of a point that tell whose it is."""


class Ring:
    """The placement of chunks on some nodes, whose names are all different."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes = sorted(set(nodes))
        if len(self.nodes) > _MOST:
            raise ValueError(f"expected {_MOST} nodes at most, found {len(self.nodes)}")
        self._points = np.empty(len(self.nodes) * POINTS, dtype=np.uint64)
        for index, name in enumerate(self.nodes):
            mine = self._points[index * POINTS : (index + 1) * POINTS]
            mine[:] = _points(f"node {name}", POINTS)
            # Whose a point is stands in its last bits: one sort brings both in order.
            mine &= ~_INDEX
            mine |= np.uint64(index)
        self._points.sort()

    def owners(self, sha256: str, chunks: int, count: int = 1) -> list[Sequence[str]]:
        """For each of a blob's chunks the ``count`` nodes it belongs to, or all if there are fewer.

        ``sha256`` is the blob's, in hex.
        """
        if not self.nodes:
            return [()] * chunks
        where = np.searchsorted(self._points, self._places(sha256, chunks))
        if count == 1:
            return [(self.nodes[index],) for index in self._whose(where)]
        return [self._following(int(place), count) for place in where]

    def shares(self, sha256: str, chunks: int) -> npt.NDArray[np.int64]:
        """How many of a blob's chunks each node owns, in the order of :attr:`nodes`."""
        where = np.searchsorted(self._points, self._places(sha256, chunks))
        return np.bincount(self._whose(where), minlength=len(self.nodes))

    def _places(self, sha256: str, chunks: int) -> npt.NDArray[np.uint64]:
        return _points(f"blob {sha256}", chunks)

    def _whose(self, where: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        return (self._points[where % len(self._points)] & _INDEX).astype(np.intp)

    def _following(self, place: int, count: int) -> Sequence[str]:
        found: dict[str, None] = {}
        for step in range(len(self._points)):
            if len(found) == min(count, len(self.nodes)):
                break
            point = self._points[(place + step) % len(self._points)]
            found[self.nodes[int(point & _INDEX)]] = None
        return tuple(found)


def _points(name: str, count: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(hashlib.shake_128(name.encode()).digest(8 * count), dtype="<u8")
