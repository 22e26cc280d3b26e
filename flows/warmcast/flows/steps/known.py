"""Known files: what a file of an upstream became when it was deployed before, by anybody.

    upstreams/<key>.json    a :class:`KnownFile`, under a digest of what the upstream tells of it

What a manifest says of a file depends on its bytes alone (and its path, which is put in when it is
recalled). So it is kept under the bytes' SHA-256, and, for upstreams that do not publish one, under
the upstream, path, size and version too. A file whose upstream tells neither is not known.

A file is known only while the origin has its blob: then nothing of it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from pydantic import Field

from warmcast.flows.local import LocalFile
from warmcast.flows.steps.measure import Measured
from warmcast.flows.steps.mirror import has_blob
from warmcast.flows.upstreams import Upstream, UpstreamFile
from warmcast.manifests.canonical import digest
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidData
from warmcast.manifests.header import Header, HeaderTensor
from warmcast.manifests.manifest import FileEntry, Record, Sha256, TensorEntry, parse_record
from warmcast.manifests.origin import Origin
from warmcast.manifests.stores import ObjectReader

_KIND = "upstreams"
_AT_ONCE = 16
_SMALL = 16 << 20
"""Bytes of the largest file that is read from the origin instead of its upstream."""

_MOST_METADATA = 1 << 20
"""Characters of a header's metadata that are kept; files with more are read again."""


class KnownFile(Record):
    """What a file became: its entry, and of weights their tensors and the header's metadata."""

    file: FileEntry
    tensors: tuple[TensorEntry, ...] = ()
    metadata: dict[str, str] = Field(default_factory=dict)

    @property
    def measured(self) -> Measured:
        """The same, as the step that measures tells it."""
        return Measured(self.file, self.tensors)

    @property
    def header(self) -> Header:
        """The header of weights, by their entries."""
        tensors = tuple(
            HeaderTensor(t.name, t.dtype, t.shape, t.begin, t.end)
            for t in sorted(self.tensors, key=lambda t: (t.begin, t.end))
        )
        begin = min((t.begin for t in tensors), default=self.file.size)
        return Header(tensors, self.metadata, begin)

    def under(self, path: str) -> KnownFile:
        """The same bytes under another path."""
        return KnownFile(
            file=self.file.model_copy(update={"path": path}),
            tensors=tuple(t.model_copy(update={"file": path}) for t in self.tensors),
            metadata=self.metadata,
        )


