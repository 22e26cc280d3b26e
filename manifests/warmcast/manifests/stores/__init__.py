"""The ObjectStore protocol, and the one place that knows which stores there are.

A store holds objects (bytes under a key; keys are ``/``-separated, of ``[A-Za-z0-9._/@+-]``) below
one URL. Every call takes a :class:`Deadline` and ends by it. Errors are those of
``errors.StoreError``; a missing object is :class:`NotFound`, for ``head`` it is None.

An object becomes visible whole or not at all, and its bytes are checked by the store itself
against the CRC32C it was sent with, where the store can.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol
from urllib.parse import urlsplit

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object: size in bytes, its version, its CRC32C where it knows it."""

    key: str
    size: int
    etag: str
    crc32c: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part that a store has of an object that is not there yet.

    ``index`` counts from 0; all but the last part of an object are of one size in bytes. ``tag`` is
    how the store knows it.
    """

    index: int
    size: int
    crc32c: int
    tag: str


@dataclass(frozen=True, slots=True)
class Begun:
    """An object that somebody began to send in parts, and the seconds since."""

    token: str
    age: float


class ObjectReader(Protocol):
    """One version of an object, held: reads are of that version, or fail. Safe between threads.

    ``size`` in bytes; ``step`` is how many bytes are best asked for at once; ``local`` tells that
    they come from this machine's own files.
    """

    size: int
    step: int
    local: bool

    @property
    def cached(self) -> tuple[int, int] | None:
        """A descriptor and the flags of ``preadv`` by which what is in this machine's memory can be
        read without waiting; None where there is none, or nothing more to be had so.
        """

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` with the object's bytes from ``offset``; raises as the store does."""

    def close(self) -> None:
        """Give back what is held."""


class ObjectStore(Protocol):
    """Objects under keys. A new store is one file beside this one and a line in ``_STORES``."""

    url: str

    def head(self, key: str, deadline: Deadline) -> ObjectInfo | None:
        """What the store says of an object; None if there is none."""

    def read(self, key: str, deadline: Deadline, *, limit: int = 1 << 28) -> tuple[bytes, str]:
        """A small object's bytes and its etag.

        Raises :class:`NotFound`, and :class:`StoreError` if it holds more than ``limit`` bytes.
        """

    def read_into(
        self,
        key: str,
        offset: int,
        buffer: memoryview,
        deadline: Deadline,
        *,
        etag: str | None = None,
    ) -> None:
        """Fill ``buffer`` with an object's bytes from ``offset``.

        Raises :class:`NotFound`, :class:`PreconditionFailed` if ``etag`` is given and the object
        is another version, and :class:`StoreError` if the object ends before the buffer is full.
        """

    def reader(self, key: str, deadline: Deadline) -> ObjectReader:
        """Open an object, to read many ranges of it; raises :class:`NotFound`."""

    def create(self, key: str, data: bytes, deadline: Deadline) -> bool:
        """Write a small object if there is none; whether it was written."""

    def replace(self, key: str, data: bytes, expected: str | None, deadline: Deadline) -> str:
        """Compare and swap: write if the object's etag is ``expected`` (None: if there is none).

        Returns the new etag. Raises :class:`PreconditionFailed` if somebody else wrote first.
        """

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
        """Write ``size`` bytes of ``source``, from where it stands, if there is no such object.

        ``crc32c`` is that of all the bytes; the store's own must equal it before the object is
        visible. ``progress`` is told the bytes sent since it was last called. Returns whether the
        object was written. What is unfinished when it fails is taken away.

        Raises :class:`IntegrityError` if the bytes that arrived are not the bytes promised.
        """

    # Objects that are sent in parts by whoever has the token: this process, or another after it.

    def begin_parts(self, key: str | None, deadline: Deadline) -> str:
        """Begin an object, which stays invisible until it is completed; the token that names it.

        ``key`` is where it will be, None if that is not known before its last byte is: a store may
        then have to copy it, itself.
        """

    def put_part(
        self,
        token: str,
        index: int,
        offset: int,
        data: memoryview,
        crc32c: int,
        deadline: Deadline,
    ) -> Part:
        """Send the bytes at ``offset``, several parts at once; a part may be sent again.

        The store checks ``crc32c``, if it can. Parts other than the last have one size, of 5 MiB
        or more and a multiple of 256 KiB, and there are 10,000 at most. A part that was returned
        outlives this process and this machine's crash. Raises :class:`NotFound` if nothing was
        begun under the token, or it has ended.
        """

    def complete_parts(
        self, token: str, parts: Sequence[Part], key: str, crc32c: int, deadline: Deadline
    ) -> bool:
        """Make the object of these parts, in order, visible, if there is none; whether it was.

        Takes away what was begun, also where there is an object already. May be called again
        after a failure or a kill. Raises :class:`IntegrityError` if the object would have another
        CRC32C; it is not visible then.
        """

    def abort_parts(self, token: str, deadline: Deadline) -> None:
        """Take away what was begun; nothing happens if it has ended."""

    def begun_parts(self, deadline: Deadline) -> Iterator[Begun]:
        """What was begun and has not ended, as far as the store can tell."""

    def list(self, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        """The visible objects whose key begins with ``prefix``, in order of their keys."""

    def delete(self, key: str, deadline: Deadline) -> None:
        """Take an object away; nothing happens if there is none."""

    def close(self) -> None:
        """Give back connections and what an earlier failure may have left unfinished."""


_STORES = {
    "file": "warmcast.manifests.stores.file:FileStore",
    "gs": "warmcast.manifests.stores.gcs:GcsStore",
    "s3": "warmcast.manifests.stores.s3:S3Store",
}
_EXTRAS = {"gs": "gcs"}  # where the optional dependency is not called as the scheme is


def open_store(url: str) -> ObjectStore:
    """Open the store at ``url``: ``file:///path`` (or a bare path), ``s3://`` or ``gs://bucket/prefix``.

    A store's client library is imported here, when its scheme is first used.
    """
    try:
        scheme = urlsplit(url).scheme or "file"
    except ValueError as cause:
        raise UsageError(f"origin {url!r}", expected="a URL", found=str(cause)) from None
    target = _STORES.get(scheme)
    if target is None:
        raise UsageError(
            f"origin {url!r}",
            expected=f"a URL of {', '.join(f'{s}://' for s in _STORES)}",
            found=f"{scheme}://",
        )
    module, _, name = target.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as cause:
        raise UsageError(
            f"origin {url!r}",
            expected=f"the package {cause.name!r}",
            found="it is not installed",
            do=f"pip install 'warmcast[{_EXTRAS.get(scheme, scheme)}]'",
        ) from cause
    store: ObjectStore = kind(url)
    return store
