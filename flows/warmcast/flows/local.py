"""A file on this machine that must not change while a deploy looks at it.

It is read several times (its header, its checksums, its upload). Size, modification time and
inode are compared around each reading, and the upload carries the CRC32C that was measured, so
that what is published is one state of the file. Files are read, not mapped: a mapped file that is
cut off while it is read ends the process with SIGBUS instead of with an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from warmcast.flows.errors import SourceChanged, SourceError
from warmcast.manifests.deadline import Deadline


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file: its path in the deployment, where it lies, and the state it is in."""

    path: str
    location: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: str, location: Path, size: int | None = None) -> LocalFile:
        """The file as it is now; :class:`SourceChanged` if it has not ``size`` bytes."""
        try:
            found = location.stat()
        except OSError as cause:
            raise SourceError(
                str(location), expected="a file", found=cause.strerror, do="was it moved?"
            ) from cause
        if size is not None and found.st_size != size:
            raise _changed(location, size, found.st_size)
        return cls(path, location, found.st_size, found.st_mtime_ns, found.st_ino)

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file, open for reading; :class:`SourceChanged` if it changed before or meanwhile."""
        try:
            file = self.location.open("rb", buffering=0)
        except OSError as cause:
            raise SourceError(
                str(self.location), expected="a file to read", found=cause.strerror
            ) from cause
        with file:
            self.compare(file)
            yield file
            self.compare(file)

    def read_into(self, file: BinaryIO, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` of the open file."""
        done = 0
        while done < len(buffer):
            count = os.preadv(file.fileno(), [buffer[done:]], offset + done)
            if count == 0:
                raise _changed(self.location, self.size, offset + done)
            done += count

    def compare(self, file: BinaryIO) -> None:
        """Raise :class:`SourceChanged` if the open file is not in this state."""
        found = os.fstat(file.fileno())
        if found.st_size != self.size:
            raise _changed(self.location, self.size, found.st_size)
        if (found.st_mtime_ns, found.st_ino) != (self.mtime_ns, self.inode):
            raise SourceChanged(
                str(self.location),
                expected="to stay as it is while it is deployed",
                found="a new modification time, or another file",
                do="let what writes it finish, then deploy again",
            )


class LocalReader:
    """A local file as an ``ObjectReader``, open until it is closed."""

    local = True
    cached = None
    step = 1 << 24

    def __init__(self, file: LocalFile) -> None:
        self.size = file.size
        self._file = file
        self._held = ExitStack()
        self._opened = self._held.enter_context(file.opened())

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` from ``offset``; :class:`SourceChanged` if the file is another now."""
        deadline.check(f"reading {self._file.path}")
        self._file.read_into(self._opened, offset, buffer)
        self._file.compare(self._opened)

    def close(self) -> None:
        """Close the file; :class:`SourceChanged` if it changed meanwhile."""
        self._held.close()


def _changed(location: Path, expected: int, found: int) -> SourceChanged:
    return SourceChanged(
        str(location),
        expected=f"{expected} bytes as before",
        found=f"{found}",
        do="let what writes it finish, then deploy again",
    )
