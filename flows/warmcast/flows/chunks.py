"""Reading a file in chunks by several connections, in bounded memory.

Of each chunk three things are done: *checked* where it was read, in any order; *ordered* by one
thread, in the order of the file (a hash goes front to back); *stored* beside that. Its buffer is
free again when all are done. Chunks are begun in order, so the first that is not done always has
its buffer, and what waits for it ends.

Memory: a buffer a lane, and the lanes are shared by all files that are read at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError
from warmcast.manifests.stores import ObjectReader

T = TypeVar("T")

_LOOK = 0.1  # seconds between two looks at whether the work has ended elsewhere


class Ended(WarmcastError):
    """Another chunk's failure ended this one's work; never what a caller sees."""


@dataclass(frozen=True, slots=True)
class Revocable(Deadline):
    """A deadline that is over at once when its event is set: what waits under it ends."""

    event: threading.Event

    def remaining(self) -> float:
        """Seconds left; 0 when the deadline is over, or revoked."""
        return 0.0 if self.event.is_set() else Deadline.remaining(self)

    def within(self, seconds: float) -> Revocable:
        """The earlier of this deadline and ``seconds`` from now, revoked with it."""
        return Revocable(Deadline.within(self, seconds).at, self.event)


class Lanes:
    """So many buffers, for all files that are read at once. Safe between threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._buffers: list[bytearray] = []

    @contextmanager
    def buffer(self, nbytes: int, ended: threading.Event) -> Iterator[memoryview]:
        """A buffer of ``nbytes``, when there is one; raises :class:`Ended`."""
        while not self._free.acquire(timeout=_LOOK):
            if ended.is_set():
                raise Ended("chunk")
        try:
            with self._lock:
                held = self._buffers.pop() if self._buffers else bytearray()
            if len(held) < nbytes:
                held = bytearray(nbytes)
            yield memoryview(held)[:nbytes]
            with self._lock:
                self._buffers.append(held)
        finally:
            self._free.release()


class ChunkStream(Generic[T]):
    """One file's chunks on their way, by index from 0."""

    def __init__(
        self,
        reader: ObjectReader,
        chunk_nbytes: int,
        lanes: Lanes,
        deadline: Deadline,
        *,
        checked: Callable[[int, memoryview], T],
        ordered: Callable[[int, memoryview, T], None],
        stored: Callable[[int, memoryview, T, Deadline], None],
        settled: Callable[[Deadline], None] = lambda _: None,
    ) -> None:
        """``settled`` is called after a chunk is done, before its connection begins another."""
        self._reader = reader
        self._chunk = chunk_nbytes
        self._lanes = lanes
        self._ended = threading.Event()
        self._deadline = Revocable(deadline.at, self._ended)
        self._checked, self._ordered = checked, ordered
        self._stored, self._settled = stored, settled
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[memoryview, T]] = {}
        self._first = 0  # of those that are yet to be ordered
        self._left: Iterator[int] = iter(())
        self._error: BaseException | None = None

    def run(
        self, indices: Sequence[int], first: int, connections: int, tick: Callable[[int], None]
    ) -> None:
        """Read the chunks of ``indices``, which ascend and hold all from ``first`` on.

        Those from ``first`` on are ordered. ``tick`` is called with 0 now and then, and may raise.
        Raises the first error; no thread of this stream runs any more then.
        """
        self._first = first
        self._left = iter(indices)
        last = max(indices, default=-1)
        count = min(connections, len(indices), self._lanes.count)
        if not count:
            return
        with ThreadPoolExecutor(count + 1, thread_name_prefix="warmcast-chunks") as pool:
            try:
                running = {pool.submit(self._guarded, self._order, last)}
                running |= {pool.submit(self._guarded, self._read) for _ in range(count)}
                while running:
                    _, running = wait(running, timeout=_LOOK)
                    tick(0)
            except BaseException:
                self._end(None)
                raise
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException) -> None:
        """End the stream with an error, from any thread."""
        self._end(error)

    def _guarded(self, work: Callable[..., None], *arguments: int) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 raised by run, in the caller's thread
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            if not self._ended.is_set():
                self._error = error
            self._ended.set()
            self._changed.notify_all()

    def _read(self) -> None:
        while not self._ended.is_set():
            with self._lanes.buffer(min(self._chunk, self._reader.size), self._ended) as buffer:
                with self._changed:
                    index = next(self._left, None)
                if index is None:
                    return
                offset = index * self._chunk
                view = buffer[: self._reader.size - offset]
                self._reader.read_into(offset, view, self._deadline)
                made = self._checked(index, view)
                with self._changed:
                    ordered = index >= self._first
                    if ordered:
                        self._waiting[index] = view, made
                        self._changed.notify_all()
                self._stored(index, view, made, self._deadline)
                if ordered:
                    self._wait(lambda index=index: self._first > index)  # type: ignore[misc]
            self._settled(self._deadline)

    def _order(self, last: int) -> None:
        while self._first <= last:
            self._wait(lambda: self._first in self._waiting)
            view, made = self._waiting[self._first]
            self._ordered(self._first, view, made)
            with self._changed:
                del self._waiting[self._first]
                self._first += 1
                self._changed.notify_all()

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            while not until():
                if self._ended.is_set():
                    raise Ended("chunk")
                self._deadline.check("reading chunks")
                self._changed.wait(min(_LOOK * 10, self._deadline.remaining()))
