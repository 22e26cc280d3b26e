"""Storage to device: an origin's blobs, read by checked chunks, copied to their place.

A few threads each take the next chunk of the manifest, in load order, and bring it over piece by
piece: a piece is read into a slot of pinned memory (see :mod:`staging`), its CRC32C taken while it
is in the processor's cache, and copied to its place, while the next is read. Where the place is in
host memory, and all of the piece belongs there, it is read there at once. So reading, checking and
copying go on together, and host memory is bounded whatever the model's size.

A chunk whose CRC32C is wrong is read once more; if it fails again the load ends, naming file and
offset. Chunks that hold nothing this rank wants are not read, and of those that it wants little of
only that part is, which cannot be checked before the tensor is. Nor are chunks that come from this
machine's own files on their way to a GPU: the GPU checks all that it holds in a few milliseconds,
the processor would take longer for that than for reading. Where tensors turn out wrong then, the
load is done once more, ``careful``: by whole chunks, each checked.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, Protocol

import torch

from warmcast.loader.ahead import Ahead
from warmcast.loader.chunks import Chunk, Incoming, chunks_of, joined
from warmcast.loader.containers import host_view
from warmcast.loader.cuda_context import current
from warmcast.loader.link import Link, linked
from warmcast.loader.plan import Targets
from warmcast.loader.staging import Lane, Source, Staging
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, StoreError, WarmcastError
from warmcast.manifests.manifest import FileEntry, Manifest
from warmcast.manifests.stores import ObjectReader

_PIECE = 4 << 20
"""Bytes that are read at a time, unless the link or a store wants others; and those of the parts
that a thread takes where it does not take whole chunks.
"""

_RUN = 4
"""Chunks that a thread takes at a time, where there are many."""

_THREADS = 14
"""Threads at most: what a PCIe link of 55 GB/s takes from the page cache."""

_FEWEST = 8
"""Threads at least: a disk wants to be asked for several things at once."""

_LAST = 0.15
"""The part of the bytes that are checked on the GPU only when all is there."""


class BlobSource(Protocol):
    """Where blobs are opened: the origin, or what stands before it."""

    @property
    def url(self) -> str:
        """Its name in errors."""

    def open_blob(self, sha256: str, deadline: Deadline) -> ObjectReader:
        """Open a blob, to read many ranges of it; the bytes are not checked there."""


def stream(
    origin: BlobSource,
    manifest: Manifest,
    targets: Targets,
    staging: Staging,
    deadline: Deadline,
    *,
    careful: bool = False,
    order: Sequence[int] | None = None,
    arrived: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Fill every target from the origin; the bytes that were read.

    ``order`` gives the numbers of the plan's placements in the order in which they are to come;
    ``arrived`` is told of each when its bytes are there, from any thread; ``stop`` ends the stream.
    Raises :class:`IntegrityError`, :class:`StoreError` or :class:`DeadlineExceeded`; the targets
    are then worth nothing. No thread outlives the call.
    """
    incoming = [
        tensor
        for number in (range(len(targets.tensors)) if order is None else order)
        if (tensor := Incoming.of(targets, number)) is not None
    ]
    for tensor in incoming:
        if not tensor.left and arrived is not None:
            arrived(tensor.number)
    if not incoming:
        return 0
    with _Blobs(origin) as blobs:
        device = targets.tensors[0].device
        streaming = _Streaming(
            blobs, staging, device, deadline, arrived, stop or threading.Event(), careful=careful
        )
        chunks = chunks_of(manifest, incoming, careful=careful)
        if device.type != "cuda" or arrived is not None or careful:
            return streaming.run(chunks)
        ahead = Ahead(targets.tensors)
        streaming.check_ahead(ahead, sum(tensor.left for tensor in incoming))
        try:
            return streaming.run(chunks)
        finally:
            targets.crc32cs.update(ahead.end())


