"""``pump.c``: pieces of a file from the page cache to a GPU, without the interpreter.

It is built when Warmcast is installed, where there is a C compiler; without it Python does the
same, as fast where processors are not shared.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from warmcast.loader import driver
from warmcast.loader.chunks import Piece

LIBRARY = Path(__file__).with_name("_pump.so")
"""Where it is built."""

_LAYOUT = 1  # of the structures: pump.c has the same
_SLICE = 50_000_000
"""Nanoseconds for which a call goes on: then somebody may want it to end."""


class Gpu(ctypes.Structure):
    """The driver's functions; ``struct gpu``."""

    _fields_ = (
        ("copy", ctypes.c_void_p),
        ("copy_rows", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
        ("synchronize", ctypes.c_void_p),
    )


class _Pump(ctypes.Structure):
    """``struct pump``."""

    _fields_ = (
        ("gpu", Gpu),
        ("stream", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_count", ctypes.c_int64),
        ("turn", ctypes.c_int64),
        ("pieces", ctypes.c_void_p),
        ("piece_count", ctypes.c_int64),
        ("copies", ctypes.c_void_p),
        ("next_piece", ctypes.c_int64),
        ("next_copy", ctypes.c_int64),
    )


class Pump:
    """Sends pieces through some slots, on one stream, in one thread.

    ``slots`` are (address, event) of each, ``turn`` is the one that was used last. Pieces are given
    by :meth:`load`, and sent by :meth:`send`, from ``next`` on.
    """

    def __init__(self, library: Any, gpu: Gpu, stream: int, slots: Iterable[tuple[int, int]]):
        self._call = library.warmcast_pump
        self._slots = array("q", chain.from_iterable(slots))
        self._pump = _Pump(
            gpu=gpu, stream=stream, slots=_address(self._slots), slot_count=len(self._slots) // 2
        )
        self._arrays: tuple[array[int], array[int]]

    def load(self, pieces: Sequence[Piece], first: int) -> None:
        """Take these pieces of a file, to send those from the ``first`` on."""
        self._arrays = numbers, copies = (
            array("q", chain.from_iterable((p.begin, p.nbytes, len(p.copies)) for p in pieces)),
            array("q", chain.from_iterable(chain.from_iterable(p.copies for p in pieces))),
        )
        pump = self._pump
        pump.pieces, pump.piece_count, pump.next_piece = _address(numbers), len(pieces), 0
        pump.copies, pump.next_copy = _address(copies), 0
        for _ in range(first):
            self.skip()

    def send(self, cached: tuple[int, int], turn: int) -> tuple[int, int]:
        """Send what can be read at once by a descriptor and ``preadv2``'s flags, for a while.

        Gives the number of the first piece that was not sent, and the slot that was used last.
        """
        pump = self._pump
        pump.turn = turn
        error = self._call(ctypes.byref(pump), *cached, time.monotonic_ns() + _SLICE)
        driver.check("copy to the GPU", error)
        return pump.next_piece, pump.turn

    def skip(self) -> None:
        """Leave out the next piece: somebody else has sent it."""
        self._pump.next_copy += self._arrays[0][3 * self._pump.next_piece + 2]
        self._pump.next_piece += 1


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
    found.warmcast_pump.argtypes = (
        ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    )  # fmt: skip
    found.warmcast_pump.restype = ctypes.c_int
    return found


@cache
def gpu() -> Gpu:
    """The CUDA driver."""
    functions = driver.waiting()
    return Gpu(
        *(
            ctypes.cast(functions[name], ctypes.c_void_p)
            for name in (
                "cuMemcpyHtoDAsync_v2",
                "cuMemcpy2DAsync_v2",
                "cuEventRecord",
                "cuEventSynchronize",
            )
        )
    )
