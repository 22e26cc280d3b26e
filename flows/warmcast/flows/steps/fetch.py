"""Fetch: bring files of a remote upstream into the work folder, for formats that need them here.

Read in chunks by several connections, as transfers are; held to the checksums that the upstream
publishes. A fetch that was killed begins anew: its folder is gone with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from warmcast.flows.chunks import ChunkStream, Lanes
from warmcast.flows.errors import WorkFolderFull
from warmcast.flows.local import LocalFile
from warmcast.flows.steps.journal import Pace
from warmcast.flows.steps.measure import Measuring, Piece
from warmcast.flows.steps.transfer import check_published, opened
from warmcast.flows.upstreams import Upstream, UpstreamFile
from warmcast.flows.workfolder import WorkFolder
from warmcast.manifests.deadline import Deadline


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file in the work folder, and the SHA-256 of its bytes."""

    file: LocalFile
    sha256: str


def fetch(
    upstream: Upstream,
    files: Sequence[UpstreamFile],
    work: WorkFolder,
    lanes: Lanes,
    pace: Pace,
    deadline: Deadline,
    tick: Callable[[int], None],
) -> list[Fetched]:
    """The files, whole and checked, under their own paths below a new folder; one after another.

    ``tick`` is told each byte once. Raises :class:`WorkFolderFull`, before a byte is read if that
    is known, :class:`IntegrityError`, and what the upstream raises.
    """
    work.need(sum(file.size for file in files))
    folder = work.part()
    return [_fetch(upstream, f, folder, lanes, pace, deadline, tick) for f in files]


def _fetch(
    upstream: Upstream,
    file: UpstreamFile,
    folder: Path,
    lanes: Lanes,
    pace: Pace,
    deadline: Deadline,
    tick: Callable[[int], None],
) -> Fetched:
    location = folder / file.path
    location.parent.mkdir(parents=True, exist_ok=True)
    chunk = pace.chunk_nbytes
    measuring = Measuring(file.path, file.size, ())
    fd = os.open(location, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:

        def write(index: int, view: memoryview, *_: object) -> None:
            done = 0
            while done < len(view):
                try:
                    done += os.pwrite(fd, view[done:], index * chunk + done)
                except OSError as cause:
                    raise WorkFolderFull(
                        f"fetching {file.path}",
                        expected=f"{file.size:,} bytes in the work folder",
                        found=cause.strerror,
                        do="free space, or name another folder with --work",
                    ) from cause
            tick(len(view))

        with opened(upstream, file, deadline) as reader:
            stream = ChunkStream[list[Piece]](
                reader,
                chunk,
                lanes,
                deadline,
                checked=lambda index, view: measuring.pieces(index * chunk, view),
                ordered=lambda _, view, pieces: measuring.take(view, pieces),
                stored=write,
            )
            indices = range(-(-file.size // chunk))
            stream.run(indices, 0, pace.connections, tick)
    finally:
        os.close(fd)
    measured = measuring.measured()
    check_published(file, measured)
    return Fetched(LocalFile.of(file.path, location, file.size), measured.file.sha256)
