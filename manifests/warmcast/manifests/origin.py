"""The origin: blobs, manifests and refs over an :class:`ObjectStore`.

    blobs/sha256/ab/abcd…              a file's bytes; immutable
    manifests/sha256/<digest>.json     immutable
    refs/<model>/<name>.json           {manifest, previous, updated_at}; compare-and-swap only
    upstreams/<key>.json               what an upstream called a file, and which blobs it became
    transfers/…                        what is on its way into a blob; nothing that readers need
    truths/<identity>.json             the truth of a state that was changed after loading

A ref is written ``model@name`` (``minilm@prod``); a manifest may also be named by its digest. A
blob, once visible, is whole and correct; a ref, once moved, names a manifest whose blobs are all
there, because publishing moves the ref last.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, BinaryIO

from warmcast.manifests.canonical import canonical_json, parse_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    InvalidManifest,
    NotFound,
    PreconditionFailed,
    UsageError,
)
from warmcast.manifests.manifest import (
    TIME_FORMAT,
    Manifest,
    Record,
    Sha256,
    Time,
    parse_manifest,
    parse_record,
)
from warmcast.manifests.stores import ObjectInfo, ObjectReader, ObjectStore, open_store

_PART = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
_REF = re.compile(rf"{_PART}(?:/{_PART})*@{_PART}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class RefRecord(Record):
    """Where a ref points, and where it pointed before."""

    manifest: Sha256
    previous: Sha256 | None
    updated_at: Time


@dataclass(frozen=True, slots=True)
class Ref:
    """A named, movable pointer to a manifest: ``model@name``."""

    model: str
    name: str

    def __post_init__(self) -> None:
        text = str(self)
        if len(text) > 400 or not _REF.fullmatch(text):
            raise UsageError(
                "ref", expected="model@name of letters, digits and . _ + -", found=repr(text)
            )

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Parse ``model@name``; raises :class:`UsageError`."""
        model, _, name = text.partition("@")
        return cls(model, name)

    @property
    def key(self) -> str:
        """The ref's key in the origin."""
        return f"refs/{self.model}/{self.name}.json"

    def __str__(self) -> str:
        return f"{self.model}@{self.name}"


@dataclass(frozen=True, slots=True)
class RefState:
    """A ref as it was read: its record, and the etag that a compare-and-swap has to name."""

    ref: Ref
    record: RefRecord
    etag: str


