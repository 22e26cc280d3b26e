"""The disk cache: blobs under their SHA-256, arriving chunk by chunk.

Below one folder, which one agent holds at a time::

    lock                    held while an agent runs; says who it is
    blobs/<ab>/<sha256>     whole
    partial/<sha256>        those of which some chunks are there, each in its place
    partial/<sha256>.there  a byte a chunk: 1 when it is there

A chunk is written only after its CRC32C held, then marked. What is found at a start may have been
torn by a crash or altered since: each chunk of it is checked before it is used for the first time.
A blob moves to its last name when its last chunk has come.

Sizes are counted by the cache's own bytes. Above ``high`` the blobs that were used longest ago are
deleted until ``low`` is reached; one that somebody reads stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.errors import StoreError, UsageError
from warmcast.manifests.manifest import FileEntry, Manifest

log = logging.getLogger("warmcast")

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PIECE = 1 << 20


class CacheFull(StoreError):
    """There is no room, and nothing that could be deleted."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a blob is: its SHA-256, its length in bytes, and the CRC32C of each of its chunks."""

    sha256: str
    size: int
    chunk_size: int
    crcs: Sequence[str]

    @classmethod
    def of(cls, manifest: Manifest, file: FileEntry) -> Spec:
        """A manifest's file."""
        return cls(file.sha256, file.size, manifest.chunk_size, file.chunks)

    def span(self, number: int) -> tuple[int, int]:
        """Where a chunk begins, and its length."""
        begin = number * self.chunk_size
        return begin, min(self.chunk_size, self.size - begin)


