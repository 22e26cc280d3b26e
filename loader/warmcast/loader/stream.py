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
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from warmcast.loader import dma, driver
from warmcast.loader.ahead import Ahead
from warmcast.loader.combs import Comb
from warmcast.loader.containers import flat_bytes, host_view
from warmcast.loader.cuda_context import current
from warmcast.loader.plan import Targets
from warmcast.loader.staging import Lane, Slot, Staging
from warmcast.manifests.checksum import crc32c_at, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, StoreError, WarmcastError
from warmcast.manifests.manifest import FileEntry, Manifest
from warmcast.manifests.stores import ObjectReader

_PIECE = 6 << 20
"""Bytes that are copied at once; more, where a store is better asked for more.

With less the threads wait for the interpreter's lock, with more the slots of all of them do not
stay in the processor's cache.
"""

_RUN = 4
"""Chunks that a thread takes at a time, where there are many."""

_PART = 0.75
"""The part of a chunk's bytes beneath which only what is wanted of it is read."""

_THREADS = 12
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


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What is read of one chunk of a file, and the combs that lie (partly) in it.

    ``crc32c`` is None where that is not all of the chunk.
    """

    file: FileEntry
    begin: int
    length: int
    crc32c: str | None
    pieces: Sequence[_Piece]

    @property
    def combs(self) -> list[Comb]:
        """The combs alone."""
        return [piece.comb for piece in self.pieces]


@dataclass(slots=True)
class _Piece:
    """One tensor's bytes: its number in the plan, where they are and go, and how many are left.

    ``lay_out`` brings what was read aside to its place.
    """

    number: int
    path: str
    comb: Comb
    left: int
    lay_out: Callable[[], None] | None


@dataclass(slots=True)
class _Wanted:
    """The pieces of one chunk, in load order, and the span that they want of it."""

    begin: int
    end: int
    pieces: list[_Piece] = field(default_factory=list)


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
    pieces = [
        piece
        for number in (range(len(targets.tensors)) if order is None else order)
        if (piece := _piece(targets, number)) is not None
    ]
    for piece in pieces:
        if not piece.left and arrived is not None:
            arrived(piece.number)
    if not pieces:
        return 0
    with _Blobs(origin) as blobs:
        device = targets.tensors[0].device
        streaming = _Streaming(
            blobs, staging, device, deadline, arrived, stop or threading.Event(), careful=careful
        )
        chunks = _chunks(manifest, pieces, careful=careful)
        if device.type != "cuda" or arrived is not None or careful:
            return streaming.run(chunks)
        ahead = Ahead(targets.tensors)
        streaming.check_ahead(ahead, sum(piece.left for piece in pieces))
        try:
            return streaming.run(chunks)
        finally:
            targets.crc32cs.update(ahead.end())


def _piece(targets: Targets, number: int) -> _Piece | None:
    """What is to be read for one placement; None for weights that no file has."""
    placement, tensor = targets.plan.placements[number], targets.tensors[number]
    if placement.entry is None:
        return None
    target, lay_out = tensor, None
    if not tensor.is_contiguous():
        # Read aside on the device, and laid out as it should be when all is there.
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        lay_out = partial(_copy_over, tensor, target)
    comb = Comb.of(placement.entry, placement.slice, flat_bytes(target))
    return _Piece(number, placement.entry.file, comb, target.nbytes, lay_out)


def _copy_over(tensor: Tensor, source: Tensor) -> None:
    tensor.copy_(source)


def _chunks(manifest: Manifest, pieces: Sequence[_Piece], *, careful: bool) -> Iterator[_Chunk]:
    """What to read, in load order: that of the first piece which needs each chunk."""
    size = manifest.chunk_size
    wanted: dict[tuple[str, int], _Wanted] = {}
    for piece in pieces:
        comb = piece.comb
        if comb.first == comb.end:
            continue
        for number in range(comb.first // size, -(-comb.end // size)):
            begin, end = max(comb.first, number * size), min(comb.end, (number + 1) * size)
            span = wanted.setdefault((piece.path, number), _Wanted(begin, end))
            span.begin, span.end = min(span.begin, begin), max(span.end, end)
            span.pieces.append(piece)
    for (path, number), span in wanted.items():
        file = manifest.file[path]
        begin = number * size
        length = min(size, file.size - begin)
        if careful or span.end - span.begin > _PART * length:
            yield _Chunk(file, begin, length, file.chunks[number], span.pieces)
        else:
            yield _Chunk(file, span.begin, span.end - span.begin, None, span.pieces)


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
        gpu = device.type == "cuda"
        self._after = torch.cuda.current_stream(device) if gpu else None
        self._next = threading.Lock()
        self._stop = stop
        self._counting = threading.Lock()
        self._streams: list[torch.cuda.Stream] = []  # of all threads
        self._ahead: Ahead | None = None
        self._there: list[int] = []
        self._coming = self._enough = 0  # bytes: that are not there, of which few enough are not

    def check_ahead(self, ahead: Ahead, nbytes: int) -> None:
        """Have what is there checked when most of ``nbytes`` is."""
        self._ahead, self._coming, self._enough = ahead, nbytes, int(_LAST * nbytes)

    def run(self, chunks: Iterator[_Chunk]) -> int:
        """Bring all chunks over; the bytes that were read."""
        count = max(1, min(_threads(), self._staging.nbytes // _PIECE))
        with ThreadPoolExecutor(count, thread_name_prefix="warmcast-stream") as pool:
            runs = self._shared_out(chunks, count)
            futures = [pool.submit(self._work, runs, count) for _ in range(count)]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            stopped = self._stop.is_set()
            self._stop.set()
            failed = [future for future in done if future.exception() is not None]
        read = sum(future.result() for future in failed or futures)
        if stopped:
            raise WarmcastError("the load was given up")
        return read

    def _shared_out(self, chunks: Iterator[_Chunk], threads: int) -> Iterator[Sequence[_Chunk]]:
        """What a thread takes at a time: a run of chunks, for a disk is best read in long runs.

        Towards the end single ones, and the last in parts where they need not be checked whole:
        no thread is to be idle while others still have a long way to go. Single ones too where
        somebody waits for the first to arrive.
        """
        run = _RUN if self._arrived is None else 1
        waiting: deque[_Chunk] = deque()
        while True:
            waiting.extend(islice(chunks, run * (threads + 1) - len(waiting)))
            if len(waiting) <= run * threads:
                break
            yield [waiting.popleft() for _ in range(run)]
        while len(waiting) > threads:
            yield [waiting.popleft()]
        for chunk in waiting:
            yield from ([part] for part in self._parts(chunk))

    def _parts(self, chunk: _Chunk) -> Iterator[_Chunk]:
        if not self._checked_later(self._blobs.reader(chunk.file, self._deadline)):
            yield chunk
            return
        end = chunk.begin + chunk.length
        for begin in range(chunk.begin, end, _PIECE):
            length = min(_PIECE, end - begin)
            yield replace(chunk, begin=begin, length=length, crc32c=None)

    def _work(self, runs: Iterator[Sequence[_Chunk]], lanes: int) -> int:
        read = 0
        with ExitStack() as stack:
            if self._after is not None:
                stack.enter_context(current(self._device))
            lane = stack.enter_context(self._staging.lane(lanes, self._after))
            if lane.stream is not None:
                self._streams.append(lane.stream)
            while (run := self._take(runs)) is not None:
                for chunk in run:
                    if self._stop.is_set():
                        break
                    self._bring(chunk, lane)
                    read += chunk.length
                    self._count(chunk, lane)
        return read

    def _count(self, chunk: _Chunk, lane: Lane) -> None:
        """Count what has come of each tensor; one of which all has come is done with."""
        if self._arrived is not None:
            lane.settle()  # what was begun has to have ended before anybody is told of it
        for piece in chunk.pieces:
            came = sum(m.rows * m.width for m in piece.comb.moves(chunk.begin, chunk.length))
            with self._counting:
                piece.left -= came
                whole = came > 0 and not piece.left  # a part of a chunk may have nothing of it
            if whole and piece.lay_out is not None:
                self._lay_out(piece.lay_out, lane)
            if whole and self._arrived is not None:
                self._arrived(piece.number)
            if whole and piece.lay_out is None:
                self._check_if_enough(piece)

    def _check_if_enough(self, piece: _Piece) -> None:
        """Have the GPU check what is there when little is left: that takes it no time then."""
        with self._counting:
            self._there.append(piece.number)
            self._coming -= piece.comb.target.nbytes
            if self._ahead is None or self._coming > self._enough:
                return
            ahead, self._ahead = self._ahead, None
        # Copies have been begun of all that is counted, each on its thread's stream.
        ahead.begin(self._there.copy(), self._streams.copy())

    def _lay_out(self, lay_out: Callable[[], None], lane: Lane) -> None:
        """Bring a tensor that was read aside to its place, when all threads' copies have ended."""
        if lane.stream is None:
            lay_out()
            return
        torch.cuda.synchronize(self._device)
        lay_out()
        torch.cuda.synchronize(self._device)

    def _take(self, runs: Iterator[Sequence[_Chunk]]) -> Sequence[_Chunk] | None:
        if self._stop.is_set():
            return None
        with self._next:
            return next(runs, None)

    def _bring(self, chunk: _Chunk, lane: Lane) -> None:
        reader = self._blobs.reader(chunk.file, self._deadline)
        expected = None if self._checked_later(reader) else chunk.crc32c
        found = ""
        for last in (False, True):
            try:
                found = to_hex(self._copied(chunk, reader, lane, check=expected is not None))
            except StoreError:
                if last:
                    raise
                continue
            if expected in (None, found):
                return
        raise IntegrityError(
            f"{chunk.file.path} at byte {chunk.begin} "
            f"(blob {chunk.file.sha256[:12]} of {self._blobs.url})",
            expected=f"{chunk.length} bytes with CRC32C {expected}",
            found=f"{found}, twice",
            do="run `warmcast verify`, then deploy again",
        )

    def _checked_later(self, reader: ObjectReader) -> bool:
        """Whether checking here would cost more than it saves: the GPU checks what it holds."""
        return self._after is not None and reader.local and not self._careful

    def _copied(self, chunk: _Chunk, reader: ObjectReader, lane: Lane, *, check: bool) -> int:
        """Bring a chunk's bytes to their places; their CRC32C, if it is wanted."""
        crc = 0
        size = max(_PIECE, reader.step)
        for begin in range(chunk.begin, chunk.begin + chunk.length, size):
            length = min(size, chunk.begin + chunk.length - begin)
            place = self._place(chunk, begin, length)
            if place is not None:
                crc = self._read(reader, begin, host_view(place), place.data_ptr(), crc)
                continue
            slot = lane.next(size, self._deadline)
            if check:
                crc = self._read(reader, begin, slot.view[:length], slot.address, crc)
            else:
                reader.read_into(begin, slot.view[:length], self._deadline)
            if lane.stream is not None and slot.pinned:
                _send(chunk.combs, slot, begin, length, lane.stream.cuda_stream)
            else:
                for comb in chunk.combs:
                    comb.copy(slot.buffer[:length], begin)
        return crc

    def _place(self, chunk: _Chunk, begin: int, length: int) -> Tensor | None:
        """Where a piece can be read to at once: host memory that all of it belongs in."""
        if self._device.type != "cpu":
            return None
        places = (comb.solid(begin, length) for comb in chunk.combs)
        return next((place for place in places if place is not None), None)

    def _read(
        self, reader: ObjectReader, begin: int, view: memoryview, address: int, crc: int
    ) -> int:
        for at in range(0, len(view), reader.step):
            piece = view[at : at + reader.step]
            reader.read_into(begin + at, piece, self._deadline)
            crc = crc32c_at(address + at, len(piece), crc)
        return crc


def _send(combs: Sequence[Comb], slot: Slot, begin: int, length: int, stream: int) -> None:
    """Begin to copy what a slot, the file's ``length`` bytes from ``begin``, holds of each comb."""
    copy, source, end, error = dma.copier(), slot.address, begin + length, 0
    for comb in combs:
        if comb.rows == 1:  # a whole tensor: what most of all bytes belong to
            first, last = max(begin, comb.first), min(end, comb.end)
            if first < last:
                to = comb.address + first - comb.first
                error = error or copy(to, source + first - begin, last - first, stream)
            continue
        for at, to, rows, width, pitch in comb.moves(begin, length):
            if rows == 1:
                error = error or copy(comb.address + to, source + at, width, stream)
            else:
                dma.copy_rows(comb.address + to, source + at, width, pitch, rows, stream)
    driver.check("cuMemcpyHtoDAsync", error)
    slot.copying(stream)


def _threads() -> int:
    return max(_FEWEST, min(_THREADS, os.cpu_count() or 1))
