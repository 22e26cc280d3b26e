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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from warmcast.loader import dma
from warmcast.loader.combs import Comb
from warmcast.loader.containers import flat_bytes, host_view
from warmcast.loader.cuda_context import current
from warmcast.loader.plan import Targets
from warmcast.loader.staging import Lane, Slot, Staging
from warmcast.manifests.checksum import crc32c_at, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, StoreError
from warmcast.manifests.manifest import FileEntry, Manifest
from warmcast.manifests.origin import Origin
from warmcast.manifests.stores import ObjectReader

_PIECE = 6 << 20
"""Bytes that are copied at once; more, where a store is better asked for more.

With less the threads wait for the interpreter's lock, with more the slots of all of them do not
stay in the processor's cache.
"""

_PART = 0.75
"""The part of a chunk's bytes beneath which only what is wanted of it is read."""

_THREADS = 12
"""Threads at most: what a PCIe link of 55 GB/s takes from the page cache."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What is read of one chunk of a file, and the combs that lie (partly) in it.

    ``crc32c`` is None where that is not all of the chunk.
    """

    file: FileEntry
    begin: int
    length: int
    crc32c: str | None
    combs: Sequence[Comb]


@dataclass(slots=True)
class _Wanted:
    """The combs of one chunk, in load order, and the span that they want of it."""

    begin: int
    end: int
    combs: list[Comb] = field(default_factory=list)


def stream(
    origin: Origin,
    manifest: Manifest,
    targets: Targets,
    staging: Staging,
    deadline: Deadline,
    *,
    careful: bool = False,
) -> int:
    """Fill every target from the origin; the bytes that were read.

    Raises :class:`IntegrityError`, :class:`StoreError` or :class:`DeadlineExceeded`; the targets
    are then worth nothing. No thread outlives the call.
    """
    if not targets.tensors:
        return 0
    combs: dict[str, list[Comb]] = {}
    finish: list[Callable[[], None]] = []
    for placement, tensor in zip(targets.plan.placements, targets.tensors, strict=True):
        if placement.entry is not None:
            target = _row_major(tensor, finish)
            comb = Comb.of(placement.entry, placement.slice, flat_bytes(target))
            combs.setdefault(placement.entry.file, []).append(comb)
    with ExitStack() as stack:
        blobs = stack.enter_context(_Blobs(origin))
        device = targets.tensors[0].device
        streaming = _Streaming(blobs, staging, device, deadline, careful=careful)
        read = streaming.run(_chunks(manifest, combs, careful=careful))
    for copy_over in finish:
        copy_over()
    return read


def _row_major(tensor: Tensor, finish: list[Callable[[], None]]) -> Tensor:
    """Memory for a tensor's bytes as the file has them: its own, where it is row-major."""
    if tensor.is_contiguous():
        return tensor
    # Read aside on the device, and laid out as it should be at the end.
    aside = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    finish.append(partial(_copy_over, tensor, aside))
    return aside


def _copy_over(tensor: Tensor, source: Tensor) -> None:
    tensor.copy_(source)


def _chunks(manifest: Manifest, combs: dict[str, list[Comb]], *, careful: bool) -> Iterator[_Chunk]:
    """What to read, in load order: that of the first comb which needs each chunk."""
    size = manifest.chunk_size
    wanted: dict[tuple[str, int], _Wanted] = {}
    for path, of_file in combs.items():
        for comb in of_file:
            if comb.first == comb.end:
                continue
            for number in range(comb.first // size, -(-comb.end // size)):
                begin, end = max(comb.first, number * size), min(comb.end, (number + 1) * size)
                span = wanted.setdefault((path, number), _Wanted(begin, end))
                span.begin, span.end = min(span.begin, begin), max(span.end, end)
                span.combs.append(comb)
    for (path, number), span in wanted.items():
        file = manifest.file[path]
        begin = number * size
        length = min(size, file.size - begin)
        if careful or span.end - span.begin > _PART * length:
            yield _Chunk(file, begin, length, file.chunks[number], span.combs)
        else:
            yield _Chunk(file, span.begin, span.end - span.begin, None, span.combs)


class _Blobs:
    """The files' blobs, each opened when it is first read from."""

    def __init__(self, origin: Origin) -> None:
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
                reader = self._readers[file.sha256] = self._origin.open_blob(file.sha256, deadline)
                if reader.size != file.size:
                    raise StoreError(
                        f"{file.path} (blob {file.sha256[:12]} of {self.url})",
                        expected=f"{file.size} bytes",
                        found=f"{reader.size}",
                        do="run `warmcast verify`, then deploy again",
                    )
            return reader


class _Streaming:
    """One stream: threads that each take the next chunk until none is left, or one fails."""

    def __init__(
        self,
        blobs: _Blobs,
        staging: Staging,
        device: torch.device,
        deadline: Deadline,
        *,
        careful: bool,
    ) -> None:
        self._blobs = blobs
        self._careful = careful
        self._staging = staging
        self._device = device
        self._deadline = deadline
        gpu = device.type == "cuda"
        self._after = torch.cuda.current_stream(device) if gpu else None
        self._next = threading.Lock()
        self._stop = threading.Event()

    def run(self, chunks: Iterator[_Chunk]) -> int:
        """Bring all chunks over; the bytes that were read."""
        count = max(1, min(_threads(), self._staging.nbytes // _PIECE))
        with ThreadPoolExecutor(count, thread_name_prefix="warmcast-stream") as pool:
            futures = [pool.submit(self._work, chunks, count) for _ in range(count)]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            self._stop.set()
            failed = [future for future in done if future.exception() is not None]
        return sum(future.result() for future in failed or futures)

    def _work(self, chunks: Iterator[_Chunk], lanes: int) -> int:
        read = 0
        with ExitStack() as stack:
            if self._after is not None:
                stack.enter_context(current(self._device))
            lane = stack.enter_context(self._staging.lane(lanes, self._after))
            while (chunk := self._take(chunks)) is not None:
                self._bring(chunk, lane)
                read += chunk.length
        return read

    def _take(self, chunks: Iterator[_Chunk]) -> _Chunk | None:
        if self._stop.is_set():
            return None
        with self._next:
            return next(chunks, None)

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
    dma.check("cuMemcpyHtoDAsync", error)
    slot.copying(stream)


def _threads() -> int:
    return max(2, min(_THREADS, os.cpu_count() or 1))
