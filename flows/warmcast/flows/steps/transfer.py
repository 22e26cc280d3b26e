"""Transfer: stream a file from its upstream into the origin, in chunks; nothing is kept here.

A chunk is read by a range of the version that was listed, checked, and sent as a part, by several
connections; the SHA-256, the tensors' checks and samples are taken in the order of the file as it
passes. Before the blob is visible, the whole is held to what the upstream publishes of it. Its key
is its SHA-256, which may be known last: see :meth:`ObjectStore.begin_parts`.

What was done stands in a journal (:mod:`journal`), so that a transfer goes on where it was killed,
on this machine or another, and that of many who want the same file one transfers it. A connection
begins a chunk when the journal tells of its last one: after a kill at most a chunk a connection
moves again. Where the SHA-256's state cannot be kept (see :mod:`sha256`), what was sent is read
again, but not sent again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from warmcast.flows.chunks import ChunkStream, Lanes
from warmcast.flows.errors import SourceChanged
from warmcast.flows.steps.journal import Done, Fenced, Lease, Pace, acquire
from warmcast.flows.steps.measure import Measured, Measuring, Piece, Stored
from warmcast.flows.upstreams import Upstream, UpstreamFile
from warmcast.manifests.canonical import digest
from warmcast.manifests.checksum import combine, from_hex, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, InvalidData, NotFound, StoreError
from warmcast.manifests.manifest import FileEntry
from warmcast.manifests.origin import Origin, blob_key
from warmcast.manifests.stores import ObjectReader

_TRIES = 8
"""How often a transfer may change hands before this deploy says that something is wrong."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """What is known of a file that the origin has now, and whether this call moved its bytes."""

    measured: Measured
    moved: bool


def transfer_key(upstream: Upstream, file: UpstreamFile) -> str:
    """What all who want the same file call its transfer.

    Its SHA-256 where that is published, else the upstream's name for this version of it; a name
    that nobody else has where there is none.
    """
    if file.sha256 is not None:
        return digest({"sha256": file.sha256, "size": file.size})
    if file.version or file.crc32c is not None:
        return digest(
            {
                "upstream": upstream.name,
                "path": file.path,
                "size": file.size,
                "version": file.version,
                "crc32c": file.crc32c,
            }
        )
    return secrets.token_hex(32)


def transfer(
    origin: Origin,
    upstream: Upstream,
    file: UpstreamFile,
    tensors: Sequence[Stored],
    lanes: Lanes,
    pace: Pace,
    deadline: Deadline,
    tick: Callable[[int], None],
    *,
    has: Callable[[FileEntry], bool],
    recall: Callable[[], Measured | None],
    remember: Callable[[Measured], None],
    note: Callable[[str], None] = lambda _: None,
) -> Transferred:
    """Put a file of an upstream into the origin, once for all who want it at the same time.

    ``has`` tells whether the origin has a blob, and a right one; ``recall`` what the origin knows
    of the file if it has its blob; ``remember`` has the origin know. ``tick`` is told each byte
    twice (read; sent), and called with 0 now and then; ``note`` what a person should know.
    Raises :class:`IntegrityError` for bytes that are not what is published of them,
    :class:`SourceChanged`, and what the store and the upstream raise; what was sent is kept for
    who comes next, unless it was wrong.
    """
    key = transfer_key(upstream, file)
    for _ in range(_TRIES):
        lease = acquire(origin.store, key, file.path, file.size, pace, deadline, tick, note)
        try:
            measured = recall()
            if measured is not None:
                if lease is not None:
                    lease.finish(deadline)
                tick(2 * file.size)
                return Transferred(measured, moved=False)
            if lease is None:
                continue
            with opened(upstream, file, deadline) as reader:
                measured = _Transfer(
                    origin, file, tensors, reader, lease, lanes, pace, deadline, tick, has
                ).run()
        except Fenced:
            continue
        except BaseException:
            if lease is not None:
                lease.leave()
            raise
        remember(measured)
        lease.finish(deadline)
        return Transferred(measured, moved=True)
    raise StoreError(
        file.path,
        expected="one deploy to transfer it",
        found=f"that it changed hands {_TRIES} times",
        do="look at the clocks and the network between deploys and the origin",
    )


class _Transfer:
    """One transfer, by the owner of its journal."""

    def __init__(
        self,
        origin: Origin,
        file: UpstreamFile,
        tensors: Sequence[Stored],
        reader: ObjectReader,
        lease: Lease,
        lanes: Lanes,
        pace: Pace,
        deadline: Deadline,
        tick: Callable[[int], None],
        has: Callable[[FileEntry], bool],
    ) -> None:
        self._has = has
        self._store = origin.store
        self._file = file
        self._tensors = tensors
        self._reader = reader
        self._lease = lease
        self._lanes = lanes
        self._pace = pace
        self._deadline = deadline
        self._tick = tick
        self._chunk = lease.found.chunk_nbytes
        self._count = -(-file.size // self._chunk)
        self._lock = threading.Lock()
        self._begin(Done(None, (), None))

    def run(self) -> Measured:
        """Do what is left, and make the blob visible."""
        try:
            self._begin(self._lease.done)
            try:
                return self._go_on()
            except NotFound:  # what was begun has been taken away
                self._lease.stop()
                self._lease.write(self._done(), self._deadline)  # raises if it is not ours any more
                if self._token is not None:
                    self._store.abort_parts(self._token, self._deadline)
            self._begin(Done(None, (), None))
            return self._go_on()
        except (IntegrityError, SourceChanged):
            # Nothing of it is worth keeping.
            self._lease.stop()
            if self._token is not None:
                self._store.abort_parts(self._token, self._deadline)
            self._lease.finish(self._deadline)
            raise
        finally:
            self._lease.stop()

    def _begin(self, done: Done) -> None:
        """Stand where ``done`` says."""
        self._token = done.token
        self._parts = {part.index: part for part in done.parts if part.index < self._count}
        self._measuring = Measuring(self._file.path, self._file.size, self._tensors)
        self._progressed = None
        if done.progressed is not None and done.progressed.nbytes % self._chunk == 0:
            try:
                if self._measuring.resume(done.progressed):
                    self._progressed = done.progressed
            except InvalidData:
                self._measuring = Measuring(self._file.path, self._file.size, self._tensors)

    def _go_on(self) -> Measured:
        file = self._file
        if self._token is None:
            target = blob_key(file.sha256) if file.sha256 is not None else None
            self._token = self._store.begin_parts(target, self._deadline)
            self._lease.write(self._done(), self._deadline)
        first = self._measuring.nbytes // self._chunk
        if self._measuring.nbytes == file.size:
            first = self._count
        left = [i for i in range(self._count) if i >= first or i not in self._parts]
        self._tick(2 * file.size - sum(self._nbytes(i) for i in left) - self._unsent(left))
        stream = ChunkStream[list[Piece]](
            self._reader,
            self._chunk,
            self._lanes,
            self._deadline,
            checked=self._check,
            ordered=self._order,
            stored=self._send,
            settled=self._lease.settle,
        )
        self._lease.keep(self._done, stream.end, self._pace, self._deadline)
        stream.run(left, first, self._pace.connections, self._tick)
        measured = self._measuring.measured()
        check_published(file, measured)
        entry = measured.file
        if not self._has(entry):
            # A blob of other bytes than its name says is worth nothing, and would stay.
            self._store.delete(blob_key(entry.sha256), self._deadline)
        parts = [self._parts[index] for index in range(self._count)]
        self._store.complete_parts(
            self._token, parts, blob_key(entry.sha256), from_hex(entry.crc32c), self._deadline
        )
        return measured

    def _check(self, index: int, view: memoryview) -> list[Piece]:
        """The checksums of a chunk's pieces; it has to be what was sent of it before."""
        self._tick(len(view))
        pieces = self._measuring.pieces(index * self._chunk, view)
        part = self._parts.get(index)
        if part is not None and part.crc32c != _whole(pieces):
            raise SourceChanged(
                self._file.path,
                expected="to stay as it is while it is deployed",
                found=f"other bytes at {index * self._chunk:,}",
                do="deploy again",
            )
        return pieces

    def _order(self, index: int, view: memoryview, pieces: list[Piece]) -> None:
        """Take a chunk into the pass over the file."""
        self._measuring.take(view, pieces)
        progressed = self._measuring.progressed() if index + 1 < self._count else None
        with self._lock:
            if progressed is not None:
                self._progressed = progressed

    def _send(self, index: int, view: memoryview, pieces: list[Piece], deadline: Deadline) -> None:
        if index in self._parts or self._token is None:
            return
        part = self._store.put_part(
            self._token, index, index * self._chunk, view, _whole(pieces), deadline
        )
        with self._lock:
            self._parts[index] = part
        self._tick(len(view))

    def _done(self) -> Done:
        with self._lock:
            parts = tuple(self._parts[index] for index in sorted(self._parts))
            return Done(self._token, parts, self._progressed)

    def _nbytes(self, index: int) -> int:
        return min(self._chunk, self._file.size - index * self._chunk)

    def _unsent(self, left: Sequence[int]) -> int:
        return sum(self._nbytes(index) for index in left if index not in self._parts)


