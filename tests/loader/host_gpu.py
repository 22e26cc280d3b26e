"""A GPU made of five functions that copy within host memory, for the link that C makes to one."""

from __future__ import annotations

import ctypes
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from warmcast.loader import dma, driver, pump
from warmcast.loader.chunks import Chunk, Incoming
from warmcast.loader.combs import Comb
from warmcast.loader.pump import Gpu, Link
from warmcast.manifests.manifest import FileEntry

SLOT = 4096
FAILED = 700
NOT_READY = 600
STREAM = 77


class HostGpu:
    """Copies when it is asked whether it has, and writes down what it was asked for.

    ``busy`` batches are not done yet when they are first asked about; ``fail_at`` numbers the copy
    that fails.
    """

    def __init__(self, *, batches: bool = True, busy: int = 0) -> None:
        self.batches: list[int] = []
        self.recorded: list[int] = []
        self.ended: list[int] = []
        self.synchronized: list[int] = []
        self.fail_at = -1
        self.query_fails = False
        self.busy = busy
        self._copies = 0
        self._begun: list[tuple[int, int, int]] = []
        self._marked: dict[int, list[tuple[int, int, int]]] = {}
        self._asked: Counter[int] = Counter()
        self._events: list[int] = []
        number, pointer, size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
        numbers, sizes = ctypes.POINTER(number), ctypes.POINTER(size)
        self._functions = (
            ctypes.CFUNCTYPE(ctypes.c_int, number, pointer, size, pointer)(self._copy),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(driver.Rows), pointer)(self._copy_rows),
            ctypes.CFUNCTYPE(
                ctypes.c_int, numbers, numbers, sizes, size, pointer, sizes, size, sizes, pointer
            )(self._copy_all),
            ctypes.CFUNCTYPE(ctypes.c_int, number, pointer)(self._record),
            ctypes.CFUNCTYPE(ctypes.c_int, number)(self._query),
        )
        self.functions = Gpu(*(ctypes.cast(f, ctypes.c_void_p) for f in self._functions))
        if not batches:
            self.functions.copy_all = None

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        assert stream == STREAM
        self._copies += 1
        if self._copies == self.fail_at:
            return FAILED
        self._begun.append((to, source, nbytes))
        return 0

    def _copy_rows(self, request, stream: int) -> int:
        rows = request.contents
        assert (rows.src_type, rows.dst_type) == (driver.HOST, driver.DEVICE)
        assert (rows.src_x, rows.src_y, rows.dst_x, rows.dst_y) == (0, 0, 0, 0)
        for row in range(rows.height):
            to = rows.dst_device + row * rows.dst_pitch
            self._copy(to, rows.src_host + row * rows.src_pitch, rows.width, stream)
        return 0

    def _copy_all(
        self, to, source, nbytes, count, attributes, first, attributes_count, _, stream
    ) -> int:
        assert ctypes.cast(attributes, ctypes.POINTER(ctypes.c_int))[0] == 1  # in stream order
        assert (first[0], attributes_count) == (0, 1)
        self.batches.append(count)
        # A batch's copies are in no order.
        return max(self._copy(to[k], source[k], nbytes[k], stream) for k in reversed(range(count)))

    def _record(self, event: int, stream: int) -> int:
        assert stream == STREAM
        self.recorded.append(event)
        assert event not in self._marked
        self._marked[event], self._begun = self._begun, []
        return 0

    def mark(self) -> SimpleNamespace:
        """An event as Python has them."""
        event = len(self._events) + 1
        self._events.append(event)
        return SimpleNamespace(
            event=event,
            record=self._record,
            wait=lambda: self._query(event) if event in self._marked else 0,
            free=lambda: None,
        )

    def synchronize(self, stream: int) -> int:
        """Wait for all that was begun."""
        self.synchronized.append(stream)
        return max(map(self._query, list(self._marked)), default=0)

    def _query(self, event: int) -> int:
        if self.query_fails:
            return FAILED
        self._asked[event] += 1
        if self._asked[event] <= self.busy:
            return NOT_READY
        self._asked[event] = 0
        for to, source, nbytes in self._marked.pop(event):
            ctypes.memmove(to, source, nbytes)
        self.ended.append(event)
        return 0


@contextmanager
def linked(gpu: HostGpu) -> Iterator[Link]:
    """A link to that GPU."""
    events = count(1001)

    def mark() -> SimpleNamespace:
        return SimpleNamespace(event=ctypes.c_void_p(next(events)), free=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dma, "Mark", mark)
        patch.setattr(
            driver, "waiting", lambda: SimpleNamespace(cuStreamSynchronize=gpu.synchronize)
        )
        link = Link(pump.library(), gpu.functions, STREAM)
        try:
            yield link
        finally:
            link.free()


def written(folder: Path, nbytes: int) -> tuple[int, bytes]:
    data = random.Random(nbytes).randbytes(nbytes)
    path = folder / "file"
    path.write_bytes(data)
    return os.open(path, os.O_RDONLY), data


def chunk_of(begin: int, length: int, combs: Sequence[Comb]) -> Chunk:
    """A part of a file, and where its bytes go."""
    incoming = [
        Incoming(n, "file", comb, comb.target.nbytes, None, comb.first, comb.end, comb.address)
        for n, comb in enumerate(combs)
    ]
    entry = FileEntry(path="file", size=begin + length, sha256="0" * 64, crc32c="0" * 8, chunks=())
    return Chunk(entry, begin, length, None, incoming)


def whole(target: torch.Tensor) -> Chunk:
    """A file, each byte to where it is in the target."""
    return chunk_of(0, len(target), [Comb(0, 1, len(target), 0, len(target), target)])
