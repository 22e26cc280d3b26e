"""Copies from pinned memory to a GPU, begun at the least cost: the driver, called by ctypes.

A thread that streams begins a copy every few tens of microseconds. Torch's ``copy_`` gives up the
interpreter's lock for each, and with many threads most of their time goes into getting it back;
these calls return at once, so they keep it.

Source: CUDA driver API (``cuMemcpyHtoDAsync``, ``cuMemcpy2DAsync``, events).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from warmcast.loader import driver
from warmcast.loader.driver import check

_NOT_READY = 600
_DISABLE_TIMING = 2


def copier() -> Callable[[int, int, int, int], int]:
    """``cuMemcpyHtoDAsync``: (to, pinned source, bytes, stream) -> an error, 0 if there is none.

    As bare as this because a thread that streams spends its time here.
    """
    function: Callable[[int, int, int, int], int] = driver.prompt().cuMemcpyHtoDAsync_v2
    return function


def copy_rows(to: int, source: int, width: int, pitch: int, rows: int, stream: int) -> None:
    """Begin to copy ``rows`` pieces of ``width`` bytes, each ``pitch`` after the last, packed."""
    request = driver.Rows(
        src_type=driver.HOST,
        src_host=source,
        src_pitch=pitch,
        dst_type=driver.DEVICE,
        dst_device=to,
        dst_pitch=width,
        width=width,
        height=rows,
    )
    check(
        "cuMemcpy2DAsync",
        driver.prompt().cuMemcpy2DAsync_v2(ctypes.byref(request), stream),
    )


class Mark:
    """A place in a stream that can be waited for; an event of the current context."""

    def __init__(self) -> None:
        self._event = driver.Handle()
        created = driver.prompt().cuEventCreate(ctypes.byref(self._event), _DISABLE_TIMING)
        check("cuEventCreate", created)
        self._record = driver.prompt().cuEventRecord
        self._query = driver.prompt().cuEventQuery

    def set(self, stream: int) -> None:
        """Move the mark behind what was begun on the stream."""
        if error := self._record(self._event, stream):
            check("cuEventRecord", error)

    def wait(self) -> None:
        """Return when what stands before the mark is done."""
        state = self._query(self._event)
        if state == _NOT_READY:
            state = driver.waiting().cuEventSynchronize(self._event)
        if state:
            check("cuEventSynchronize", state)

    def free(self) -> None:
        """Give the event back."""
        driver.prompt().cuEventDestroy_v2(self._event)
