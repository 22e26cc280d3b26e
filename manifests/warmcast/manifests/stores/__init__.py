"""The ObjectStore protocol, and the one place that knows which stores there are.

A store holds objects (bytes under a key; keys are ``/``-separated, of ``[A-Za-z0-9._/@+-]``) below
one URL. Every call takes a :class:`Deadline` and ends by it. Errors are those of
``errors.StoreError``; a missing object is :class:`NotFound`, for ``head`` it is None.

An object becomes visible whole or not at all, and its bytes are checked by the store itself
against the CRC32C it was sent with, where the store can.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
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


class ObjectReader(Protocol):
    """One version of an object, held: reads are of that version, or fail. Safe between threads.

    ``size`` in bytes; ``step`` is how many bytes are best asked for at once; ``local`` tells that
    they come from this machine's own files.
    """

    size: int
    step: int
    local: bool

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
