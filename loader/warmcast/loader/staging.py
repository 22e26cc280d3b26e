"""Host memory that bytes pass through on their way to a GPU: a few pinned slots, used in turn.

Pinning costs about half a second a GiB, so memory is pinned when it is first needed, kept from one
load to the next, and given back when its owner is closed. It is mapped for the purpose, not of
torch's pinned pool, which never gives any back.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from warmcast.loader.chunks import Chunk, Piece
from warmcast.loader.link import Link, Sender
from warmcast.manifests.deadline import Deadline


class Source(Protocol):
    """What a chunk is read from; part of an object's reader."""

    @property
    def cached(self) -> tuple[int, int] | None:
        """How what is in memory is read without waiting."""

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill a buffer from an offset."""


_FEWEST = 2
"""Slots of a lane: one is read into while the other is copied from."""

_LANE = 3 << 20
"""Bytes of a lane, where its slots are small: those of all lanes are to stay in the processor's
cache, and to keep a GPU busy for some hundred microseconds.
"""

HOST_MEMORY = 2 << 30
"""Bytes of all slots at most, unless told otherwise."""


class Memory:
    """Some memory, the system's own pages; ``view`` and ``buffer`` are its bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.view = memoryview(self._memory)
        self.address = self.buffer.data_ptr()
        self.pinned = False

    def pin(self) -> None:
        """Lock the pages, if the system lets us: copies to a GPU go on by themselves then."""
        if not self.pinned:
            result = torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, 0)
            self.pinned = int(result) == 0

    def free(self) -> None:
        """Unpin and unmap; nobody may use the memory any more."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)
        del self.buffer
        self.view.release()
        self._memory.close()


class Slot(NamedTuple):
    """A part of a lane's memory: its number, and its bytes, twice."""

    number: int
    view: memoryview
    buffer: Tensor


class Lane:
    """The slots of one thread, and the link to the GPU that they are copied by, if there is one."""

    def __init__(self, staging: Staging, lanes: int, link: Link | None) -> None:
        self.link = link
        self._staging = staging
        self._lanes = lanes
        self._memory: Memory | None = None
        self._slots: list[Slot] = []
        self._nbytes = 0  # of a slot
        self._turn = -1  # the slot that was used last
        self._sender: Sender | None = None

    def send(
        self,
        chunk: Chunk,
        nbytes: int,
        source: Source,
        deadline: Deadline,
        stop: Callable[[], bool],
    ) -> bool:
        """Read a chunk by slots of ``nbytes``, and bring each to its places; whether all of it."""
        self._change(nbytes, deadline)
        sender, sent = self._sender, 0
        if sender is None:
            raise RuntimeError("there is no GPU to send to")
        pieces: list[Piece] = []
        sender.load(chunk)
        while sent < chunk.length:
            if stop():
                return False
            cached = source.cached
            if cached is not None:
                before = sent
                sent, self._turn = sender.pump(cached, sent, self._turn)
                if sent > before:
                    deadline.check("reading")
                    continue
            pieces = pieces or chunk.pieces(nbytes)
            begin, length, copies = pieces[sent // nbytes]
            slot = self.next(nbytes, deadline)
            source.read_into(begin, slot.view[:length], deadline)
            sender.bring(slot.number, copies)
            sent += length
        return True

    def next(self, nbytes: int, deadline: Deadline) -> Slot:
        """A slot of ``nbytes`` that can be read into. A lane has slots of one length at a time."""
        self._change(nbytes, deadline)
        self._turn = turn = (self._turn + 1) % len(self._slots)
        if self._sender is not None:
            self._sender.wait(turn, deadline)
        return self._slots[turn]

    def _change(self, nbytes: int, deadline: Deadline) -> None:
        """Have slots of this length from now on."""
        if nbytes == self._nbytes:
            return
        self.end()
        count = self._most(nbytes)
        self._memory = memory = self._staging.take(count * nbytes, deadline)
        if self.link is not None:
            memory.pin()
            self._sender = self.link.sender(memory.address, nbytes, count, pinned=memory.pinned)
        self._slots = [
            Slot(number, memory.view[at : at + nbytes], memory.buffer[at : at + nbytes])
            for number, at in enumerate(range(0, memory.nbytes, nbytes))
        ]
        self._nbytes = nbytes

    def mark(self) -> int:
        """What the link reaches when all that was sent has been copied."""
        return 0 if self._sender is None else self._sender.mark()

    def end(self) -> None:
        """Wait for all copies, and give the memory back."""
        if self._sender is not None:
            self._sender.end()
            self._sender = None
        for slot in self._slots:
            slot.view.release()
        self._slots.clear()
        if self._memory is not None:
            self._staging.give(self._memory)
            self._memory = None
        self._nbytes, self._turn = 0, -1

    def _most(self, nbytes: int) -> int:
        if self.link is None:
            return 1  # what was copied from it is done with
        return max(
            1, min(max(_FEWEST, _LANE // nbytes), self._staging.nbytes // self._lanes // nbytes)
        )


class Staging:
    """A bounded stock of memory. Safe between threads; the owner closes it."""

    def __init__(self, nbytes: int = HOST_MEMORY) -> None:
        self.nbytes = nbytes
        self._changed = threading.Condition()
        self._made = 0  # bytes
        self._free: list[Memory] = []

    @contextmanager
    def lane(self, lanes: int, link: Link | None) -> Iterator[Lane]:
        """A lane for one thread of ``lanes``; its bytes go by the link, if they go to a GPU."""
        lane = Lane(self, lanes, link)
        try:
            yield lane
        finally:
            lane.end()

    def take(self, nbytes: int, deadline: Deadline) -> Memory:
        """Memory of ``nbytes``, when there is room; alone even more than the stock's bound."""
        with self._changed:
            while True:
                for memory in self._free:
                    if memory.nbytes == nbytes:
                        self._free.remove(memory)
                        return memory
                while self._made + nbytes > self.nbytes and self._free:
                    self._drop(self._free.pop())  # of another length
                if self._made + nbytes <= self.nbytes or not self._made:
                    break
                deadline.check("waiting for host memory")
                self._changed.wait(min(deadline.remaining(), 1.0))
            self._made += nbytes
        try:
            return Memory(nbytes)
        except BaseException:
            with self._changed:
                self._made -= nbytes
            raise

    def give(self, memory: Memory) -> None:
        """Give memory back."""
        with self._changed:
            self._free.append(memory)
            self._changed.notify()

    def close(self) -> None:
        """Give all of it back to the system."""
        with self._changed:
            while self._free:
                self._drop(self._free.pop())

    def _drop(self, memory: Memory) -> None:
        self._made -= memory.nbytes
        memory.free()
