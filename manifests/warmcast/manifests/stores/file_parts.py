"""Objects in a folder that are sent in parts, by one process or by several after each other.

    <root>/.tmp/parts-<token>    the object, as far as it is there; it outlives its writers

Parts are written where they belong, and each is on the disk when it is told of: a journal that says
so must not know more than a disk after a crash. The object becomes visible by ``link``.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from warmcast.manifests.checksum import combine, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, UsageError
from warmcast.manifests.stores import Begun, Part
from warmcast.manifests.stores.checks import RESERVED, is_key_part
from warmcast.manifests.stores.folders import make_folders, sync

if TYPE_CHECKING:
    from warmcast.manifests.stores.file import FileStore

PREFIX = "parts-"
"""What the names of such files begin with, which no sweeper takes."""

_PIECE = 1 << 22


def begin(store: FileStore, deadline: Deadline) -> str:
    """Begin an object; its token."""
    deadline.check("beginning an object")
    token = secrets.token_hex(16)
    path = _path(store, token)
    with store.explained(path.name):
        make_folders(path.parent)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        sync(path.parent)
    return token


def put(
    store: FileStore,
    token: str,
    index: int,
    offset: int,
    data: memoryview,
    crc32c: int,
    deadline: Deadline,
) -> Part:
    """Write a part."""
    path = _path(store, token)
    with store.explained(path.name):
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(data):
                deadline.check(f"writing {path.name}")
                done += os.pwrite(fd, data[done : done + _PIECE], offset + done)
            os.fdatasync(fd)
        finally:
            os.close(fd)
    return Part(index, len(data), crc32c, f"{offset:x}")


def complete(
    store: FileStore,
    token: str,
    parts: Sequence[Part],
    key: str,
    crc32c: int,
    deadline: Deadline,
) -> bool:
    """Link the object to its key, if there is none; whether it was."""
    deadline.check(f"writing {key}")
    path = _path(store, token)
    size = whole = 0
    for part in parts:
        whole = combine(whole, part.crc32c, part.size)
        size += part.size
    with store.explained(key):
        if store.exists(key):
            path.unlink(missing_ok=True)
            return False
        found = path.stat().st_size
        if (found, whole) != (size, crc32c):
            raise IntegrityError(
                store.where(key),
                expected=f"{size} bytes, CRC32C {to_hex(crc32c)}",
                found=f"{found} bytes, CRC32C {to_hex(whole)}",
            )
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        written = store.link(path, key)
        path.unlink(missing_ok=True)
        return written


def abort(store: FileStore, token: str, deadline: Deadline) -> None:
    """Remove what was begun."""
    deadline.check("taking away what was begun")
    path = _path(store, token)
    with store.explained(path.name):
        path.unlink(missing_ok=True)


def begun(store: FileStore, deadline: Deadline) -> Iterator[Begun]:
    """What was begun and has not ended; its age is that of its last part."""
    deadline.check("listing what was begun")
    for path in sorted((store.root / RESERVED).glob(f"{PREFIX}*")):
        with suppress(FileNotFoundError):
            age = max(0.0, time.time() - path.stat().st_mtime)
            yield Begun(path.name.removeprefix(PREFIX), age)


def _path(store: FileStore, token: str) -> Path:
    """Where an object lies that is sent in parts."""
    if not is_key_part(token):
        raise UsageError("token", expected="one that begin_parts gave", found=repr(token))
    return store.root / RESERVED / f"{PREFIX}{token}"
