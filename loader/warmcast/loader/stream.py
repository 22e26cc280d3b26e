"""Storage to device: an origin's blobs, read by checked chunks, copied to their place.

The unit is the manifest's chunk: a few threads each read one into a staging buffer of their own,
check its CRC32C, and copy from it what the plan wants. So reading, checking and copying go on at
once, host memory is bounded by the number of threads whatever the model's size, and no byte that
was not checked reaches a target. A chunk that fails its check is read once more; if it fails
again the load ends, naming file and offset. Chunks that hold nothing this rank wants are not read.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from warmcast.loader.containers import flat_bytes, host_view
from warmcast.loader.plan import Targets
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError
from warmcast.manifests.manifest import FileEntry, Manifest, SliceEntry, TensorEntry
from warmcast.manifests.origin import Origin


@dataclass(frozen=True, slots=True)
class _Run:
    """A comb of a file's bytes and the memory where its teeth go, one after another.

    From ``begin`` on, of each of ``rows`` rows of ``pitch`` bytes, the bytes ``low`` to ``high``
    belong to ``target`` (1-D, uint8). A whole tensor is a comb of one row.
    """

    begin: int
    rows: int
    pitch: int
    low: int
    high: int
    target: Tensor

    def copy(self, buffer: Tensor, at: int) -> None:
        """Copy what ``buffer``, the file's bytes from ``at``, holds of this comb."""
        start = max(at - self.begin, 0)
        stop = min(at + buffer.numel() - self.begin, self.rows * self.pitch)
        offset = self.begin - at
        first, last = -(-start // self.pitch), stop // self.pitch
        if first < last:
            width = self.high - self.low
            teeth = buffer[offset + first * self.pitch : offset + last * self.pitch]
            teeth = teeth.view(last - first, self.pitch)[:, self.low : self.high]
            place = self.target[first * width : last * width].view(last - first, width)
            place.copy_(teeth, non_blocking=True)
        # A row that begins before the buffer or ends after it.
        for row in {start // self.pitch, last} if first <= last else {last}:
            if first <= row < last or row >= self.rows:
                continue
            low = max(row * self.pitch + self.low, start)
            high = min(row * self.pitch + self.high, stop)
            if low < high:
                first_byte = row * (self.high - self.low) + low - row * self.pitch - self.low
                self.target[first_byte : first_byte + high - low].copy_(
                    buffer[offset + low : offset + high], non_blocking=True
                )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of a file, and the runs that lie (partly) in it."""

    file: FileEntry
    number: int
    begin: int
    length: int
    runs: list[_Run] = field(default_factory=list)


def stream(origin: Origin, manifest: Manifest, targets: Targets, deadline: Deadline) -> int:
    """Fill every target from the origin; the bytes that were read.

    Raises :class:`IntegrityError`, :class:`StoreError` or :class:`DeadlineExceeded`; the targets
    are then worth nothing. No thread outlives the call.
    """
    if not targets.tensors:
        return 0
    runs: dict[str, list[_Run]] = {}
    finish: list[Callable[[], None]] = []
    for placement, tensor in zip(targets.plan.placements, targets.tensors, strict=True):
        if placement.entry is not None:
            run = _run(placement.entry, placement.slice, tensor, finish)
            runs.setdefault(placement.entry.file, []).append(run)
    stop = threading.Event()
    staging = _Staging(manifest.chunk_size, targets.tensors[0].device)

    def one(chunk: _Chunk) -> int:
        if stop.is_set():
            return 0
        deadline.check("reading from the origin")
        with staging.borrowed(chunk.length) as buffer:
            _read(origin, chunk, buffer, deadline)
            for run in chunk.runs:
                run.copy(buffer, chunk.begin)
        return chunk.length

    with ThreadPoolExecutor(_threads(), thread_name_prefix="warmcast-stream") as pool:
        futures = [pool.submit(one, chunk) for chunk in _chunks(manifest, runs)]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        stop.set()
        failed = [future for future in done if future.exception() is not None]
    read = sum(future.result() for future in failed or futures)
    for copy_over in finish:
        copy_over()
    return read


def _run(
    entry: TensorEntry, part: SliceEntry | None, tensor: Tensor, finish: list[Callable[[], None]]
) -> _Run:
    """Where a tensor's or slice's bytes lie in the file, and where they go."""
    target = tensor
    if not tensor.is_contiguous():
        # The file is row-major: read aside on the device, and laid out as it should be at the end.
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        finish.append(partial(_copy_over, tensor, target))
    flat = flat_bytes(target)
    if part is None or part.axis is None or not entry.nbytes:
        return _Run(entry.begin, 1, entry.nbytes, 0, entry.nbytes, flat)
    rows = math.prod(entry.shape[: part.axis])
    pitch = entry.nbytes // rows
    inner = pitch // entry.shape[part.axis]
    low = part.start * inner
    return _Run(entry.begin, rows, pitch, low, low + part.length * inner, flat)


def _copy_over(tensor: Tensor, source: Tensor) -> None:
    tensor.copy_(source)


def _chunks(manifest: Manifest, runs: dict[str, list[_Run]]) -> list[_Chunk]:
    """The chunks to read, in load order: that of the first run which needs each."""
    chunks: dict[tuple[str, int], _Chunk] = {}
    size = manifest.chunk_size
    for path, of_file in runs.items():
        file = manifest.file[path]
        for run in of_file:
            if run.low == run.high or not run.rows:
                continue
            begin = run.begin + run.low
            end = run.begin + (run.rows - 1) * run.pitch + run.high
            for number in range(begin // size, -(-end // size)):
                at = number * size
                chunk = _Chunk(file, number, at, min(size, file.size - at))
                chunks.setdefault((path, number), chunk).runs.append(run)
    return list(chunks.values())


def _read(origin: Origin, chunk: _Chunk, buffer: Tensor, deadline: Deadline) -> None:
    view = host_view(buffer)
    expected = chunk.file.chunks[chunk.number]
    found = ""
    for _ in range(2):
        origin.read_blob(chunk.file.sha256, chunk.begin, view, deadline)
        found = to_hex(crc32c(view))
        if found == expected:
            return
    raise IntegrityError(
        f"{chunk.file.path} at byte {chunk.begin} (blob {chunk.file.sha256[:12]} of {origin.url})",
        expected=f"{chunk.length} bytes with CRC32C {expected}",
        found=f"{found}, twice",
        do="run `warmcast verify`, then deploy again",
    )


class _Staging:
    """A staging buffer for each thread that reads: pinned, and with a stream, for a GPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._mine = threading.local()

    @contextmanager
    def borrowed(self, length: int) -> Iterator[Tensor]:
        """The thread's buffer; copies from it that were begun have ended when the context has."""
        cuda = self._device.type == "cuda"
        if not hasattr(self._mine, "buffer"):
            self._mine.buffer = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=cuda)
            self._mine.stream = torch.cuda.Stream(self._device) if cuda else None
        buffer: Tensor = self._mine.buffer[:length]
        if not cuda:
            yield buffer
            return
        with torch.cuda.stream(self._mine.stream):
            yield buffer
            self._mine.stream.synchronize()


def _threads() -> int:
    return max(2, min(8, os.cpu_count() or 1))
