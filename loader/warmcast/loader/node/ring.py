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

import bisect
import hashlib
import threading
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

POINTS = 1024

_MOST = 1 << 16
_INDEX = np.uint64(_MOST - 1)
"""The bits of a point that tell whose it is."""


class Ring:
    """The placement of chunks on some nodes, whose names are all different. Safe between threads.

    Its points, 8 bytes each, are made when they are first needed: a ring that was replaced before
    anybody asked it costs nothing, and one that takes its place none of its memory.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes = sorted(set(nodes))
        if len(self.nodes) > _MOST:
            raise ValueError(f"expected {_MOST} nodes at most, found {len(self.nodes)}")
        self._made: npt.NDArray[np.uint64] | None = None
        self._making = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of its points, be they made or not."""
        return 8 * POINTS * len(self.nodes)

    def owners(self, sha256: str, chunks: int, count: int = 1) -> list[Sequence[str]]:
        """For each of a blob's chunks the ``count`` nodes it belongs to, or all if there are fewer.

        ``sha256`` is the blob's, in hex.
        """
        places = self.places(sha256, chunks)
        if count == 1 and self.nodes:
            return [(self.nodes[index],) for index in self._whose(places)]
        return [self.following(place, count) for place in places.tolist()]

    def places(self, sha256: str, chunks: int) -> npt.NDArray[np.uint32]:
        """Where on the ring each of a blob's chunks is: all that there is to keep of many chunks.

        Numbers of points, good for this ring alone.
        """
        return np.searchsorted(self._points, _points(f"blob {sha256}", chunks)).astype(np.uint32)

    def following(self, place: int, count: int) -> tuple[str, ...]:
        """The ``count`` nodes that a chunk at a place belongs to, or all if there are fewer."""
        points = self._points
        wanted = min(count, len(self.nodes))
        found: dict[int, None] = {}
        while len(found) < wanted:  # each node has points: once round, and all are found
            place %= len(points)
            piece = points[place : place + 2 * count]
            found |= dict.fromkeys((piece & _INDEX).tolist())
            place += len(piece)
        return tuple(self.nodes[index] for index in islice(found, wanted))

    def order(self, places: npt.NDArray[np.uint32], node: str) -> npt.NDArray[np.uint32]:
        """A blob's chunks, by number, in the order in which a node best asks for them: its own
        first, for others wait for those; then round from a place that is the node's, or all would
        ask the same owners at once.
        """
        count = len(places)
        index = bisect.bisect_left(self.nodes, node)
        there = self.nodes[index : index + 1] == [node]
        first = count * (index + there) // max(1, len(self.nodes))
        turned = (np.arange(count) - first) % max(1, count)
        others = self._whose(places) != index if there else np.ones(count, dtype=np.bool_)
        return np.lexsort((turned, others)).astype(np.uint32)

    def shares(self, sha256: str, chunks: int) -> npt.NDArray[np.int64]:
        """How many of a blob's chunks each node owns, in the order of :attr:`nodes`."""
        return np.bincount(self._whose(self.places(sha256, chunks)), minlength=len(self.nodes))

    @property
    def _points(self) -> npt.NDArray[np.uint64]:
        with self._making:
            if self._made is None:
                self._made = _sorted_points(self.nodes)
            return self._made

    def _whose(self, places: npt.NDArray[np.uint32]) -> npt.NDArray[np.intp]:
        return (self._points[places % len(self._points)] & _INDEX).astype(np.intp)


def _sorted_points(nodes: Sequence[str]) -> npt.NDArray[np.uint64]:
    points = np.empty(len(nodes) * POINTS, dtype=np.uint64)
    for index, name in enumerate(nodes):
        mine = points[index * POINTS : (index + 1) * POINTS]
        mine[:] = _points(f"node {name}", POINTS)
        # Whose a point is stands in its last bits: one sort brings both in order.
        mine &= ~_INDEX
        mine |= np.uint64(index)
    points.sort()
    return points


def _points(name: str, count: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(hashlib.shake_128(name.encode()).digest(8 * count), dtype="<u8")
