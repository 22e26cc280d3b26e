"""Objects as files in a folder: ``file:///path`` or a bare path.

    <root>/<key>            a visible object: whole, synced, never written to again
    <root>/.tmp/<random>    an object that is being written; its writer holds an flock on it
    <root>/.tmp/parts-<token>   an object that is sent in parts; it outlives its writer
    <root>/.tmp/lock        held for as long as a compare-and-swap or a deletion takes

An object is written under a temporary name and becomes visible by ``link`` (if there is none) or
``rename`` (compare-and-swap). A temporary file without a lock belongs to a writer that was killed;
the next writer sweeps it away. The root is created by the first write.

An etag is the SHA-256 of a small object, and the size, time and inode of a large one, which is
thus never read for it. Objects and folders that are symbolic links are refused: nothing outside
the root is read or written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    CredentialsRefused,
    DeadlineExceeded,
    NotFound,
    PreconditionFailed,
    StoreError,
    StoreFull,
    UsageError,
    WarmcastError,
)
from warmcast.manifests.stores import Begun, ObjectInfo, ObjectReader, Part, file_parts
from warmcast.manifests.stores.checks import (
    RESERVED,
    check_key,
    check_prefix,
    check_range,
    is_key_part,
    pieces,
)
from warmcast.manifests.stores.file_reader import FileReader
from warmcast.manifests.stores.folders import make_folders, sync

_SMALL = 1 << 16
_PIECE = 1 << 22
_LOCK = "lock"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
# O_NONBLOCK: opening a pipe that somebody put into the folder must not wait for its other end.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class FileStore:
    """An :class:`ObjectStore` in a folder. Safe between threads and between processes."""

    def __init__(self, url: str) -> None:
        self.root = _root(url)
        self.url = self.root.as_uri()
        self._swept = False

    def head(self, key: str, deadline: Deadline) -> ObjectInfo | None:
        """What the file system says of an object; None if there is none."""
        deadline.check(f"looking up {key}")
        with suppress(NotFound), self._opened(key) as fd:
            return ObjectInfo(key, os.fstat(fd).st_size, _etag(fd))
        return None

    def read(self, key: str, deadline: Deadline, *, limit: int = 1 << 28) -> tuple[bytes, str]:
        """A small object's bytes and its etag."""
        with self._opened(key) as fd:
            size = os.fstat(fd).st_size
            if size > limit:
                raise StoreError(
                    self.where(key), expected=f"{limit} bytes at most", found=f"{size}"
                )
            data = bytearray(size)
            self._fill(fd, key, 0, memoryview(data), deadline)
            return bytes(data), _etag(fd)

    def read_into(
        self,
        key: str,
        offset: int,
        buffer: memoryview,
        deadline: Deadline,
        *,
        etag: str | None = None,
    ) -> None:
        """Fill ``buffer`` with an object's bytes from ``offset``."""
        check_range(self.where(key), offset)
        with self._opened(key) as fd:
            if etag is not None and (found := _etag(fd)) != etag:
                raise PreconditionFailed(self.where(key), expected=etag, found=found)
            view = buffer.cast("B")
            if not view and offset > (size := os.fstat(fd).st_size):
                raise StoreError(
                    self.where(key), expected=f"an offset of {size} at most", found=offset
                )
            self._fill(fd, key, offset, view, deadline)

    def reader(self, key: str, deadline: Deadline) -> ObjectReader:
        """Open an object: a file that is replaced meanwhile does not change what is read."""
        deadline.check(f"opening {key}")
        with self._opened(key) as fd:
            return FileReader(os.dup(fd), self.where(key), partial(self._error, key))

    def create(self, key: str, data: bytes, deadline: Deadline) -> bool:
        """Write a small object if there is none; whether it was written."""
        deadline.check(f"writing {key}")
        if self.exists(key):
            return False
        with self._temporary(key) as (fd, name), self.explained(key):
            _write(fd, data)
            os.fsync(fd)
            return self.link(name, key)

    def replace(self, key: str, data: bytes, expected: str | None, deadline: Deadline) -> str:
        """Compare and swap; the new etag."""
        deadline.check(f"writing {key}")
        with self._temporary(key) as (fd, name), self.explained(key):
            _write(fd, data)
            os.fsync(fd)
            if expected is None:
                if not self.link(name, key):
                    raise PreconditionFailed(
                        self.where(key), expected="no object", found="one is there"
                    )
            else:
                with self._locked(deadline):
                    found = self.head(key, deadline)
                    if found is None or found.etag != expected:
                        raise PreconditionFailed(
                            self.where(key),
                            expected=expected,
                            found=found.etag if found else "no object",
                        )
                    path = self._path(key)
                    name.replace(path)
                    sync(path.parent)
            return _etag(fd)

    def upload(
        self,
        key: str,
        source: BinaryIO,
        size: int,
        crc32c: int,
        deadline: Deadline,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> bool:
        """Write ``size`` bytes of ``source`` if there is no such object."""
        deadline.check(f"writing {key}")
        if self.exists(key):
            return False
        with self._temporary(key) as (fd, name):
            for piece in pieces(self.where(key), source, size, crc32c, _PIECE, deadline):
                with self.explained(key):
                    _write(fd, piece.data)
                if progress is not None:
                    progress(len(piece.data))
            with self.explained(key):
                os.fsync(fd)
                return self.link(name, key)

    def begin_parts(self, key: str | None, deadline: Deadline) -> str:
        """Begin an object that is sent in parts; its token."""
        return file_parts.begin(self, deadline)

    def put_part(
        self,
        token: str,
        index: int,
        offset: int,
        data: memoryview,
        crc32c: int,
        deadline: Deadline,
    ) -> Part:
        """Write the bytes at ``offset``; they are on the disk when this returns."""
        return file_parts.put(self, token, index, offset, data, crc32c, deadline)

    def complete_parts(
        self, token: str, parts: Sequence[Part], key: str, crc32c: int, deadline: Deadline
    ) -> bool:
        """Make the object of these parts visible, if there is none; whether it was."""
        return file_parts.complete(self, token, parts, key, crc32c, deadline)

    def abort_parts(self, token: str, deadline: Deadline) -> None:
        """Take away what was begun."""
        file_parts.abort(self, token, deadline)

    def begun_parts(self, deadline: Deadline) -> Iterator[Begun]:
        """What was begun and has not ended; its age is that of its last part."""
        return file_parts.begun(self, deadline)

    def list(self, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        """The visible objects whose key begins with ``prefix``, in order of their keys."""
        check_prefix(prefix)
        folder, _, _ = prefix.rpartition("/")
        for key in self._keys(f"{folder}/" if folder else "", prefix, deadline):
            info = self.head(key, deadline)
            if info is not None:  # it may have gone since its folder was read
                yield info

    def delete(self, key: str, deadline: Deadline) -> None:
        """Take an object away; nothing happens if there is none."""
        deadline.check(f"deleting {key}")
        if not self.exists(key):
            return
        with self.explained(key), self._locked(deadline):
            path = self._path(key)
            path.unlink(missing_ok=True)
            sync(path.parent)

    def close(self) -> None:
        """Nothing is held between calls: failures remove their files, writers sweep the dead's."""

    # Keys and paths

    def where(self, key: str) -> str:
        """A key as messages name it."""
        return f"{self.url}/{key}"

    def _path(self, key: str) -> Path:
        check_key(key)
        path = self.root / key
        if os.path.realpath(path.parent) != str(path.parent):
            raise StoreError(
                self.where(key),
                expected="folders inside the root",
                found="a symbolic link among them",
                do="copy what it points to into the store",
            )
        return path

    def exists(self, key: str) -> bool:
        """Whether there is an object; :class:`StoreError` if something else is there."""
        path = self._path(key)
        try:
            with self.explained(key):
                mode = path.lstat().st_mode
        except NotFound:
            return False
        if not stat.S_ISREG(mode):
            raise StoreError(self.where(key), expected="a plain file", found=stat.filemode(mode))
        return True

    def _keys(self, folder: str, prefix: str, deadline: Deadline) -> Iterator[str]:
        """Keys below ``folder``; a folder sorts as its name with ``/``, as its keys do."""
        deadline.check(f"listing {self.url}/{prefix}")
        names = []
        try:
            with self.explained(folder), os.scandir(self.root / folder) as entries:
                for entry in entries:
                    if not is_key_part(entry.name) or (not folder and entry.name == RESERVED):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        names.append(f"{entry.name}/")
                    elif entry.is_file(follow_symlinks=False):
                        names.append(entry.name)
        except NotFound:
            return
        for name in sorted(names):
            key = folder + name
            if key.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._keys(key, prefix, deadline)
            elif key.startswith(prefix):
                yield key

    # Reading

    @contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        """A descriptor of an object, for reading; :class:`NotFound` if there is none."""
        path = self._path(key)
        with self.explained(key):
            fd = os.open(path, _OPEN)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise NotFound(self.where(key), expected="an object", found="no plain file")
                yield fd
            finally:
                os.close(fd)

    def _fill(self, fd: int, key: str, offset: int, view: memoryview, deadline: Deadline) -> None:
        done = 0
        while done < len(view):
            deadline.check(f"reading {self.where(key)}")
            count = os.preadv(fd, [view[done : done + _PIECE]], offset + done)
            if count == 0:
                raise StoreError(
                    self.where(key),
                    expected=f"{len(view)} bytes at offset {offset}",
                    found=f"{done}",
                )
            done += count

    # Writing

    @contextmanager
    def _temporary(self, key: str) -> Iterator[tuple[int, Path]]:
        """A new temporary file, held by a lock while it is written, and gone afterwards."""
        folder = self.root / RESERVED
        self._path(key)
        with self.explained(key):
            make_folders(folder)
            self._sweep(folder)
            fd, path = _create_locked(folder)
        try:
            yield fd, path
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def link(self, name: Path, key: str) -> bool:
        """Make a temporary file visible under its key, unless there is an object already."""
        path = self._path(key)
        make_folders(path.parent)
        try:
            os.link(name, path)
        except FileExistsError:
            return False
        sync(path.parent)
        return True

    def _sweep(self, folder: Path) -> None:
        """Remove, once in this store's life, the temporary files of writers that were killed."""
        if self._swept:
            return
        self._swept = True
        for path in folder.iterdir():
            if path.name == _LOCK or path.name.startswith(file_parts.PREFIX):
                continue
            # Gone already, still being written, or another user's, whose own writers sweep it.
            with suppress(FileNotFoundError, BlockingIOError, PermissionError):
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(fd)

    @contextmanager
    def _locked(self, deadline: Deadline) -> Iterator[None]:
        """The store's lock. ``flock`` knows no timeout, so it is asked again until the deadline."""
        folder = self.root / RESERVED
        make_folders(folder)
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            pause = 0.0005
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if deadline.expired:
                        raise DeadlineExceeded(
                            f"the lock of {self.url}",
                            expected="to be given up in time",
                            found="another process holds it",
                        ) from None
                    time.sleep(min(pause, deadline.remaining()))
                    pause = min(2 * pause, 0.02)
            yield
        finally:
            os.close(fd)

    # Errors

    @contextmanager
    def explained(self, key: str) -> Iterator[None]:
        """Turn the system's errors into the store's."""
        try:
            yield
        except WarmcastError:  # a deadline's error is an OSError too
            raise
        except OSError as cause:
            raise self._error(key, cause) from cause

    def _error(self, key: str, cause: OSError) -> StoreError:
        where = self.where(key)
        if cause.errno == errno.ENOENT:
            return NotFound(where, expected="an object", found="none")
        if cause.errno in _FULL:
            return StoreFull(where, found=cause.strerror, do="free space, or raise the quota")
        if cause.errno in _REFUSED:
            return CredentialsRefused(
                where,
                expected="permission",
                found=cause.strerror,
                do=f"run as a user who may use {self.root}",
            )
        if cause.errno == errno.ENOTDIR:
            return NotFound(where, expected="folders above it", found="an object of their name")
        if cause.errno == errno.ELOOP:
            return StoreError(where, expected="a file", found="a symbolic link")
        return StoreError(where, found=cause.strerror or repr(cause))


def _root(url: str) -> Path:
    parts = urlsplit(url)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost") or not parts.path:
        raise UsageError("origin", expected="file:///path or a path", found=repr(url))
    return Path(unquote(parts.path) if parts.scheme else url).expanduser().resolve()


def _etag(fd: int) -> str:
    """The version of an open object."""
    status = os.fstat(fd)
    if status.st_size > _SMALL:
        return f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"
    return hashlib.sha256(os.pread(fd, _SMALL, 0)).hexdigest()


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _create_locked(folder: Path) -> tuple[int, Path]:
    """Create a temporary file and lock it, however often a sweeper comes in between."""
    while True:
        path = folder / secrets.token_hex(16)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return fd, path
        except BlockingIOError:
            pass  # the sweeper has it, and removes it
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)
