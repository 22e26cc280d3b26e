"""Mirror a file: measure it, and put its bytes into the origin if it does not have them.

What lies on this machine is measured first and then uploaded; what does not is streamed
(:mod:`transfer`), or held in memory where it is small.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmcast.flows.chunks import ChunkStream, Lanes
from warmcast.flows.local import LocalFile
from warmcast.flows.steps.journal import Pace
from warmcast.flows.steps.measure import Measured, Measuring, Piece, Stored, measure
from warmcast.flows.steps.transfer import check_published, opened, transfer
from warmcast.flows.upstreams import Upstream, UpstreamFile
from warmcast.manifests.checksum import from_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.manifest import FileEntry
from warmcast.manifests.origin import Origin, blob_key
from warmcast.manifests.stores import ObjectReader

_SMALL = 8 << 20
"""Bytes of the largest file that is held whole."""


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A file that the origin has; ``moved`` tells whether its bytes had to be sent."""

    measured: Measured
    moved: bool

    @property
    def file(self) -> FileEntry:
        """The file's entry in the manifest."""
        return self.measured.file


def mirror_file(
    origin: Origin,
    file: LocalFile,
    tensors: Sequence[Stored],
    deadline: Deadline,
    tick: Callable[[int], None],
    *,
    repair: bool = False,
) -> Mirrored:
    """Measure a file and put its blob into the origin.

    ``tick`` is told each byte twice: once measured, once sent or found there. With ``repair``,
    a blob that is there is read, and replaced if its bytes are wrong. Raises
    :class:`SourceChanged`, and what the store raises.
    """
    with file.opened() as local:
        measured = measure(
            file.path,
            file.size,
            tensors,
            lambda offset, view: file.read_into(local, offset, view),
            tick,
        )
    entry = measured.file
    if has_blob(origin, entry, deadline, reread=tick if repair else None):
        tick(entry.size)
        return Mirrored(measured, moved=False)
    # A blob of other bytes than its name says is worth nothing, and upload would keep it.
    origin.store.delete(blob_key(entry.sha256), deadline)
    with file.opened() as local:
        moved = origin.put_blob(
            entry.sha256, local, entry.size, from_hex(entry.crc32c), deadline, tick
        )
    return Mirrored(measured, moved)


@dataclass(frozen=True, slots=True)
class Streaming:
    """What all streamed files of a deploy share."""

    origin: Origin
    upstream: Upstream
    lanes: Lanes
    pace: Pace
    repair: bool = False


def stream_file(
    shared: Streaming,
    file: UpstreamFile,
    tensors: Sequence[Stored],
    deadline: Deadline,
    tick: Callable[[int], None],
    *,
    recall: Callable[[], Measured | None],
    remember: Callable[[Measured], None],
    note: Callable[[str], None] = lambda _: None,
) -> Mirrored:
    """Put a file that lies elsewhere into the origin; see :func:`transfer`."""
    origin, pace = shared.origin, shared.pace

    def has(entry: FileEntry) -> bool:
        return has_blob(origin, entry, deadline, reread=tick if shared.repair else None)

    if file.sha256 is not None:
        measured = _measure_blob(shared, file, tensors, deadline, tick)
        if measured is not None:
            remember(measured)
            tick(2 * file.size)
            return Mirrored(measured, moved=False)
    if file.size > min(_SMALL, pace.chunk_nbytes):
        done = transfer(
            origin, shared.upstream, file, tensors, shared.lanes, pace, deadline, tick,
            has=has, recall=recall, remember=remember, note=note,
        )  # fmt: skip
        return Mirrored(done.measured, done.moved)
    measured, data = _read_whole(shared, file, tensors, deadline)
    check_published(file, measured)
    tick(file.size)
    entry = measured.file
    if has(entry):
        moved = False
        tick(entry.size)
    else:
        origin.store.delete(blob_key(entry.sha256), deadline)
        moved = origin.put_blob(
            entry.sha256, io.BytesIO(data), entry.size, from_hex(entry.crc32c), deadline, tick
        )
    remember(measured)
    return Mirrored(measured, moved)


def _read_whole(
    shared: Streaming, file: UpstreamFile, tensors: Sequence[Stored], deadline: Deadline
) -> tuple[Measured, bytes]:
    with shared.lanes.buffer(file.size, threading.Event()) as view:
        with opened(shared.upstream, file, deadline) as reader:
            reader.read_into(0, view, deadline)
        measuring = Measuring(file.path, file.size, tensors)
        measuring.take(view, measuring.pieces(0, view))
        return measuring.measured(), bytes(view)


def _measure_blob(
    shared: Streaming,
    file: UpstreamFile,
    tensors: Sequence[Stored],
    deadline: Deadline,
    tick: Callable[[int], None],
) -> Measured | None:
    """What a blob holds that the origin has of a file; None if it has none, or a wrong one."""
    origin, sha256 = shared.origin, file.sha256
    info = origin.blob_info(sha256, deadline) if sha256 is not None else None
    if info is None or sha256 is None:
        return None
    if info.size == file.size:
        reader = origin.open_blob(sha256, deadline)
        try:
            measured = _measure_reader(shared, file.path, reader, tensors, deadline, tick)
        finally:
            reader.close()
        if measured.file.sha256 == sha256:
            return measured
    origin.store.delete(blob_key(sha256), deadline)
    return None


def _measure_reader(
    shared: Streaming,
    path: str,
    reader: ObjectReader,
    tensors: Sequence[Stored],
    deadline: Deadline,
    tick: Callable[[int], None],
) -> Measured:
    """Measure what a reader reads, by several connections."""
    chunk = shared.pace.chunk_nbytes
    measuring = Measuring(path, reader.size, tensors)
    stream = ChunkStream[list[Piece]](
        reader,
        chunk,
        shared.lanes,
        deadline,
        checked=lambda index, view: measuring.pieces(index * chunk, view),
        ordered=lambda _, view, pieces: measuring.take(view, pieces),
        stored=lambda *_: None,
    )
    indices = range(-(-reader.size // chunk))
    stream.run(indices, 0, shared.pace.connections, tick)
    return measuring.measured()


def has_blob(
    origin: Origin,
    entry: FileEntry,
    deadline: Deadline,
    *,
    reread: Callable[[int], None] | None = None,
) -> bool:
    """Whether the origin has a blob of this size, and CRC32C where the store knows it.

    With ``reread``, which is called now and then and may raise, the blob is read instead of the
    store believed.
    """
    info = origin.blob_info(entry.sha256, deadline)
    if info is None or info.size != entry.size:
        return False
    if info.crc32c is not None and info.crc32c != from_hex(entry.crc32c):
        return False
    if reread is None:
        return True
    found = measure(
        entry.path,
        entry.size,
        (),
        lambda offset, view: origin.read_blob(entry.sha256, offset, view, deadline),
        lambda _: reread(0),
    )
    return found.file.sha256 == entry.sha256