class _Blobs:
    """The files' blobs, each opened when it is first read from."""

    def __init__(self, origin: BlobSource) -> None:
        self.url = origin.url
        self._origin = origin
        self._lock = threading.Lock()
        self._readers: dict[str, ObjectReader] = {}

    def __enter__(self) -> _Blobs:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()

    def reader(self, file: FileEntry, deadline: Deadline) -> ObjectReader:
        """The reader of a file's blob; raises :class:`StoreError` for one of another size."""
        with self._lock:
            reader = self._readers.get(file.sha256)
            if reader is None:
                reader = self._origin.open_blob(file.sha256, deadline)
                if reader.size != file.size:
                    reader.close()  # kept, it would be another thread's, unchecked
                    raise StoreError(
                        f"{file.path} (blob {file.sha256[:12]} of {self.url})",
                        expected=f"{file.size} bytes",
                        found=f"{reader.size}",
                        do="run `warmcast verify`, then deploy again",
                    )
                self._readers[file.sha256] = reader
            return reader


class _Streaming:
    """One stream: threads that each take the next chunk until none is left, or one fails."""

    def __init__(
        self,
        blobs: _Blobs,
        staging: Staging,
        device: torch.device,
        deadline: Deadline,
        arrived: Callable[[int], None] | None,
        stop: threading.Event,
        *,
        careful: bool,
    ) -> None:
        self._arrived = arrived
        self._blobs = blobs
        self._careful = careful
        self._staging = staging
        self._device = device
        self._deadline = deadline
        self._gpu = device.type == "cuda"
        self._next = threading.Lock()
        self._stop = stop
        self._counting = threading.Lock()
        self._read = 0
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._piece = _PIECE
        self._most = 1  # threads
        self._runs: Iterator[Sequence[Chunk]] = iter(())
        self._stream: torch.cuda.Stream | None = None
        self._link: Link | None = None
        self._ahead: Ahead | None = None
        self._there: list[int] = []
        self._coming = self._enough = 0  # bytes: that are not there, of which few enough are not

    def check_ahead(self, ahead: Ahead, nbytes: int) -> None:
        """Have what is there checked when most of ``nbytes`` is."""
        self._ahead, self._coming, self._enough = ahead, nbytes, int(_LAST * nbytes)

    def run(self, chunks: Iterator[Chunk]) -> int:
        """Bring all chunks over; the bytes that were read."""
        with ExitStack() as stack:
            if self._gpu:
                stack.enter_context(current(self._device))
                self._stream = torch.cuda.Stream()
                # What is there may still use the memory that the bytes go to.
                self._stream.wait_stream(torch.cuda.current_stream())
                self._link = stack.enter_context(linked(self._stream.cuda_stream))
                self._piece = self._link.slot
            self._most = max(1, min(_threads(), self._staging.nbytes // self._piece))
            self._runs = self._shared_out(chunks, self._most)
            try:
                self._start(0)
                self._join()
            except BaseException:
                self._stop.set()
                raise
            finally:
                self._join()
                # A generator that has not come to its end holds us and all tensors, and we hold it:
                # only Python's collector would free them, which counts objects and not their bytes.
                self._runs = iter(())
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise WarmcastError("the load was given up")
        return self._read

    def _start(self, number: int) -> None:
        """Start a thread, if there may be so many."""
        if number < self._most:
            name = f"warmcast-stream-{number}"
            thread = threading.Thread(target=self._work, args=(number,), name=name)
            self._threads.append(thread)
            thread.start()

    def _join(self) -> None:
        """Wait for all threads: each is listed behind the one that started it."""
        for thread in self._threads:
            if thread.ident is not None:  # it could be started
                thread.join()

    def _shared_out(self, chunks: Iterator[Chunk], threads: int) -> Iterator[Sequence[Chunk]]:
        """What a thread takes at a time: a run of chunks, for a disk is best read in long runs.

        Towards the end single ones, and the last in parts where they need not be checked whole:
        no thread is to be idle while others still have a long way to go. Single ones too where
        somebody waits for them to arrive, and the first in parts: all threads bring those at once.
        """
        run = _RUN if self._arrived is None else 1
        if self._arrived is not None:
            for chunk in islice(chunks, threads):
                yield from ([part] for part in self._parts(chunk))
        waiting: deque[Chunk] = deque()
        while True:
            waiting.extend(islice(chunks, run * (threads + 1) - len(waiting)))
            if len(waiting) <= run * threads:
                break
            yield [waiting.popleft() for _ in range(run)]
        while len(waiting) > threads:
            yield [waiting.popleft()]
        for chunk in waiting:
            yield from ([part] for part in self._parts(chunk))

    def _parts(self, chunk: Chunk) -> Iterator[Chunk]:
        if not self._checked_later(self._blobs.reader(chunk.file, self._deadline)):
            yield chunk
            return
        end = chunk.begin + chunk.length
        for begin in range(chunk.begin, end, _PIECE):
            length = min(_PIECE, end - begin)
            yield replace(chunk, begin=begin, length=length, crc32c=None)

    def _work(self, number: int) -> None:
        """What a thread does; the first error is everybody's."""
        try:
            with current(self._device) if self._gpu else nullcontext():
                if not (parts := self._take()):
                    return
                # Starting one takes as long as reading some megabytes: so they start each other.
                self._start(2 * number + 1)
                self._start(2 * number + 2)
                with self._staging.lane(self._most, self._link) as lane:
                    self._bring_all(parts, lane)
        except BaseException as cause:  # noqa: BLE001  (raised in the thread that waits)
            # Any other would be held by its own frames, and they hold slots.
            with self._counting:
                self._error = self._error or cause
            self._stop.set()

    def _bring_all(self, parts: Sequence[_LaidOut], lane: Lane) -> None:
        """Bring these parts, and then others until none is left."""
        brought: deque[tuple[Chunk, int]] = deque()
        while parts:
            for part in parts:
                if self._stop.is_set() or not self._bring(part, lane):
                    return
                brought.append((part.chunk, lane.mark()))
                # Who is to be told of arrivals has to wait for the copies: those of the chunk
                # before have mostly ended by now.
                if self._arrived is None or len(brought) > 1:
                    self._count(*brought.popleft())
            parts = self._take()
        while brought:
            self._count(*brought.popleft())

    def _count(self, chunk: Chunk, mark: int) -> None:
        """Count what has come of each tensor; one of which all has come is done with.

        ``mark`` is behind the copies of the chunk.
        """
        if self._arrived is not None and self._link is not None:
            self._link.reach(mark, self._deadline)
        with self._counting:
            self._read += chunk.length
        for tensor in chunk.incoming:
            came = tensor.came(chunk.begin, chunk.length)
            with self._counting:
                tensor.left -= came
                whole = came > 0 and not tensor.left  # a part of a chunk may have nothing of it
            if whole and tensor.lay_out is not None:
                self._lay_out(tensor.lay_out)
            if whole and self._arrived is not None:
                self._arrived(tensor.number)
            if whole and tensor.lay_out is None:
                self._check_if_enough(tensor)

    def _check_if_enough(self, tensor: Incoming) -> None:
        """Have the GPU check what is there when little is left: that takes it no time then."""
        with self._counting:
            self._there.append(tensor.number)
            self._coming -= tensor.comb.target.nbytes
            if self._ahead is None or self._coming > self._enough:
                return
            ahead, self._ahead = self._ahead, None
        if self._link is not None and self._stream is not None:
            self._link.begin(self._deadline)  # all that is counted
            ahead.begin(self._there.copy(), self._stream)

    def _lay_out(self, lay_out: Callable[[], None]) -> None:
        """Bring a tensor that was read aside to its place, when all threads' copies have ended."""
        if self._link is None:
            lay_out()
            return
        self._link.begin(self._deadline)
        torch.cuda.synchronize(self._device)
        lay_out()
        torch.cuda.synchronize(self._device)

    def _take(self) -> Sequence[_LaidOut]:
        """What a thread is to do next; nothing, if that was all."""
        if self._stop.is_set():
            return ()
        with self._next:
            run = next(self._runs, ())
        return self._laid_out(run)

    def _laid_out(self, run: Sequence[Chunk]) -> Sequence[_LaidOut]:
        """A run of chunks, each with who reads it, and the bytes of its slots."""
        readers = [self._blobs.reader(chunk.file, self._deadline) for chunk in run]
        if all(map(self._checked_later, readers)):
            run = list(joined(run))
            readers = [self._blobs.reader(chunk.file, self._deadline) for chunk in run]
        return [
            _LaidOut(chunk, reader, max(self._piece, reader.step))
            for chunk, reader in zip(run, readers, strict=True)
        ]

    def _bring(self, part: _LaidOut, lane: Lane) -> bool:
        """Bring what was laid out to its places; False if somebody wants it to end before."""
        chunk, reader = part.chunk, part.reader
        expected = None if self._checked_later(reader) else chunk.crc32c
        found = ""
        for last in (False, True):
            if last and lane.link is not None:
                # Two copies to one place may be in one batch, which keeps no order.
                lane.link.reach(lane.mark(), self._deadline)
            checked = _Checked(reader)
            source = reader if expected is None else checked
            try:
                if lane.link is None:
                    self._fill(part, source, lane)
                elif not lane.send(chunk, part.nbytes, source, self._deadline, self._stop.is_set):
                    return False
            except StoreError:
                if last:
                    raise
                continue
            found = to_hex(checked.crc)
            if expected in (None, found):
                return True
        raise IntegrityError(
            f"{chunk.file.path} at byte {chunk.begin} "
            f"(blob {chunk.file.sha256[:12]} of {self._blobs.url})",
            expected=f"{chunk.length} bytes with CRC32C {expected}",
            found=f"{found}, twice",
            do="run `warmcast verify`, then deploy again",
        )

    def _checked_later(self, reader: ObjectReader) -> bool:
        """Whether checking here would cost more than it saves: the GPU checks what it holds."""
        return self._gpu and reader.local and not self._careful

    def _fill(self, part: _LaidOut, source: Source, lane: Lane) -> None:
        """Bring a chunk's bytes to their places in host memory."""
        combs = [tensor.comb for tensor in part.chunk.incoming]
        for begin, nbytes, _ in part.chunk.pieces(part.nbytes):
            places = (comb.solid(begin, nbytes) for comb in combs)
            place = next((place for place in places if place is not None), None)
            if place is not None:  # all of the piece belongs there
                source.read_into(begin, host_view(place), self._deadline)
                continue
            slot = lane.next(part.nbytes, self._deadline)
            source.read_into(begin, slot.view[:nbytes], self._deadline)
            for comb in combs:
                comb.copy(slot.buffer[:nbytes], begin)


class _LaidOut(NamedTuple):
    """A chunk, who reads it, and by slots of how many bytes."""

    chunk: Chunk
    reader: ObjectReader
    nbytes: int


class _Checked:
    """Reads as a reader does, and takes the CRC32C of all that it reads."""

    cached = None  # all has to be looked at

    def __init__(self, reader: ObjectReader) -> None:
        self.crc = 0
        self._reader = reader

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer``, by steps that are still in the processor's cache when they are read."""
        step = self._reader.step
        for at in range(0, len(buffer), step):
            part = buffer[at : at + step]
            self._reader.read_into(offset + at, part, deadline)
            self.crc = crc32c(part, self.crc)


def _threads() -> int:
    return max(_FEWEST, min(_THREADS, os.cpu_count() or 1))