@dataclass(frozen=True, slots=True)
class Known:
    """What an origin knows of the files of one upstream. Safe between threads."""

    origin: Origin
    upstream: str

    def recall(
        self,
        file: UpstreamFile,
        deadline: Deadline,
        *,
        weights: bool,
        reread: Callable[[int], None] | None = None,
    ) -> KnownFile | None:
        """What the file became, if the origin knows and has it.

        ``weights``: with its tensors. ``reread``: see :func:`has_blob`.
        """
        key = self._published(file, weights=weights)
        value = None if key is None else self.origin.record(_KIND, key, deadline)
        if value is None:
            return None
        try:
            known = parse_record(KnownFile, value, f"{_KIND}/{key}").under(file.path)
        except InvalidData:
            return None  # another version's, or damaged: reading it again is always right
        if known.file.size != file.size or not has_blob(
            self.origin, known.file, deadline, reread=reread
        ):
            return None
        return known

    def remember(
        self,
        file: UpstreamFile | None,
        measured: Measured,
        deadline: Deadline,
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Keep what a file became that the origin has; ``metadata``: of weights.

        ``file`` is None for one that has no upstream: it is known by its bytes then.
        """
        if sum(len(k) + len(v) for k, v in (metadata or {}).items()) > _MOST_METADATA:
            return
        known = KnownFile(
            file=measured.file, tensors=measured.tensors, metadata=dict(metadata or {})
        )
        weights = metadata is not None
        keys = {_content(measured.file.sha256, measured.file.size, weights=weights)}
        published = None if file is None else self._published(file, weights=weights)
        for key in keys | ({published} if published is not None else set()):
            value = known.model_dump(mode="json")
            if not self.origin.put_record(_KIND, key, value, deadline):
                self._mend(key, value, deadline)

    def digest(self, file: UpstreamFile, deadline: Deadline) -> str | None:
        """The SHA-256 of a file's bytes, if it is published or was found when it was fetched."""
        if file.sha256 is not None:
            return file.sha256
        key = self._named(file, "fetched")
        value = None if key is None else self.origin.record(_KIND, key, deadline)
        with suppress(InvalidData):
            return None if value is None else parse_record(_Fetched, value, f"{key}").sha256
        return None

    def remember_digest(self, file: UpstreamFile, sha256: str, deadline: Deadline) -> None:
        """Keep the SHA-256 of a file that was fetched."""
        key = self._named(file, "fetched")
        if file.sha256 is None and key is not None:
            self.origin.put_record(_KIND, key, {"sha256": sha256}, deadline)

    def _mend(self, key: str, value: object, deadline: Deadline) -> None:
        """Replace a record that is damaged, which would be in the way for ever."""
        with suppress(InvalidData):
            parse_record(KnownFile, self.origin.record(_KIND, key, deadline), key)
            return
        self.origin.store.delete(f"{_KIND}/{key}.json", deadline)
        self.origin.put_record(_KIND, key, value, deadline)

    def _published(self, file: UpstreamFile, *, weights: bool) -> str | None:
        """The key of what the upstream tells of a file; None if that is too little."""
        if file.sha256 is not None:
            return _content(file.sha256, file.size, weights=weights)
        return self._named(file, _kind(weights=weights))

    def _named(self, file: UpstreamFile, kind: str) -> str | None:
        """The key of what the upstream calls this version; None if it does not tell any."""
        if not file.version and file.crc32c is None:
            return None
        return digest(
            {
                "kind": kind,
                "upstream": self.upstream,
                "path": file.path,
                "size": file.size,
                "version": file.version,
                "crc32c": file.crc32c,
            }
        )


class _Fetched(Record):
    sha256: Sha256


def _content(sha256: str, size: int, *, weights: bool) -> str:
    return digest({"kind": _kind(weights=weights), "sha256": sha256, "size": size})


def _kind(*, weights: bool) -> str:
    return "weights" if weights else "file"


class Recalling:
    """An :class:`Upstream` whose known files are not asked of it. Safe between threads.

    What is known of a file is looked up once.
    """

    def __init__(
        self,
        upstream: Upstream,
        known: Known,
        *,
        reread: Callable[[int], None] | None = None,
    ) -> None:
        self.name = upstream.name
        self.revision = upstream.revision
        self.remote = False
        """Whether files do not lie on this machine."""
        self.asked = upstream
        """The upstream itself, for what is known to be unknown."""
        self._known = known
        self._reread = reread
        self._recalled: dict[tuple[UpstreamFile, bool], KnownFile] = {}

    def files(self, deadline: Deadline) -> tuple[UpstreamFile, ...]:
        """The upstream's files."""
        files = self.asked.files(deadline)
        self.remote = any(self.asked.local(file, deadline) is None for file in files[:1])
        return files

    def reader(self, file: UpstreamFile, deadline: Deadline) -> ObjectReader:
        """Reads a small file from the origin where it is known, else from the upstream."""
        if file.size <= _SMALL:
            known = self.recall(file, deadline, weights=False)
            if known is not None:
                data = bytearray(file.size)
                origin = self._known.origin
                origin.read_blob(known.file.sha256, 0, memoryview(data), deadline)
                if hashlib.sha256(data).hexdigest() == known.file.sha256:
                    return _Held(bytes(data))
        return self.asked.reader(file, deadline)

    def local(self, file: UpstreamFile, deadline: Deadline) -> LocalFile | None:
        """The file where it lies."""
        found = self.asked.local(file, deadline)
        self.remote = self.remote or found is None
        return found

    def close(self) -> None:
        """Close the upstream."""
        self.asked.close()

    def recall(self, file: UpstreamFile, deadline: Deadline, *, weights: bool) -> KnownFile | None:
        """What the origin knows of a file and has, or had when it was first asked."""
        found = self._recalled.get((file, weights))
        if found is None:
            found = self._known.recall(file, deadline, weights=weights, reread=self._reread)
            if found is not None:
                self._recalled[file, weights] = found
        return found

    def recall_all(
        self, files: Iterable[UpstreamFile], deadline: Deadline, *, weights: bool
    ) -> dict[str, KnownFile]:
        """What the origin knows of files and has, by their paths."""
        with ThreadPoolExecutor(_AT_ONCE, "warmcast-known") as pool:
            found = pool.map(lambda file: self.recall(file, deadline, weights=weights), files)
            return {known.file.path: known for known in found if known is not None}

    def remember(
        self,
        file: UpstreamFile | None,
        measured: Measured,
        deadline: Deadline,
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """See :meth:`Known.remember`."""
        self._known.remember(file, measured, deadline, metadata=metadata)

    def digests(self, files: Sequence[UpstreamFile], deadline: Deadline) -> dict[str, str]:
        """The SHA-256 of those files of which it is known, by their paths."""
        found = {file.path: self._known.digest(file, deadline) for file in files}
        return {path: sha256 for path, sha256 in found.items() if sha256 is not None}

    def remember_digest(self, file: UpstreamFile, sha256: str, deadline: Deadline) -> None:
        """See :meth:`Known.remember_digest`."""
        self._known.remember_digest(file, sha256, deadline)


class _Held:
    """Bytes as an ``ObjectReader``."""

    local = True
    cached = None
    step = _SMALL

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` from ``offset``."""
        buffer[:] = self._data[offset : offset + len(buffer)]

    def close(self) -> None:
        """Nothing is held."""
