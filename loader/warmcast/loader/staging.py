"""Host memory that bytes pass through on their way to a GPU: a few pinned slots, used in turn.

Pinning costs about half a second a GiB, so slots are made when they are first needed, kept from one
load to the next, and given back when their owner is closed. They are of memory mapped for the
purpose, not of torch's pinned pool, which never gives any back.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from warmcast.loader import dma, driver, pump
from warmcast.loader.chunks import Piece
from warmcast.manifests.deadline import Deadline


class Source(Protocol):
    """What pieces are read from; part of an object's reader."""

    @property
    def cached(self) -> tuple[int, int] | None:
        """How what is in memory is read without waiting."""

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill a buffer from an offset."""


_LANE = 2
"""Slots of a lane, where there is room: one is read into while the others are copied from."""

HOST_MEMORY = 2 << 30
"""Bytes of slots at most, unless told otherwise."""


class Slot:
    """One buffer; ``view`` and ``buffer`` are its bytes, ``mark`` stands behind the copy to a GPU
    that was last begun from it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.view = memoryview(self._memory)
        self.address = self.buffer.data_ptr()
        self.mark: dma.Mark | None = None
        self._device: torch.device | None = None
        self._pinned = False

    def attach(self, device: torch.device) -> None:
        """Be copied from to a GPU, whose context is the current one.

        The slot's pages are locked, if the system lets us: copies go on by themselves then.
        """
        if not self._pinned:
            result = torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, 0)
            self._pinned = int(result) == 0
            self._copy = dma.copier(pinned=self._pinned)
        if device != self._device:
            if self.mark is not None:
                self.mark.free()
            self.mark, self._device = dma.Mark(), device

    def send(self, piece: Piece, stream: int) -> None:
        """Begin to copy the piece that was read into the slot, on a stream given by its handle."""
        copy, address, error = self._copy, self.address, 0
        for to, at, width, pitch, rows in piece.copies:
            if rows == 1:
                error = error or copy(to, address + at, width, stream)
            else:
                error = error or dma.copy_rows(to, address + at, width, pitch, rows, stream)
        mark = self.mark
        if mark is not None:
            error = mark.record(mark.event, stream) or error
        if error:
            driver.check("copy to the GPU", error)

    def wait(self) -> None:
        """Return when the last copy from the slot has ended."""
        if self.mark is not None:
            self.mark.wait()

    def free(self) -> None:
        """Unpin and unmap; nobody may use the slot any more."""
        if self.mark is not None:
            self.mark.wait()
            self.mark.free()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)
        del self.buffer
        self.view.release()
        self._memory.close()


class Lane:
    """The slots of one thread, and the stream on which it copies; None without a GPU."""

    def __init__(self, staging: Staging, lanes: int, after: torch.cuda.Event | None) -> None:
        self._staging = staging
        self._lanes = lanes
        self._slots: list[Slot] = []
        self._nbytes = 0  # of a slot
        self._missing = 0  # slots that there is room for
        self._pump: pump.Pump | None = None
        self._turn = -1  # of the slot that was given last
        self.stream = None
        self._handle = 0
        if after is not None:
            self.stream = torch.cuda.Stream()
            self.stream.wait_event(after)
            self._handle = self.stream.cuda_stream

    def send(
        self,
        pieces: Sequence[Piece],
        nbytes: int,
        source: Source,
        deadline: Deadline,
        stop: Callable[[], bool],
    ) -> bool:
        """Read pieces of at most ``nbytes``, and begin to copy each to its places; whether all."""
        self._change(nbytes)
        stream, sent, sender = self._handle, 0, None
        while sent < len(pieces):
            if stop():
                return False
            cached = source.cached
            if cached is not None and not self._missing:
                if sender is None and (sender := self._pumping()) is not None:
                    sender.load(pieces, sent)
                if sender is not None:
                    before = sent
                    sent, self._turn = sender.send(cached, self._turn)
                    if sent > before:
                        deadline.check("reading")
                        continue
            piece = pieces[sent]
            slot = self.next(nbytes, deadline)
            length = piece.nbytes
            view = slot.view if length == nbytes else slot.view[:length]
            source.read_into(piece.begin, view, deadline)
            slot.send(piece, stream)
            sent += 1
            if sender is not None:
                sender.skip()
        return True

    def _pumping(self) -> pump.Pump | None:
        """What sends without the interpreter, by the lane's slots; None where that is not built."""
        library = pump.library()
        if self._pump is None and library is not None:
            marks = [(slot.address, slot.mark) for slot in self._slots]
            events = [(at, mark.event.value or 0) for at, mark in marks if mark is not None]
            self._pump = pump.Pump(library, pump.gpu(), self._handle, events)
        return self._pump

    def next(self, nbytes: int, deadline: Deadline) -> Slot:
        """A slot of ``nbytes`` that can be read into. A lane has slots of one length at a time."""
        self._change(nbytes)
        if self._missing:
            slot = self._staging.take(nbytes, deadline, wait=not self._slots)
            if slot is not None:
                self._have([slot])
                return slot
        self._turn = turn = (self._turn + 1) % len(self._slots)
        slot = self._slots[turn]
        mark = slot.mark
        if mark is not None and mark.query(mark.event):
            mark.wait()
        return slot

    def _change(self, nbytes: int) -> None:
        """Have slots of this length from now on, at once those that are there from other loads."""
        if nbytes != self._nbytes:
            self.end()
            self._nbytes, self._missing = nbytes, self._most(nbytes)
            self._have(self._staging.left(nbytes, self._missing))

    def _have(self, slots: Sequence[Slot]) -> None:
        self._missing -= len(slots)
        self._slots += slots  # all of them, to be given back whatever becomes of the next
        if self.stream is not None:
            for slot in slots:
                slot.attach(self.stream.device)

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
        self._nbytes, self._turn, self._pump = 0, -1, None

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
    def lane(self, lanes: int, after: torch.cuda.Event | None) -> Iterator[Lane]:
        """A lane for one thread of ``lanes``.

        Copies go to the current GPU, ``after`` what may still use the memory that they go to; None
        where nothing goes to a GPU.
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

    def left(self, nbytes: int, count: int) -> Sequence[Slot]:
        """Of the slots of ``nbytes`` that nobody uses at most so many; none are made."""
        with self._changed:
            found = [slot for slot in self._free if slot.nbytes == nbytes][:count]
            for slot in found:
                self._free.remove(slot)
        return found

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
