"""``pump.c``: a file's bytes from the page cache to a GPU, without the interpreter.

It is built when Warmcast is installed, where there is a C compiler; without it Python does the
same, copy by copy (see :mod:`dma`).
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from warmcast.loader import dma, driver
from warmcast.loader.chunks import Chunk, Copy
from warmcast.manifests.deadline import Deadline

LIBRARY = Path(__file__).with_name("_pump.so")
"""Where it is built."""

_LAYOUT = 2  # of the structures: pump.c has the same
_LATE = -1
_SLICE = 50_000_000
"""Nanoseconds for which a call goes on: then somebody may want it to end."""


class Gpu(ctypes.Structure):
    """The driver's functions; ``struct gpu``."""

    _fields_ = (
        ("copy", ctypes.c_void_p),
        ("copy_rows", ctypes.c_void_p),
        ("copy_all", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
    )


class _Lane(ctypes.Structure):
    """``struct lane``."""

    _fields_ = (
        ("link", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("slot_count", ctypes.c_int64),
        ("batches", ctypes.c_void_p),
        ("turn", ctypes.c_int64),
        ("at", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("combs", ctypes.c_void_p),
        ("comb_count", ctypes.c_int64),
        ("first_comb", ctypes.c_int64),
    )


class Link:
    """A stream to the GPU whose context is the current one, for all threads of a load.

    What they bring is copied in batches: a copy engine goes on at once in one, but needs some
    microseconds before the next.
    """

    slot = 1 << 20  # with more those of all threads do not stay in the processor's cache

    def __init__(self, library: Any, gpu: Gpu, stream: int) -> None:
        self.library = library
        self._marks = [dma.Mark() for _ in range(library.warmcast_link_events())]
        events = (driver.Handle * len(self._marks))(*(mark.event for mark in self._marks))
        self.address = library.warmcast_link_new(ctypes.byref(gpu), stream, events)
        if not self.address:
            self._free_marks()
            raise MemoryError
        self._stream = stream

    def sender(self, address: int, nbytes: int, slots: int, *, pinned: bool) -> Sender:
        """What one thread brings its bytes with."""
        if not pinned:
            self.library.warmcast_link_single(self.address)
        return Sender(self, address, nbytes, slots)

    def begin(self, deadline: Deadline) -> None:
        """Return when all that was brought so far stands in the stream."""
        while error := self.library.warmcast_link_begin(self.address, _soon()):
            if error != _LATE:
                driver.check("copy to the GPU", error)
            deadline.check("waiting for the GPU")

    def reach(self, mark: int, deadline: Deadline) -> None:
        """Return when the batch of this number has been copied."""
        while error := self.library.warmcast_link_wait(self.address, mark, _soon()):
            if error != _LATE:
                driver.check("copy to the GPU", error)
            deadline.check("waiting for the GPU")

    def stop(self) -> None:
        """Have nothing more begun, and wait for what was."""
        self.library.warmcast_link_stop(self.address)
        driver.waiting().cuStreamSynchronize(self._stream)

    def free(self) -> None:
        """Give everything back; all senders are done."""
        self.library.warmcast_link_free(self.address)
        self._free_marks()

    def _free_marks(self) -> None:
        for mark in self._marks:
            mark.free()


class Sender:
    """Sends by slots, in one thread; a :class:`link.Sender`."""

    def __init__(self, link: Link, address: int, nbytes: int, slots: int) -> None:
        self._link, self._library = link, link.library
        self._batches = array("q", [0] * slots)
        self._lane = _Lane(
            link=link.address,
            slots=address,
            slot_bytes=nbytes,
            slot_count=slots,
            batches=_address(self._batches),
        )
        self._here = ctypes.addressof(self._lane)
        self._begin = 0
        self._combs: array[int]

    def wait(self, slot: int, deadline: Deadline) -> None:
        """Return when the last copy from a slot has ended."""
        self._link.reach(self._batches[slot], deadline)

    def bring(self, slot: int, copies: Sequence[Copy]) -> None:
        """Have a slot's bytes copied to their places."""
        numbers = array("q", chain.from_iterable(copies))
        driver.check(
            "copy to the GPU",
            self._library.warmcast_lane_bring(self._here, slot, _address(numbers), len(copies)),
        )

    def load(self, chunk: Chunk) -> None:
        """Take note of where the bytes of a chunk go."""
        combs = chunk.combs()
        self._combs = numbers = array("q", chain.from_iterable(combs))
        lane, self._begin = self._lane, chunk.begin
        lane.end = chunk.begin + chunk.length
        lane.combs, lane.comb_count, lane.first_comb = _address(numbers), len(combs), 0

    def pump(self, cached: tuple[int, int], sent: int, turn: int) -> tuple[int, int]:
        """Bring of that chunk what can be read at once, for a while."""
        lane, begin = self._lane, self._begin
        lane.at, lane.turn = begin + sent, turn
        error = self._library.warmcast_lane_pump(self._here, *cached, _soon())
        driver.check("copy to the GPU", error)
        return lane.at - begin, lane.turn

    def mark(self) -> int:
        """The number of the last batch with anything from the slots."""
        return max(self._batches)

    def end(self) -> None:
        """Return when all copies from the slots have ended, or will not be made."""
        error, last = _LATE, self.mark()
        while error == _LATE:
            error = self._library.warmcast_link_wait(self._link.address, last, _soon())
        if error:
            self._link.stop()


def link(stream: int) -> Link | None:
    """A link by the CUDA driver; None where the library was not built."""
    found = library()
    return None if found is None else Link(found, gpu(), stream)


def _soon() -> int:
    return time.monotonic_ns() + _SLICE


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


@cache
def library() -> Any:
    """The library; None where it was not built, or for another version of this."""
    try:
        found = ctypes.CDLL(str(LIBRARY))
        if found.warmcast_pump_layout() != _LAYOUT:
            return None
    except (OSError, AttributeError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, *arguments in (
        ("link_new", pointer, pointer, pointer, pointer),
        ("link_free", None, pointer),
        ("link_single", None, pointer),
        ("link_stop", None, pointer),
        ("link_begin", ctypes.c_int, pointer, number),
        ("link_wait", ctypes.c_int, pointer, number, number),
        ("lane_bring", ctypes.c_int, pointer, number, pointer, number),
        ("lane_pump", ctypes.c_int, pointer, ctypes.c_int, ctypes.c_int, number),
    ):
        function = getattr(found, f"warmcast_{name}")
        function.restype, function.argtypes = result, arguments
    return found


@cache
def gpu() -> Gpu:
    """The CUDA driver."""
    functions = driver.waiting()
    batches: Any = getattr(functions, "cuMemcpyBatchAsync", None)  # drivers of CUDA 12.8 and later
    return Gpu(
        *(
            ctypes.cast(function, ctypes.c_void_p)
            for function in (
                functions.cuMemcpyHtoDAsync_v2,
                functions.cuMemcpy2DAsync_v2,
                batches,
                functions.cuEventRecord,
                functions.cuEventQuery,
            )
        )
    )
