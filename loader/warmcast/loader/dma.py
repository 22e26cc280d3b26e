"""Copies from pinned memory to a GPU, begun at the least cost: the driver, called by ctypes.

A thread that streams begins a copy every few tens of microseconds. Torch's ``copy_`` gives up the
interpreter's lock for each, and with many threads most of their time goes into getting it back;
these calls return at once, so they keep it.

Source: CUDA driver API (``cuMemcpyHtoDAsync``, ``cuMemcpy2DAsync``, events).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from warmcast.loader import driver
from warmcast.loader.chunks import Chunk, Copy
from warmcast.loader.driver import check
from warmcast.manifests.deadline import Deadline

_DISABLE_TIMING = 2


def copier(*, pinned: bool) -> Callable[[int, int, int, int], int]:
    """``cuMemcpyHtoDAsync``, from memory that is ``pinned``, or from other: that has to be read
    before the call returns, meanwhile others may have the interpreter's lock.

    It takes (to, from, bytes, stream), and gives an error, 0 if there is none.
    """
    library = driver.prompt() if pinned else driver.waiting()
    function: Callable[[int, int, int, int], int] = library.cuMemcpyHtoDAsync_v2
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


class Link:
    """A stream to a GPU; a :class:`link.Link` where there is no C library."""

    slot = 4 << 20  # with less the copy engine's pauses between copies count

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def sender(self, address: int, nbytes: int, slots: int, *, pinned: bool) -> Sender:
        """What one thread brings its bytes with."""
        return Sender(self._stream, range(address, address + slots * nbytes, nbytes), pinned=pinned)

    def begin(self, deadline: Deadline) -> None:
        """Everything does at once."""

    def reach(self, mark: int, deadline: Deadline) -> None:
        """Wait for all that was brought by anybody."""
        check("cuStreamSynchronize", driver.waiting().cuStreamSynchronize(self._stream))

    def free(self) -> None:
        """There is nothing."""


class Sender:
    """Brings pieces one by one; a :class:`link.Sender`."""

    def __init__(self, stream: int, slots: Sequence[int], *, pinned: bool) -> None:
        self._stream, self._slots = stream, slots
        self._copy = copier(pinned=pinned)
        self._marks = [Mark() for _ in slots]

    def wait(self, slot: int, deadline: Deadline) -> None:
        """Return when the last copy from a slot has ended."""
        self._marks[slot].wait()

    def bring(self, slot: int, copies: Sequence[Copy]) -> None:
        """Have a slot's bytes copied to their places."""
        address, mark, error = self._slots[slot], self._marks[slot], 0
        copy, stream = self._copy, self._stream
        for to, at, width, pitch, rows in copies:
            if rows == 1:
                error = error or copy(to, address + at, width, stream)
            else:
                error = error or copy_rows(to, address + at, width, pitch, rows, stream)
        # What was begun is marked all the same: it is waited for before the slot is freed.
        error = mark.record(mark.event, stream) or error
        if error:
            check("copy to the GPU", error)

    def load(self, chunk: Chunk) -> None:
        """Everything is brought piece by piece."""

    def pump(self, cached: tuple[int, int], sent: int, turn: int) -> tuple[int, int]:
        """Leave it to the caller."""
        return sent, turn

    def mark(self) -> int:
        """There is but one."""
        return 0

    def end(self) -> None:
        """Return when all copies from the slots have ended."""
        for mark in self._marks:
            mark.wait()
            mark.free()
