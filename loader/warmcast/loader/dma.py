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

_DISABLE_TIMING = 2


Copy = Callable[[int, int, int, int], int]
"""(to, from, bytes, stream) -> an error, 0 if there is none."""


def copier(*, pinned: bool) -> Copy:
    """``cuMemcpyHtoDAsync``, from memory that is ``pinned``, or from other: that has to be read
    before the call returns, meanwhile others may have the interpreter's lock.
    """
    library = driver.prompt() if pinned else driver.waiting()
    function: Copy = library.cuMemcpyHtoDAsync_v2
    return function


def copy_rows(to: int, source: int, width: int, pitch: int, rows: int, stream: int) -> int:
    """Begin to copy ``rows`` pieces of ``width`` bytes, each ``pitch`` after the last, packed.

    Returns an error, 0 if there is none.
    """
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
    error: int = driver.prompt().cuMemcpy2DAsync_v2(ctypes.byref(request), stream)
    return error


class Mark:
    """A place in a stream that can be waited for; an event of the current context.

    ``event``, ``record`` (event, stream) and ``query`` (event) are for those who set and look at it
    all the time: they return 0, or else an error, which for ``query`` may be that it is not done.
    """

    def __init__(self) -> None:
        self.event = driver.Handle()
        created = driver.prompt().cuEventCreate(ctypes.byref(self.event), _DISABLE_TIMING)
        check("cuEventCreate", created)
        self.record: Callable[[driver.Handle, int], int] = driver.prompt().cuEventRecord
        self.query: Callable[[driver.Handle], int] = driver.prompt().cuEventQuery

    def wait(self) -> None:
        """Return when what stands before the mark is done."""
        if self.query(self.event):
            check("cuEventSynchronize", driver.waiting().cuEventSynchronize(self.event))

    def free(self) -> None:
        """Give the event back."""
        driver.prompt().cuEventDestroy_v2(self.event)
