"""Readers of objects whose store is asked for each range."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import NotFound

if TYPE_CHECKING:
    from warmcast.manifests.stores import ObjectInfo, ObjectStore


class VersionReader:
    """Reads ranges of the version that an object had when it was opened, or fails."""

    local = False
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
