"""What stores that are asked over a network read alike, by their own ``head`` and ``read``."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import NotFound, PreconditionFailed, StoreError

if TYPE_CHECKING:
    from warmcast.manifests.stores import ObjectInfo, ObjectStore


class VersionReader:
    """Reads ranges of the version that an object had when it was opened, or fails."""

    local = False
    cached = None
    step = 16 << 20  # a request costs about a millisecond of the processor's time

    def __init__(self, store: ObjectStore, info: ObjectInfo) -> None:
        self.size = info.size
        self._store = store
        self._info = info

    @classmethod
    def open(cls, store: ObjectStore, key: str, deadline: Deadline) -> VersionReader:
        """Look the object up; raises :class:`NotFound`."""
        info = store.head(key, deadline)
        if info is None:
            raise NotFound(f"{store.url}/{key}", expected="an object", found="none")
        return cls(store, info)

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` with the object's bytes from ``offset``."""
        info = self._info
        self._store.read_into(info.key, offset, buffer, deadline, etag=info.etag)

    def close(self) -> None:
        """The store keeps the connections."""


def check_empty_read(
    store: ObjectStore, key: str, offset: int, etag: str | None, deadline: Deadline
) -> None:
    """Judge a read of no bytes, for which HTTP has no range; raises as ``read_into`` does."""
    where = f"{store.url}/{key}"
    info = store.head(key, deadline)
    if info is None:
        raise NotFound(where, expected="an object", found="none")
    if etag is not None and info.etag != etag:
        raise PreconditionFailed(where, expected=etag, found=info.etag)
    if offset > info.size:
        raise StoreError(where, expected=f"an offset of {info.size} at most", found=offset)


def etag_if_equal(store: ObjectStore, key: str, data: bytes, deadline: Deadline) -> str | None:
    """An object's etag if it holds ``data``: an attempt wrote it whose answer was lost."""
    info = store.head(key, deadline)
    if info is None or info.size != len(data):
        return None
    with suppress(NotFound):
        found, etag = store.read(key, deadline)
        return etag if found == data else None
    return None
