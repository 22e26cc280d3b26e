"""Objects below a prefix of a bucket, through the stores' own clients.

A file's ``version`` is its object's etag (S3) or generation (GCS), and every range is read on the
condition that the object still has it. Names need not be keys of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from warmcast.flows.errors import SourceNotFound
from warmcast.flows.local import LocalFile
from warmcast.flows.upstreams import UpstreamFile
from warmcast.flows.upstreams.failures import explained
from warmcast.flows.upstreams.listing import listing
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import NotFound
from warmcast.manifests.stores import ObjectInfo, ObjectReader, ObjectStore
from warmcast.manifests.stores.readers import VersionReader

_LARGE = 1 << 20
"""Bytes from which an object is worth a request that tells its CRC32C."""

_AT_ONCE = 8


class BucketUpstream:
    """An :class:`Upstream` over a store, which it closes."""

    revision = ""

    def __init__(self, store: ObjectStore, *, ask_checksums: bool) -> None:
        """``ask_checksums``: listings of this store tell no CRC32C, and questions do."""
        self.name = store.url
        self._store = store
        self._ask_checksums = ask_checksums

    def files(self, deadline: Deadline) -> tuple[UpstreamFile, ...]:
        """The objects below the prefix, in order of their names, without markers of folders."""
        with explained(listed=False):
            found: Iterable[ObjectInfo] = [
                info
                for info in self._store.list("", deadline)
                if info.size or not (info.key.endswith("/") or info.key == "")
            ]
            if self._ask_checksums:
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    found = list(pool.map(lambda info: self._asked(info, deadline), found))
            files = listing(
                self.name,
                (UpstreamFile(i.key, i.size, crc32c=i.crc32c, version=i.etag) for i in found),
            )
        if not files:
            raise SourceNotFound(
                self.name,
                expected="objects below this prefix",
                found="none",
                do="name the folder that holds config.json and the weights",
            )
        return files

    def reader(self, file: UpstreamFile, deadline: Deadline) -> ObjectReader:
        """An object, to read ranges of the version that was listed."""
        info = ObjectInfo(file.path, file.size, file.version, file.crc32c)
        return _Reader(VersionReader(self._store, info))

    def local(self, file: UpstreamFile, deadline: Deadline) -> LocalFile | None:
        """None: nothing lies here."""
        return None

    def close(self) -> None:
        """Give back the connections."""
        self._store.close()

    def _asked(self, info: ObjectInfo, deadline: Deadline) -> ObjectInfo:
        """The object with its CRC32C, where there is one; as it is now."""
        if info.size < _LARGE:
            return info
        found = self._store.head(info.key, deadline)
        if found is None:
            raise NotFound(f"{self.name}/{info.key}", expected="an object", found="none")
        return found


class _Reader:
    """A store's reader whose failures are those of a source."""

    local = False
    cached = None

    def __init__(self, reader: VersionReader) -> None:
        self.size = reader.size
        self.step = reader.step
        self._reader = reader

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` from ``offset``; :class:`SourceChanged` if it is another version."""
        with explained(listed=True):
            self._reader.read_into(offset, buffer, deadline)

    def close(self) -> None:
        """Nothing is held."""
        self._reader.close()
