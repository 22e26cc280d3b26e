"""How a disk is best read: through the page cache, or past it.

What goes through the cache is there for the next reader, and several processes that load one file
share one read. Past it (``O_DIRECT``) some disks give up to twice as much, others less. So whoever
reads a disk alone tries both ways on its first bytes, and goes on by the faster one; where somebody
else reads one of the same files, both go through the cache.

Readers see each other by locks (``F_OFD_SETLK``): each has a shared one on the file, and asks
whether an exclusive one could be had. They end with the descriptor, however its process ends.

Only disks of this machine are read so: on a network's file system a lock may have to be waited for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time

_TRIED = 256 << 20
"""Bytes by which each way is judged."""

_WORTH = 1.05
"""How many times as fast the way past the cache has to be: it leaves nothing behind."""

_LOOK = 0.01
"""Seconds for which it is taken for granted that nobody has come."""

_FLOCK = "hhqqi4x"  # struct flock: type, whence, begin, length, process


class Disk:
    """A file system on a disk of this machine, as this process has come to know it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: set[int] = set()  # descriptors, each with a lock of its own
        self._alone, self._looked = False, 0.0
        self._bytes = [0, 0]  # through the cache, past it
        self._seconds = [0.0, 0.0]

    def join(self, fd: int) -> None:
        """Say that a file is read, by an open file description that is this reader's alone.

        Raises :class:`OSError` where files cannot be locked.
        """
        shared = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        with self._lock:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, shared)
            self._read.add(fd)
            self._looked = 0.0

    def leave(self, fd: int) -> None:
        """The file is read no more by this reader, which may close the descriptor now."""
        with self._lock:
            self._read.discard(fd)

    def past_the_cache(self) -> bool:
        """Whether the next read should go past the cache."""
        if self._bytes[False] < _TRIED or not self._is_alone():
            return False
        return self._bytes[True] < _TRIED or self._speed(True) > _WORTH * self._speed(False)

    def took(self, seconds: float, nbytes: int, *, past: bool) -> None:
        """Tell how long a thread's read took, by which way."""
        if self._bytes[past] < _TRIED:
            with self._lock:
                self._bytes[past] += nbytes
                self._seconds[past] += seconds

    def _speed(self, past: bool) -> float:
        """Bytes a second of one thread, while others read, too."""
        return self._bytes[past] / max(self._seconds[past], 1e-9)

    def _is_alone(self) -> bool:
        """Whether nobody else reads any of the files that this process reads."""
        if time.monotonic() - self._looked > _LOOK:
            with self._lock:
                self._alone = not any(map(_shared, self._read))
                self._looked = time.monotonic()
        return self._alone


def disk_of(fd: int) -> Disk | None:
    """The disk that an open file is on; None for memory, networks, and what is not known."""
    device = os.fstat(fd).st_dev
    if not os.major(device):
        return None
    with _known_lock:
        return _known.setdefault(device, Disk())


_known: dict[int, Disk] = {}
_known_lock = threading.Lock()


def _shared(fd: int) -> bool:
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with contextlib.suppress(OSError):  # a file system without locks
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
    return True
