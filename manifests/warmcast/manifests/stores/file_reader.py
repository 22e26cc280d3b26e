"""Reading one local file, from where its bytes are.

What the page cache has is taken from there, without waiting (``RWF_NOWAIT``). What is not there is
read from the disk: through the cache, or past it (``O_DIRECT``) where that is faster and nobody
else reads the file (see :mod:`disks`), and where the file is larger than the memory that is free:
it would only push out what others need, and itself.

Several threads read one file, each a stretch of it front to back. The kernel sees stretches, and
reads ahead of them in large folios, by descriptor: so each stretch that is not in the cache has one
of its own. Told to read ahead (``posix_fadvise``) it would take single pages, at twice the
processor time and less speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import StoreError
from warmcast.manifests.stores.disks import Disk, disk_of

_PIECE = 8 << 20
"""Bytes of one read: between two, the deadline is looked at."""

_STEP = 1 << 20
"""Bytes of one read from a disk through the cache: the next come in while these are copied."""

_BLOCK = 4096
"""What reads past the cache are aligned to; no disk of today has larger blocks."""

_NO_NOWAIT = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class _Stretch:
    """Where a thread reads a file that is not in the cache, by a descriptor of its own, through the
    cache or ``past`` it: it goes on at ``next``.
    """

    def __init__(self, fd: int, *, past: bool) -> None:
        self.past = past
        self.next = self.fd = -1
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if past else 0)
        self.fd = os.open(f"/proc/self/fd/{fd}", flags)
        with contextlib.suppress(OSError):  # a file system that takes no advice
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def close(self) -> None:
        """Close the descriptor; the thread has another stretch, or the reader ends."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close  # the thread has ended


class _Mine(threading.local):
    """A thread's stretch: one at a time, however many files it reads."""

    stretch: _Stretch | None = None


_mine = _Mine()


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
        self._flags = self._nowait()
        self._direct = True  # as long as nothing speaks against it
        self._too_large = self.size > _memory_free()
        self._missed = False  # whether something was not in the cache
        self._meeting = threading.Lock()
        self._met = False
        self._disk: Disk | None = None
        self._stretches: weakref.WeakSet[_Stretch] = weakref.WeakSet()

    @property
    def cached(self) -> tuple[int, int] | None:
        """The descriptor and ``preadv``'s flags, as long as all was in the cache."""
        return (self._fd, self._flags) if self._at_hand() else None

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` with the file's bytes from ``offset``.

        Raises :class:`StoreError`, also if the file ends before.
        """
        nbytes, done = buffer.nbytes, 0
        if nbytes <= _PIECE and self._at_hand():
            # So far all was in the cache. Threads that stream come here tens of thousands of times
            # a second, and go on at the end of this.
            if not self._flags:
                deadline.check(f"reading {self._where}")
            try:
                done = os.preadv(self._fd, (buffer,), offset, self._flags)
            except OSError as cause:  # what else is the matter with it is found out below
                if cause.errno not in _NO_NOWAIT:
                    self._missed = True
            else:
                if done == nbytes:
                    return
                self._missed = True
        view = buffer.cast("B")
        while done < len(view):
            deadline.check(f"reading {self._where}")
            try:
                count = self._read(view[done:], offset + done)
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
        if self._disk is not None:
            self._disk.leave(self._fd)
        os.close(self._fd)
        for stretch in list(self._stretches):
            stretch.close()

    def _nowait(self) -> int:
        """The flag for reads that do not wait, if the file system takes it."""
        flag = getattr(os, "RWF_NOWAIT", 0)
        try:
            if flag:
                os.preadv(self._fd, (bytearray(1),), self.size, flag)  # nothing is there to read
        except OSError as cause:
            if cause.errno in _NO_NOWAIT:
                return 0
        return flag

    def _at_hand(self) -> bool:
        # Without the flag this is memory, or a file system that has to be waited for anyhow.
        return not self._missed and (self._flags != 0 or not self._too_large)

    def _read(self, view: memoryview, offset: int) -> int:
        if not self._going_on(offset) and (count := self._cached(view[:_PIECE], offset)):
            return count
        if self._too_large and (count := self._past_the_cache(view[:_PIECE], offset)):
            return count
        if not self._flags:
            return os.preadv(self._fd, [view[:_PIECE]], offset)
        return self._from_disk(view, offset)

    def _from_disk(self, view: memoryview, offset: int) -> int:
        """Read what is not in the cache by the better way."""
        disk = self._meet()
        if disk is not None and disk.past_the_cache():
            began = time.perf_counter()
            if count := self._past_the_cache(view[:_PIECE], offset):
                disk.took(time.perf_counter() - began, count, past=True)
                return count
        stretch = self._stretch(past=False)
        began = time.perf_counter()
        count = os.preadv(stretch.fd, [view[:_STEP]], offset)
        stretch.next = offset + count
        if disk is not None:
            disk.took(time.perf_counter() - began, count, past=False)
        return count

    def _meet(self) -> Disk | None:
        """The file's disk, which is told at once that the file is read."""
        if not self._met:
            with self._meeting:
                if not self._met:
                    disk = disk_of(self._fd)
                    with contextlib.suppress(OSError):  # no locks: nobody would know of anybody
                        if disk is not None:
                            disk.join(self._fd)
                            self._disk = disk
                    self._met = True
        return self._disk

    def _going_on(self, offset: int) -> bool:
        """Whether this thread reads the disk here: it asks the cache no more where it goes on."""
        stretch = _mine.stretch
        return stretch is not None and stretch.next == offset and stretch in self._stretches

    def _stretch(self, *, past: bool) -> _Stretch:
        """The thread's stretch of this file, through the cache or past it."""
        stretch = _mine.stretch
        if stretch is None or stretch not in self._stretches or stretch.past != past:
            if stretch is not None:
                _mine.stretch = None  # also where there is no descriptor for the next
                stretch.close()
            stretch = _mine.stretch = _Stretch(self._fd, past=past)
            self._stretches.add(stretch)
        return stretch

    def _cached(self, piece: memoryview, offset: int) -> int:
        """Take what the page cache has; 0 if that is nothing, or it cannot be asked.

        A page is asked for first: where nothing is, the kernel begins to read ahead for whoever
        asks, by as much as was asked for and more, and past the cache all of that comes twice.
        """
        if not self._flags:
            return 0
        try:
            if len(piece) > _BLOCK:
                os.preadv(self._fd, (piece[:_BLOCK],), offset, self._flags)
            return os.preadv(self._fd, (piece,), offset, self._flags)
        except BlockingIOError:
            return 0
        except OSError as cause:
            if cause.errno not in _NO_NOWAIT:
                raise
            self._flags = 0  # a file system that always answers at once, or never can
            return 0

    def _past_the_cache(self, piece: memoryview, offset: int) -> int:
        """Take it from the disk; 0 if this part of the file, or this memory, cannot be read so."""
        # Kernels differ in what alignment they want of memory, and some read before they refuse.
        aligned = not (offset | _address(piece)) % _BLOCK
        if not (self._direct and aligned and len(piece) >= _BLOCK):
            return 0
        try:
            stretch = self._stretch(past=True)
        except OSError:  # a file system without, or no descriptor left: the other way will tell
            self._direct = False
            return 0
        count = 0
        try:
            count = os.preadv(stretch.fd, [piece[: len(piece) // _BLOCK * _BLOCK]], offset)
        except OSError as cause:
            if cause.errno != errno.EINVAL:  # a file system that wants more alignment
                raise
        stretch.next = offset + count if count else -1
        return count


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


def _memory_free() -> int:
    """Bytes of memory that a cache can take without pushing out what is in use."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
