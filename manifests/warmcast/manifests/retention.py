"""Taking away what nobody needs, beside others who may begin to need it.

What is to go is *marked* first, and goes only when its mark has stood for a while. A mark is an
object of its own, changed by compare-and-swap alone::

    marks/blobs/<sha256>.json, marks/manifests/<digest>.json    {"state", "at"}

    condemned   nobody named it at that time; it goes when the grace is over
    deleting    it is going now
    spared      a deploy has come to need it, at that time; good for ``PROTECTED`` seconds

A deploy first has its manifest *spared*, then writes it, then sees to what it names: see
:func:`put_manifest`. A collector first swaps *condemned* for *deleting*, then looks once more for
manifests that it does not know. One of the two is first: either the deploy finds its blobs going,
waits, and brings them again; or the collector finds the manifest, or that a mark is not what it
was, and leaves them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from warmcast.manifests.canonical import canonical_json, parse_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    InvalidManifest,
    NotFound,
    PreconditionFailed,
    StoreError,
)
from warmcast.manifests.manifest import (
    TIME_FORMAT,
    FileEntry,
    Manifest,
    Record,
    parse_record,
)
from warmcast.manifests.origin import Origin, blob_key, manifest_key, now

Kind = Literal["blobs", "manifests"]
State = Literal["condemned", "deleting", "spared"]

_KINDS: Mapping[str, Kind] = {"blobs": "blobs", "manifests": "manifests"}

PROTECTED = 3600.0
"""Seconds that a deploy may take from its manifest to its ref."""

_GOING = 60.0
"""Seconds that a collector has to delete what it has begun to."""

_LOOK = 0.2
_HEADS = 8


class _Record(Record):
    state: State
    at: str


@dataclass(frozen=True, slots=True)
class Mark:
    """What a mark says of a blob or a manifest, and the etag under which it says so."""

    kind: Kind
    digest: str
    state: State
    at: str
    etag: str

    @property
    def key(self) -> str:
        """The mark's key in the origin."""
        return _key(self.kind, self.digest)

    @property
    def age(self) -> float:
        """Seconds since it was made, by this machine's clock."""
        made = datetime.strptime(self.at, TIME_FORMAT).replace(tzinfo=UTC)
        return (datetime.now(UTC) - made).total_seconds()


class Retention:
    """The marks in an origin."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._store = origin.store

    def marked(self, deadline: Deadline) -> Iterator[tuple[Kind, str]]:
        """Of what there are marks."""
        for info in self._store.list("marks/", deadline):
            folder, _, name = info.key.removeprefix("marks/").partition("/")
            kind = _KINDS.get(folder)
            if kind is not None:
                yield kind, name.removesuffix(".json")

    def mark(self, kind: Kind, digest: str, deadline: Deadline) -> Mark | None:
        """A mark as it is now; None if there is none."""
        try:
            data, etag = self._store.read(_key(kind, digest), deadline, limit=1 << 12)
        except NotFound:
            return None
        content = parse_json(data, f"mark {digest}", InvalidManifest)
        record = parse_record(_Record, content, f"mark {digest}")
        return Mark(kind, digest, record.state, record.at, etag)

    def make(self, kind: Kind, digest: str, state: State, deadline: Deadline) -> bool:
        """Make a mark, if there is none; whether it was made."""
        return self._store.create(_key(kind, digest), _text(state, now()), deadline)

    def swap(self, mark: Mark, state: State, deadline: Deadline) -> Mark | None:
        """Change a mark, if it still says what it said; None if it does not."""
        at = now() if state == "spared" else mark.at
        try:
            etag = self._store.replace(mark.key, _text(state, at), mark.etag, deadline)
        except (PreconditionFailed, NotFound):
            return None
        return Mark(mark.kind, mark.digest, state, at, etag)

    def delete(self, mark: Mark, deadline: Deadline) -> None:
        """Delete what a mark is of, which is *deleting*, and the mark."""
        key = blob_key if mark.kind == "blobs" else manifest_key
        self._store.delete(key(mark.digest), deadline)
        self._store.delete(mark.key, deadline)

    def forget(self, mark: Mark, deadline: Deadline) -> None:
        """Delete a mark alone."""
        self._store.delete(mark.key, deadline)


def put_manifest(origin: Origin, manifest: Manifest, deadline: Deadline) -> Sequence[FileEntry]:
    """Write a manifest that a ref is to name, and keep what it names; the files whose blob is not
    there, which are to be brought again before the ref is moved.

    Raises :class:`StoreError` if a collector died while it deleted one of them.
    """
    retention = Retention(origin)
    _spare(retention, "manifests", manifest.digest, deadline)
    origin.put_manifest(manifest, deadline)
    files = {file.sha256: file for file in manifest.files}
    for kind, digest in retention.marked(deadline):
        if kind == "blobs" and digest in files:
            _spare(retention, kind, digest, deadline)

    def there(sha256: str) -> bool:
        return origin.blob_info(sha256, deadline) is not None

    with ThreadPoolExecutor(_HEADS) as pool:
        found = list(pool.map(there, files))
    return [file for file, known in zip(files.values(), found, strict=True) if not known]


def _spare(retention: Retention, kind: Kind, digest: str, deadline: Deadline) -> None:
    """Have a mark say *spared*; what is going has gone then."""
    limit = deadline.within(_GOING)
    while True:
        deadline.check("sparing what a deploy needs")
        mark = retention.mark(kind, digest, deadline)
        if mark is None:
            if retention.make(kind, digest, "spared", deadline):
                return
        elif mark.state != "deleting":
            if retention.swap(mark, "spared", deadline) is not None:
                return
        elif limit.expired:
            raise StoreError(
                f"{kind} {digest}",
                expected=f"to be deleted within {_GOING:.0f} s",
                found="a collector that has begun to",
                do="run `warmcast gc`, which ends what it began, then deploy again",
            )
        else:
            time.sleep(_LOOK)


def _key(kind: Kind, digest: str) -> str:
    return f"marks/{kind}/{digest}.json"


def _text(state: State, at: str) -> bytes:
    return canonical_json({"state": state, "at": at})