class Blob:
    """One blob in the cache. Safe between threads."""

    def __init__(self, cache: Cache, spec: Spec) -> None:
        self.spec = spec
        self.used = time.monotonic()
        self.users = 0
        self._cache = cache
        self._lock = threading.Lock()
        self._there = bytearray(len(spec.crcs))
        self._checked = bytearray(len(spec.crcs))
        self._whole = False
        self._marks = -1
        self._fd = -1
        try:
            with cache.explained():
                self._find()
        except BaseException:
            self.close()
            raise

    # What is there

    @property
    def path(self) -> Path:
        """Where the bytes are now; who has opened the file keeps it, whatever becomes of it."""
        return self._cache.whole(self.spec.sha256) if self._whole else self._partial

    @property
    def whole(self) -> bool:
        """Whether every chunk is there."""
        return self._whole

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that are there."""
        if self._whole:
            return self.spec.size
        return sum(self.spec.span(n)[1] for n, there in enumerate(self._there) if there)

    def has(self, number: int) -> bool:
        """Whether a chunk is there and right; one found at the start is checked now."""
        if not self._there[number]:
            return False
        return bool(self._checked[number]) or self.check(number)

    def known(self, number: int) -> bool:
        """Whether a chunk is there and was found right since the start; nothing is read."""
        return bool(self._there[number] and self._checked[number])

    def missing(self) -> list[int]:
        """The chunks that are not there, whatever those that are may turn out to be."""
        return [number for number, there in enumerate(self._there) if not there]

    def check(self, number: int) -> bool:
        """Whether a chunk's bytes on disk are right now; one that is not is there no more."""
        begin, length = self.spec.span(number)
        found = 0
        with contextlib.suppress(OSError):
            for at in range(begin, begin + length, _PIECE):
                piece = os.pread(self._fd, min(_PIECE, begin + length - at), at)
                found = crc32c(piece, found)
        if to_hex(found) == self.spec.crcs[number]:
            self._checked[number] = 1
            return True
        log.warning(
            "%s: chunk %d has CRC32C %s, not %s; it is fetched again",
            self.path, number, to_hex(found), self.spec.crcs[number],
        )  # fmt: skip
        self._forget(number)
        return False

    # Use

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the blob while the context is open."""
        with self._cache.lock:
            self.users += 1
        try:
            yield
        finally:
            with self._cache.lock:
                self.users -= 1
                self.used = time.monotonic()

    def open(self) -> int:
        """A descriptor of the file, which is the caller's, with a place in the file of its own."""
        # A duplicate would share the place with all others, and where sendfile cannot be used (TLS)
        # the event loop reads from there: one answer would have the bytes of another.
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def write(self, number: int, data: memoryview) -> None:
        """Put a chunk, whose CRC32C the caller has checked, in its place.

        Raises :class:`CacheFull`, and :class:`StoreError` for a disk that refuses.
        """
        begin, length = self.spec.span(number)
        self._cache.make_room(length)
        try:
            done = 0
            while done < length:
                done += os.pwrite(self._fd, data[done:length], begin + done)
        except OSError as cause:
            self._cache.gave_back(length)
            if cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CacheFull(
                    f"cache {self._cache.folder}",
                    expected=f"{length} bytes of room",
                    found=os.strerror(cause.errno),
                    do="give the cache a larger disk, or lower --high",
                ) from None
            raise StoreError(f"cache {self._cache.folder}", found=cause) from cause
        with self._lock:
            if self._there[number]:
                self._cache.gave_back(length)
                return
            self._there[number] = self._checked[number] = 1
            if not self._whole:
                with self._cache.explained():
                    os.pwrite(self._marks, b"\1", number)
                if all(self._there):
                    self._finish()

    # The files

    @property
    def _partial(self) -> Path:
        return self._cache.partial(self.spec.sha256)

    def _find(self) -> None:
        whole = self._cache.whole(self.spec.sha256)
        if whole.is_file() and whole.stat().st_size == self.spec.size:
            self._whole = True
            self._there[:] = b"\1" * len(self._there)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if self._whole:
            self._fd = os.open(whole, flags)
            return
        self._fd = os.open(self._partial, flags | os.O_CREAT, 0o644)
        marks = self._partial.with_suffix(".there")
        self._marks = os.open(marks, flags | os.O_CREAT, 0o644)
        if os.fstat(self._fd).st_size != self.spec.size:
            os.ftruncate(self._marks, 0)
            os.ftruncate(self._fd, self.spec.size)
        known = os.pread(self._marks, len(self._there), 0)
        self._there[: len(known)] = bytes(mark == 1 for mark in known)
        if self._there and all(self._there):
            self._finish()

    def _finish(self) -> None:
        whole = self._cache.whole(self.spec.sha256)
        with self._cache.explained():
            whole.parent.mkdir(exist_ok=True)
            self._partial.rename(whole)
            self._partial.with_suffix(".there").unlink(missing_ok=True)
        os.close(self._marks)
        self._marks = -1
        self._whole = True

    def _forget(self, number: int) -> None:
        with self._lock:
            if not self._there[number]:
                return
            if self._whole:
                # Back to its first name: no name promises more than is there.
                with self._cache.explained():
                    marks = self._partial.with_suffix(".there")
                    self._marks = os.open(marks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                    os.pwrite(self._marks, bytes(self._there), 0)
                    self._cache.whole(self.spec.sha256).rename(self._partial)
                self._whole = False
            self._there[number] = self._checked[number] = 0
            os.pwrite(self._marks, b"\0", number)
        self._cache.gave_back(self.spec.span(number)[1])

    def delete(self) -> None:
        """Delete the blob's files."""
        for path in (self.path, self._partial.with_suffix(".there")):
            path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the blob's files."""
        for fd in (self._fd, self._marks):
            if fd >= 0:
                os.close(fd)
        self._fd = self._marks = -1


class Cache:
    """A folder of blobs, of ``high`` bytes at most. Safe between threads."""

    def __init__(self, folder: Path, high: int, low: int, holder: str) -> None:
        """``holder`` says who holds the folder from now on.

        Raises :class:`UsageError` for a folder that cannot be written, or that another agent holds.
        """
        if not 0 < low <= high:
            raise UsageError("--low", expected=f"more than 0, at most --high {high}", found=low)
        self.folder = folder
        self.evicted = 0
        self._high = high
        self._low = low
        self.lock = threading.RLock()
        self._blobs: dict[str, Blob] = {}
        self._found: dict[str, int] = {}  # bytes of what no agent has asked for since the start
        with self.explained():
            for name in ("blobs", "partial", "manifests"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            self._held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self.explained():
                os.ftruncate(self._held, 0)
                os.pwrite(self._held, holder.encode(), 0)
        except BlockingIOError:
            other = os.pread(self._held, 512, 0).decode(errors="replace")
            os.close(self._held)
            raise UsageError(
                f"cache {folder}",
                expected="a folder of this agent's own",
                found=f"{other} holds it",
                do="end that one, or name another folder",
            ) from None
        except BaseException:
            os.close(self._held)
            raise
        self._used = self._look_around()

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks that are there."""
        return self._used

    @property
    def in_use(self) -> int:
        """Blobs that somebody reads or writes."""
        with self.lock:
            return sum(blob.users > 0 for blob in self._blobs.values())

    def whole(self, sha256: str) -> Path:
        """The name of a whole blob."""
        return self.folder / "blobs" / sha256[:2] / sha256

    def partial(self, sha256: str) -> Path:
        """The name of a blob that is not whole yet."""
        return self.folder / "partial" / sha256

    @contextmanager
    def use(self, spec: Spec) -> Iterator[Blob]:
        """A blob, with as many of its chunks as are there; it stays while the context is open."""
        with ExitStack() as stack:
            with self.lock:  # not to be deleted in between
                blob = self._blob(spec)
                stack.enter_context(blob.in_use())
            yield blob

    def _blob(self, spec: Spec) -> Blob:
        with self.lock:
            blob = self._blobs.get(spec.sha256)
            if blob is not None and blob.spec.chunk_size != spec.chunk_size:
                raise StoreError(
                    f"blob {spec.sha256}",
                    expected=f"chunks of {blob.spec.chunk_size} bytes, as it is cached",
                    found=f"a manifest that cuts it into {spec.chunk_size}",
                )
            if blob is None:
                blob = self._blobs[spec.sha256] = Blob(self, spec)
                self._used += blob.nbytes - self._found.pop(spec.sha256, 0)
            return blob

    def make_room(self, nbytes: int) -> None:
        """Count ``nbytes`` more, deleting what was used longest ago if they are too many.

        Raises :class:`CacheFull` if all that is there is being read.
        """
        with self.lock:
            if self._used + nbytes > self._high:
                self._evict(self._low - nbytes)
            if self._used + nbytes > self._high:
                raise CacheFull(
                    f"cache {self.folder}",
                    expected=f"{nbytes} bytes of room",
                    found=f"{self._used} of {self._high} bytes, all in use",
                    do="raise --high",
                )
            self._used += nbytes

    def gave_back(self, nbytes: int) -> None:
        """Bytes that were counted are not there."""
        with self.lock:
            self._used -= nbytes

    def _evict(self, down_to: int) -> None:
        for sha256 in list(self._found):  # nobody has wanted it since the start
            if self._used <= down_to:
                return
            nbytes = self._found.pop(sha256)
            for path in (self.whole(sha256), self.partial(sha256)):
                path.unlink(missing_ok=True)
            self.partial(sha256).with_suffix(".there").unlink(missing_ok=True)
            self._used -= nbytes
            self.evicted += nbytes
        for blob in sorted(self._blobs.values(), key=lambda blob: blob.used):
            if self._used <= down_to:
                return
            if blob.users == 0:
                del self._blobs[blob.spec.sha256]
                nbytes = blob.nbytes
                self._used -= nbytes
                self.evicted += nbytes
                log.info("%s is deleted: %d bytes", blob.path, nbytes)
                blob.delete()

    def _look_around(self) -> int:
        """Note what an earlier agent has left; what is none of the cache's is left alone."""
        for path in (self.folder / "blobs").glob("??/*"):
            if _SHA256.fullmatch(path.name):
                self._found[path.name] = path.stat().st_size
        for path in (self.folder / "partial").iterdir():
            if _SHA256.fullmatch(path.name) and path.name not in self._found:
                self._found[path.name] = path.stat().st_blocks * 512
        return sum(self._found.values())

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the system's errors into one line."""
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as cause:
            raise StoreError(
                f"cache {self.folder}",
                expected="a folder that can be written",
                found=os.strerror(cause.errno) if cause.errno else cause,
            ) from cause

    def close(self) -> None:
        """Close all files, and let another agent have the folder."""
        with self.lock:
            for blob in self._blobs.values():
                blob.close()
            self._blobs.clear()
            os.close(self._held)