class Origin:
    """Blobs, manifests and refs. Safe for use from several threads, as its store is."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._resolved: Manifest | None = None

    @classmethod
    def open(cls, url: str) -> Origin:
        """Open the origin at a store's URL."""
        if not url:
            raise UsageError("origin", expected="a URL", found="nothing", do="set WARMCAST_ORIGIN")
        return cls(open_store(url))

    @property
    def url(self) -> str:
        """The store's URL."""
        return self.store.url

    def close(self) -> None:
        """Give back the store's connections."""
        self.store.close()

    def __enter__(self) -> Origin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Blobs

    def blob_info(self, sha256: str, deadline: Deadline) -> ObjectInfo | None:
        """What the store says of a blob; None if the origin does not have it."""
        return self.store.head(blob_key(sha256), deadline)

    def put_blob(
        self,
        sha256: str,
        source: BinaryIO,
        size: int,
        crc32c: int,
        deadline: Deadline,
        progress: Callable[[int], None] | None = None,
    ) -> bool:
        """Write a blob if the origin does not have it; whether bytes were moved."""
        return self.store.upload(
            blob_key(sha256), source, size, crc32c, deadline, progress=progress
        )

    def read_blob(self, sha256: str, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` with a blob's bytes from ``offset``; the bytes are not checked here."""
        self.store.read_into(blob_key(sha256), offset, buffer, deadline)

    def open_blob(self, sha256: str, deadline: Deadline) -> ObjectReader:
        """Open a blob, to read many ranges of it; the bytes are not checked here."""
        return self.store.reader(blob_key(sha256), deadline)

    # Manifests

    def put_manifest(self, manifest: Manifest, deadline: Deadline) -> None:
        """Write a manifest under its digest.

        Raises :class:`IntegrityError` if the origin has it already, but damaged.
        """
        if not self.store.create(manifest_key(manifest.digest), manifest.data, deadline):
            self.manifest(manifest.digest, deadline)

    def manifest(self, digest: str, deadline: Deadline) -> Manifest:
        """Read, check and return the manifest of a digest (64 hex digits).

        Raises :class:`NotFound`, and :class:`IntegrityError` if the stored bytes are damaged.
        """
        data = self.read_manifest(digest, deadline)
        return parse_manifest(data, digest, f"{self.url}: {manifest_key(digest)}")

    def read_manifest(self, digest: str, deadline: Deadline) -> bytes:
        """The bytes of a manifest, not checked here. Raises :class:`NotFound`."""
        key = manifest_key(digest)
        try:
            return self.store.read(key, deadline)[0]
        except NotFound:
            raise NotFound(
                f"manifest {digest}",
                expected=f"to be in {self.url}",
                found=f"no {key}",
                do="deploy it again",
            ) from None

    def resolve(self, name: str, deadline: Deadline) -> Manifest:
        """The manifest that a ref (``model@name``) or a digest names.

        The one that was resolved last is kept: what a digest names does not change. Raises
        :class:`NotFound` with the nearest names if there is no such ref.
        """
        manifest = self._resolved
        digest = self.digest(name, deadline)
        if manifest is None or manifest.digest != digest:
            self._resolved = manifest = self.manifest(digest, deadline)
        return manifest

    def digest(self, name: str, deadline: Deadline) -> str:
        """The digest that a ref (``model@name``) names; a digest names itself.

        Raises :class:`NotFound` with the nearest names if there is no such ref.
        """
        if _DIGEST.fullmatch(name):
            return name
        ref = Ref.parse(name)
        state = self.ref(ref, deadline)
        if state is None:
            raise NotFound(
                f"ref {name!r}",
                expected=f"a ref in {self.url}",
                found=self._nearest(ref, deadline),
                do="deploy it, or name another",
            )
        return state.record.manifest

    # Refs

    def ref(self, ref: Ref, deadline: Deadline) -> RefState | None:
        """Where a ref points; None if there is no such ref."""
        try:
            data, etag = self.store.read(ref.key, deadline, limit=1 << 16)
        except NotFound:
            return None
        record = parse_json(data, f"ref {ref}", InvalidManifest)
        return RefState(ref, parse_record(RefRecord, record, f"ref {ref}"), etag)

    def refs(self, deadline: Deadline) -> Iterator[Ref]:
        """All refs, in order."""
        for info in self.store.list("refs/", deadline):
            model, _, file = info.key.removeprefix("refs/").rpartition("/")
            if file.endswith(".json"):
                with suppress(UsageError):  # a file that somebody else put there
                    yield Ref(model, file.removesuffix(".json"))

    def move_ref(
        self, ref: Ref, manifest: str, before: RefState | None, deadline: Deadline
    ) -> None:
        """Point a ref at a manifest, if it still stands as ``before`` says.

        Raises :class:`PreconditionFailed` if somebody else moved it first.
        """
        _check_digest(manifest)
        record = RefRecord(
            manifest=manifest,
            previous=before.record.manifest if before else None,
            updated_at=now(),
        )
        try:
            self.store.replace(
                ref.key,
                canonical_json(record.model_dump(mode="json")),
                before.etag if before else None,
                deadline,
            )
        except PreconditionFailed:
            raise PreconditionFailed(
                f"ref {ref}",
                expected="to be as it was when this deploy began",
                found="another deploy moved it",
                do="deploy again if yours is the one that should stand",
            ) from None
        # In the order of their keys, of moves within one second too.
        key = f"{_history_prefix(ref)}{time.time_ns():020}-{manifest[:16]}.json"
        self.store.create(key, canonical_json(record.model_dump(mode="json")), deadline)

    def history(self, ref: Ref, deadline: Deadline) -> list[RefRecord]:
        """What a ref was moved to, the oldest first; a move whose mover died may be missing."""
        prefix = _history_prefix(ref)
        records = []
        for info in self.store.list(prefix, deadline):
            with suppress(NotFound):
                data, _ = self.store.read(info.key, deadline, limit=1 << 16)
                content = parse_json(data, f"history of {ref}", InvalidManifest)
                records.append(parse_record(RefRecord, content, f"history of {ref}"))
        return records

    # Records beside them

    def record(self, kind: str, key: str, deadline: Deadline) -> Any | None:
        """A JSON record (``kind`` is ``upstreams`` or ``truths``); None if there is none."""
        try:
            data, _ = self.store.read(f"{kind}/{key}.json", deadline)
        except NotFound:
            return None
        return parse_json(data, f"{kind}/{key}", InvalidManifest)

    def put_record(self, kind: str, key: str, value: Any, deadline: Deadline) -> bool:
        """Write a JSON record if there is none; whether it was written."""
        return self.store.create(f"{kind}/{key}.json", canonical_json(value), deadline)

    def _nearest(self, ref: Ref, deadline: Deadline) -> str:
        names = [str(r) for r in self.refs(deadline)]
        close = difflib.get_close_matches(str(ref), names, n=3, cutoff=0.4)
        if close:
            return f"none; nearest are {', '.join(close)}"
        return f"none of {len(names)}" if names else "no refs at all"


def blob_key(sha256: str) -> str:
    """A blob's key in the store, from its SHA-256 (64 hex digits)."""
    _check_digest(sha256)
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


def _history_prefix(ref: Ref) -> str:
    return f"history/{ref.model}/{ref.name}/"


def now() -> str:
    """The time in UTC as records write it, to the second."""
    return datetime.now(UTC).strftime(TIME_FORMAT)


def _check_digest(digest: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise UsageError("digest", expected="64 lower-case hex digits", found=repr(digest))


def manifest_key(digest: str) -> str:
    """A manifest's key in the store, from its digest."""
    _check_digest(digest)
    return f"manifests/sha256/{digest}.json"