@contextmanager
def opened(upstream: Upstream, file: UpstreamFile, deadline: Deadline) -> Iterator[ObjectReader]:
    """A file of an upstream, to read; :class:`SourceChanged` if it has another size by now."""
    reader = upstream.reader(file, deadline)
    try:
        if reader.size != file.size:
            raise SourceChanged(
                file.path,
                expected=f"{file.size} bytes, as it was listed",
                found=reader.size,
                do="deploy again",
            )
        yield reader
    finally:
        reader.close()


def check_published(file: UpstreamFile, measured: Measured) -> None:
    """Raise :class:`IntegrityError` unless a file's bytes are what its upstream publishes."""
    entry = measured.file
    published = None if file.crc32c is None else to_hex(file.crc32c)
    for name, expected, found in (
        ("SHA-256", file.sha256, entry.sha256),
        ("CRC32C", published, entry.crc32c),
    ):
        if expected is not None and found != expected:
            raise IntegrityError(
                file.path,
                expected=f"{name} {expected}, as the upstream publishes",
                found=found,
                do="deploy again; if it stays so, the upstream is damaged",
            )


def _whole(pieces: Sequence[Piece]) -> int:
    """The CRC32C of pieces that follow each other."""
    whole = 0
    for begin, end, checksum in pieces:
        whole = combine(whole, checksum, end - begin)
    return whole
