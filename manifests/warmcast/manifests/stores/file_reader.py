"""Reading one local file, from where its bytes are.

Each piece is first asked of the page cache, without waiting (``RWF_NOWAIT``). What is not there is
read from the disk: through the cache, which keeps it for the next reader and lets several readers
of one file share one read, or past it (``O_DIRECT``) where the file is larger than the memory that
is free: it would only push out what others need, and itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import StoreError

_PIECE = 8 << 20
"""Bytes of one read: between two, the deadline is looked at."""

_BLOCK = 4096
"""What reads past the cache are aligned to; no disk of today has larger blocks."""

_AHEAD = 64 << 20
"""Bytes that the kernel is asked to read ahead, where a piece was not in the cache."""

_NO_NOWAIT = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class FileReader:
    """Reads an open file. Safe between threads; owns the descriptor that it is given.

    ``where`` is the file's name in errors, ``explain`` turns the system's errors into ours.
    """

    local = True
    step = 1 << 20  # what stays in the processor's cache until it has been looked at

    def __init__(self, fd: int, where: str, explain: Callable[[OSError], StoreError]) -> None:
        self.size = os.fstat(fd).st_size
        self._fd = fd
        self._where = where
        self._explain = explain
        self._flags = getattr(os, "RWF_NOWAIT", 0)
        self._direct = self._open_direct() if self.size > _memory_free() else -1
        self._ahead = 0

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` with the file's bytes from ``offset``.

        Raises :class:`StoreError`, also if the file ends before.
        """
        view = buffer.cast("B")
        done = 0
        # Without the flag this waits for all of it: well where it has been asked for, or is memory.
        if self._flags or offset + len(view) <= self._ahead:
            with contextlib.suppress(OSError):  # what is the matter with it is found out below
                # Mostly all of it is in the cache. Threads that stream come here tens of thousands
                # of times a second.
                done = os.preadv(self._fd, (view,), offset, self._flags)
        while done < len(view):
            deadline.check(f"reading {self._where}")
            piece = view[done : done + _PIECE]
            try:
                count = self._cached(piece, offset + done) or self._cold(piece, offset + done)
            except OSError as cause:
                raise self._explain(cause) from cause
            if count == 0:
                raise StoreError(
                    self._where,
                    expected=f"{len(view)} bytes at offset {offset}",
                    found=f"{done}",
                )
            done += count

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
        if self._direct >= 0:
            os.close(self._direct)

    def _cached(self, piece: memoryview, offset: int) -> int:
        """Take what the page cache has; 0 if that is nothing, or it cannot be asked."""
        if not self._flags:
            return 0
        try:
            return os.preadv(self._fd, (piece,), offset, self._flags)
        except BlockingIOError:
            return 0
        except OSError as cause:
            if cause.errno not in _NO_NOWAIT:
                raise
            self._flags = 0  # a file system that always answers at once, or never can
            return 0

    def _cold(self, piece: memoryview, offset: int) -> int:
        if self._direct >= 0 and offset % _BLOCK == 0 and len(piece) >= _BLOCK:
            whole = len(piece) // _BLOCK * _BLOCK
            try:
                return os.preadv(self._direct, [piece[:whole]], offset)
            except OSError as cause:
                if cause.errno != errno.EINVAL:  # memory or file system that wants more alignment
                    raise
        elif self._direct < 0 and offset + _AHEAD // 2 > self._ahead:
            # Several threads read one file, and the kernel takes that for random access.
            self._ahead = offset + _AHEAD
            os.posix_fadvise(self._fd, offset, _AHEAD, os.POSIX_FADV_WILLNEED)
        return os.preadv(self._fd, [piece], offset)

    def _open_direct(self) -> int:
        """A second descriptor that reads past the cache; -1 where the file system has no such."""
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        return -1


def _memory_free() -> int:
    """Bytes of memory that a cache can take without pushing out what is in use."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
