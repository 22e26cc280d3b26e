"""Host memory that bytes pass through on their way to a GPU: a few pinned slots, used in turn.

Pinning costs about half a second a GiB, so slots are made when they are first needed, kept from one
load to the next, and given back when their owner is closed. They are of memory mapped for the
purpose, not of torch's pinned pool, which never gives any back.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from warmcast.loader import dma
from warmcast.manifests.deadline import Deadline

_LANE = 2
"""Slots of a lane, where there is room: one is read into while the others are copied from."""

HOST_MEMORY = 2 << 30
"""Bytes of slots at most, unless told otherwise."""


class Slot:
    """One buffer, and the copy that was last begun from it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.view = memoryview(self._memory)
        self.address = self.buffer.data_ptr()
        self._pinned = False
        self._copied: dma.Mark | None = None

    @property
    def pinned(self) -> bool:
        """Whether the slot's pages are locked, so that copies from it go on by themselves."""
        return self._pinned

    def pin(self) -> None:
        """Lock the slot's pages, if the system lets us."""
        if not self._pinned:
            result = torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, 0)
            self._pinned = int(result) == 0

    def wait(self) -> None:
        """Return when the last copy from the slot has ended."""
        if self._copied is not None:
            self._copied.wait()

    def copying(self, stream: int) -> None:
        """Copies from the slot have been begun on a stream, given by its handle."""
        if self._copied is None:
            self._copied = dma.Mark()
        self._copied.set(stream)

    def free(self) -> None:
        """Unpin and unmap; nobody may use the slot any more."""
        if self._copied is not None:
            self._copied.wait()
            self._copied.free()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)
        del self.buffer
        self.view.release()
        self._memory.close()


class Lane:
    """The slots of one thread, and the stream on which it copies; None without a GPU."""

    def __init__(self, staging: Staging, lanes: int, after: torch.cuda.Stream | None) -> None:
        self._staging = staging
        self._lanes = lanes
        self._slots: list[Slot] = []
        self._turn = 0
        self.stream = None
        if after is not None:
            self.stream = torch.cuda.Stream(after.device)
            self.stream.wait_stream(after)

    def next(self, nbytes: int, deadline: Deadline) -> Slot:
        """A slot of ``nbytes`` that can be read into. A lane has slots of one length at a time."""
        if self._slots and self._slots[0].nbytes != nbytes:
            self.end()
        if len(self._slots) < self._most(nbytes):
            slot = self._staging.take(nbytes, deadline, wait=not self._slots)
            if slot is not None:
                self._slots.append(slot)
                if self.stream is not None:
                    slot.pin()
                return slot
        slot = self._slots[self._turn % len(self._slots)]
        self._turn += 1
        slot.wait()
        return slot

    def settle(self) -> None:
        """Wait for all copies."""
        for slot in self._slots:
            slot.wait()

    def end(self) -> None:
        """Wait for all copies, and give the slots back."""
        self.settle()
        for slot in self._slots:
            self._staging.give(slot)
        self._slots.clear()

    def _most(self, nbytes: int) -> int:
        if self.stream is None:
            return 1  # what was copied from it is done with
        return max(1, min(_LANE, self._staging.nbytes // self._lanes // nbytes))


class Staging:
    """A bounded stock of slots. Safe between threads; the owner closes it."""

    def __init__(self, nbytes: int = HOST_MEMORY) -> None:
        self.nbytes = nbytes
        self._changed = threading.Condition()
        self._made = 0  # bytes
        self._free: list[Slot] = []

    @contextmanager
    def lane(self, lanes: int, after: torch.cuda.Stream | None) -> Iterator[Lane]:
        """A lane for one thread of ``lanes``.

        Copies to a GPU follow on what has been begun ``after``, which may still use the memory
        they go to; None where nothing goes to a GPU.
        """
        lane = Lane(self, lanes, after)
        try:
            yield lane
        finally:
            lane.end()

    def take(self, nbytes: int, deadline: Deadline, *, wait: bool) -> Slot | None:
        """A slot of ``nbytes``; None if there is no room and the caller does not ``wait`` for it.

        One slot is given even where that is more than the stock's bound.
        """
        with self._changed:
            while True:
                for slot in self._free:
                    if slot.nbytes == nbytes:
                        self._free.remove(slot)
                        return slot
                while self._made + nbytes > self.nbytes and self._free:
                    self._drop(self._free.pop())  # of another length
                if self._made + nbytes <= self.nbytes or not self._made:
                    break
                if not wait:
                    return None
                deadline.check("waiting for host memory")
                self._changed.wait(min(deadline.remaining(), 1.0))
            self._made += nbytes
        try:
            return Slot(nbytes)
        except BaseException:
            with self._changed:
                self._made -= nbytes
            raise

    def give(self, slot: Slot) -> None:
        """Give a slot back."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def close(self) -> None:
        """Give the memory back to the system."""
        with self._changed:
            while self._free:
                self._drop(self._free.pop())

    def _drop(self, slot: Slot) -> None:
        self._made -= slot.nbytes
        slot.free()
