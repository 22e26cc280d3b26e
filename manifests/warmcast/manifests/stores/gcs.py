"""Objects in a bucket of Google Cloud Storage: ``gs://bucket/prefix``.

Endpoint and credentials are found as Google's libraries find them (``STORAGE_EMULATOR_HOST``,
``GOOGLE_APPLICATION_CREDENTIALS``, …; see :mod:`gcs_access`), certificates as OpenSSL does
(``SSL_CERT_FILE``). An object's etag is its generation, which no two versions share.

google-cloud-storage knows the protocol of metadata and uploads; the bytes go through :mod:`http`,
so that every call ends by its deadline, and reads go straight into the caller's buffer: the
library's own downloads take several times the processor's time. Writes carry their CRC32C, which
the server checks before the object is visible, and are conditional (``ifGenerationMatch``): of
several writers one wins, and the others are told. Large objects are uploaded by
:mod:`gcs_upload`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from io import BytesIO
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote, urlencode

from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Blob, Client

from warmcast.manifests.checksum import crc32c as crc32c_of
from warmcast.manifests.checksum import from_base64, to_base64, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    DeadlineExceeded,
    IntegrityError,
    NotFound,
    PreconditionFailed,
    StoreError,
    UsageError,
)
from warmcast.manifests.stores import Begun, ObjectInfo, ObjectReader, Part, gcs_parts
from warmcast.manifests.stores.checks import (
    check_key,
    check_prefix,
    check_range,
    parse_bucket,
    pieces,
)
from warmcast.manifests.stores.gcs_access import Access, GcsAccess
from warmcast.manifests.stores.gcs_session import Call, Session, running
from warmcast.manifests.stores.gcs_upload import cancel_all, upload_resumably
from warmcast.manifests.stores.http import Http, Transient, read_all
from warmcast.manifests.stores.ranges import read_range
from warmcast.manifests.stores.readers import VersionReader, check_empty_read, etag_if_equal

T = TypeVar("T")

PART = 16 << 20
"""Bytes of an upload's part, each of which is a request and is kept until it has arrived."""

_SINGLE = 8 << 20  # bytes of the largest object that google-cloud-storage sends in one request
_CLEANUP = 5.0  # seconds to take away what a server should have refused
_LISTED = "items(name,size,generation,crc32c,timeCreated),nextPageToken"


class GcsStore:
    """An :class:`ObjectStore` in a bucket. Safe between threads; not across a fork."""

    def __init__(
        self,
        url: str,
        *,
        part_size: int = PART,
        access: GcsAccess | None = None,
        any_key: bool = False,
    ) -> None:
        """``part_size`` (bytes) is rounded down to a multiple of 256 KiB, as the protocol asks.

        ``any_key`` takes the objects of others, whose names need be no keys of ours.
        """
        access = access or GcsAccess()
        self._any_key = any_key
        self._bucket_name, self._prefix = parse_bucket(url, "gs", any_key=any_key)
        self.url = f"gs://{self._bucket_name}/{self._prefix}".rstrip("/")
        self.part_size = part_size
        self.page_size: int | None = None
        """Objects that one request lists; None for as many as the server gives."""
        self.http = Http(None)
        self._access = Access(self.http, access)
        # Requests are authorized by us, who can do it under a deadline.
        self._client = Client(
            project=None,
            credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
            _http=Session(self.http),
            client_options={"api_endpoint": access.endpoint} if access.endpoint else None,
        )
        self._bucket = self._client.bucket(self._bucket_name)
        endpoint = self._client.api_endpoint.rstrip("/")
        if not endpoint.startswith(("http://", "https://")):
            raise UsageError(
                "STORAGE_EMULATOR_HOST", expected="http://host:port", found=repr(endpoint)
            )
        bucket = quote(self._bucket_name, safe="")
        self._media = f"{endpoint}/download/storage/v1/b/{bucket}/o"
        self.uploads = f"{endpoint}/upload/storage/v1/b/{bucket}/o"
        """Where objects are sent to."""
        self.unfinished: set[tuple[str, str]] = set()
        """Resumable uploads, as key and session URL, that were neither completed nor cancelled."""

    # The protocol

    def head(self, key: str, deadline: Deadline) -> ObjectInfo | None:
        """What the store says of an object; None if there is none."""
        name = self.name(key)
        try:
            blob = self.call(key, deadline, lambda: self._bucket.get_blob(name, retry=None))
        except NotFound:
            return None
        return _info(key, blob)

    def read(self, key: str, deadline: Deadline, *, limit: int = 1 << 28) -> tuple[bytes, str]:
        """A small object's bytes and its etag."""
        where = self.where(key)
        url = self._media_url(key, None)
        call = Call(self._access, where, deadline)
        while True:
            try:
                headers = call.headers() | _AS_STORED
                with self.http.open("GET", url, deadline, headers=headers) as response:
                    if response.status != 200:
                        raise call.error(response)
                    data = read_all(response, limit, deadline, where)
                    _check_crc32c(where, data, response.headers)
                    return data, response.headers.get(_GENERATION, "")
            except Transient as failure:
                call.attempts.wait(failure)

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
        where = self.where(key)
        check_range(where, offset)
        view = buffer.cast("B")
        if not view:
            check_empty_read(self, key, offset, etag, deadline)
            return
        call = Call(self._access, where, deadline)
        read_range(
            self.http,
            lambda version: (self._media_url(key, version), call.headers() | _AS_STORED),
            where,
            offset,
            view,
            deadline,
            etag=etag,
            version_header=_GENERATION,
            error_of=call.error,
        )

    def reader(self, key: str, deadline: Deadline) -> ObjectReader:
        """Open an object: every range is read under the generation that it has now."""
        return VersionReader.open(self, key, deadline)

    def create(self, key: str, data: bytes, deadline: Deadline) -> bool:
        """Write a small object if there is none; whether it was written."""
        return self.put(key, data, crc32c_of(data), deadline, generation=0) is not None

    def replace(self, key: str, data: bytes, expected: str | None, deadline: Deadline) -> str:
        """Compare and swap; the new etag."""
        generation = 0 if expected is None else self._generation(key, expected)
        etag = self.put(key, data, crc32c_of(data), deadline, generation=generation)
        if etag is None:
            raise PreconditionFailed(
                self.where(key), expected=expected or "no object", found="another version"
            )
        return etag

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
        if self.head(key, deadline) is not None:
            return False
        if size > min(self.part_size, _SINGLE):
            etag = upload_resumably(self, key, source, size, crc32c, deadline, progress)
            return etag is not None
        whole = pieces(self.where(key), source, size, crc32c, _SINGLE, deadline)
        data = b"".join(piece.data for piece in whole)
        written = self.put(key, data, crc32c, deadline, generation=0) is not None
        if progress is not None:
            progress(size)
        return written

    def begin_parts(self, key: str | None, deadline: Deadline) -> str:
        """Begin an object that is sent in parts; its token."""
        return gcs_parts.begin(self, deadline)

    def put_part(
        self,
        token: str,
        index: int,
        offset: int,
        data: memoryview,
        crc32c: int,
        deadline: Deadline,
    ) -> Part:
        """Send a part."""
        return gcs_parts.put(self, token, index, data, crc32c, deadline)

    def complete_parts(
        self, token: str, parts: Sequence[Part], key: str, crc32c: int, deadline: Deadline
    ) -> bool:
        """Make the object of these parts visible, if there is none; whether it was."""
        return gcs_parts.complete(self, token, parts, key, crc32c, deadline)

    def abort_parts(self, token: str, deadline: Deadline) -> None:
        """Take away what was begun."""
        gcs_parts.abort(self, token, deadline)

    def begun_parts(self, deadline: Deadline) -> Iterator[Begun]:
        """What was begun and has not ended."""
        return gcs_parts.begun(self, deadline)

    def list(self, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        """The objects whose key begins with ``prefix``, in order of their keys."""
        found = [_info(key, blob) for key, blob in self._listed(prefix, deadline)]
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, key: str, deadline: Deadline) -> None:
        """Take an object away; nothing happens if there is none."""
        blob = self.blob(key)
        with suppress(NotFound):
            self.call(key, deadline, lambda: blob.delete(retry=None))

    def close(self) -> None:
        """Close the connections; cancel uploads that could not be cancelled when they failed."""
        cancel_all(self)
        self._access.close()
        self.http.close()

    # For the resumable upload

    def name(self, key: str) -> str:
        """A key as the bucket knows it."""
        self._check(key)
        return self._prefix + key

    def where(self, key: str) -> str:
        """A key as messages name it."""
        return f"{self.url}/{key}"

    def blob(self, key: str, crc32c: int | None = None) -> Blob:
        """An object as google-cloud-storage takes it, with the CRC32C that it has to have."""
        blob = self._bucket.blob(self.name(key))
        if crc32c is not None:
            blob.crc32c = to_base64(crc32c)
        return blob

    def asking(self, key: str, deadline: Deadline) -> Call:
        """What requests about an object share that we make ourselves."""
        return Call(self._access, self.where(key), deadline)

    def call(self, key: str, deadline: Deadline, operation: Callable[[], T]) -> T:
        """Run an operation of google-cloud-storage; its result, or our errors."""
        call = self.asking(key, deadline)
        while True:
            deadline.check(f"asking for {call.where}")
            token = running.set(call)
            try:
                return operation()
            except Transient as cause:
                failure = cause
            except PreconditionFailed as cause:
                if call.attempts.failures:
                    raise _RetriedPreconditionFailed(call.where) from cause
                raise
            finally:
                running.reset(token)
            call.attempts.wait(failure)

    def check_written(
        self, key: str, size: int, crc32c: int, deadline: Deadline, written: Mapping[str, Any]
    ) -> str:
        """The generation of an object just written, as the server describes it.

        Google's own checks before anybody can see the object; of other servers, some do not.
        What one of those took is deleted again, and :class:`IntegrityError` is raised.
        """
        generation = str(written["generation"])
        found = (int(written.get("size") or 0), written.get("crc32c") or to_base64(crc32c))
        if found == (size, to_base64(crc32c)):
            return generation
        blob = self.blob(key)
        with suppress(StoreError, DeadlineExceeded):
            self.call(
                key,
                deadline.within(_CLEANUP),
                lambda: blob.delete(if_generation_match=int(generation), retry=None),
            )
        raise IntegrityError(
            self.where(key),
            expected=f"{size} bytes, CRC32C {to_base64(crc32c)}",
            found=f"{found[0]} bytes, {found[1]}",
            do="send them again",
        )

    # For objects in parts

    def compose(
        self,
        sources: Sequence[tuple[str, str]],
        key: str,
        *,
        deadline: Deadline,
        generation: int | None,
    ) -> Mapping[str, Any]:
        """Have the server write an object of others (key and etag of each), in order.

        ``generation`` is that of the object there is (0: none; None: any). What the server says
        of the object. Raises :class:`PreconditionFailed`, and :class:`NotFound` for a source.
        """
        parts = [self.blob(source) for source, _ in sources]
        generations = [self._generation(source, etag) for source, etag in sources]

        def send() -> Mapping[str, Any]:
            blob = self.blob(key)
            blob.content_type = "application/octet-stream"
            blob.compose(
                parts,
                if_generation_match=generation,
                if_source_generation_match=generations,
                retry=None,
            )
            return {"generation": blob.generation, "size": blob.size, "crc32c": blob.crc32c}

        return self.call(key, deadline, send)

    def created(self, prefix: str, deadline: Deadline) -> Iterator[tuple[str, datetime]]:
        """The objects below a prefix, and when each was created."""
        for key, blob in self._listed(prefix, deadline):
            yield key, blob.time_created

    # Requests

    def _check(self, key: str) -> None:
        if not self._any_key:
            check_key(key)

    def _listed(self, prefix: str, deadline: Deadline) -> Iterator[tuple[str, Blob]]:
        check_prefix(prefix)
        page: dict[str, str | None] = {"page_token": None}
        while True:
            blobs, token = self.call(prefix, deadline, lambda: self._page(prefix, **page))
            for blob in blobs:
                key = blob.name.removeprefix(self._prefix)
                with suppress(UsageError):  # what others put there under names that are no keys
                    self._check(key)
                    yield key, blob
            if token is None:
                return
            page["page_token"] = token

    def put(
        self, key: str, data: bytes, crc32c: int, deadline: Deadline, *, generation: int
    ) -> str | None:
        """Write an object if the one there is of ``generation`` (0: none).

        Its etag, or None if the condition did not hold.
        """
        if len(data) > _SINGLE:
            source = BytesIO(data)
            return upload_resumably(
                self, key, source, len(data), crc32c, deadline, generation=generation
            )

        def send() -> Mapping[str, Any]:
            blob = self.blob(key, crc32c)
            blob.upload_from_string(
                data,
                "application/octet-stream",
                if_generation_match=generation,
                checksum=None,
                retry=None,
            )
            return {"generation": blob.generation, "size": blob.size, "crc32c": blob.crc32c}

        try:
            written = self.call(key, deadline, send)
        except _RetriedPreconditionFailed:
            return etag_if_equal(self, key, data, deadline)
        except PreconditionFailed:
            return None
        return self.check_written(key, len(data), crc32c, deadline, written)

    def _page(self, prefix: str, page_token: str | None) -> tuple[Sequence[Blob], str | None]:
        """One page of a listing, and what the next is asked for with."""
        listing = self._client.list_blobs(
            self._bucket,
            prefix=self._prefix + prefix,
            page_token=page_token,
            page_size=self.page_size,
            fields=_LISTED,
            retry=None,
        )
        return tuple(next(listing.pages, ())), listing.next_page_token

    def _media_url(self, key: str, version: str | None) -> str:
        query = {"alt": "media"}
        if version is not None:
            query["ifGenerationMatch"] = str(self._generation(key, version))
        return f"{self._media}/{quote(self.name(key), safe='')}?{urlencode(query)}"

    def _generation(self, key: str, etag: str) -> int:
        """The generation that an etag of ours is; no object has one that is not."""
        if not etag.isascii() or not etag.isdigit() or int(etag) == 0:
            raise PreconditionFailed(self.where(key), expected=etag, found="another version")
        return int(etag)


_GENERATION = "X-Goog-Generation"
_AS_STORED = {"Accept-Encoding": "gzip"}  # else what was stored as gzip is unpacked, ranges ignored


class _RetriedPreconditionFailed(PreconditionFailed):
    """A condition did not hold when it was tried again: it may have been our own first attempt."""


def _info(key: str, blob: Blob) -> ObjectInfo:
    crc32c = from_base64(blob.crc32c) if blob.crc32c else None
    return ObjectInfo(key, blob.size or 0, str(blob.generation), crc32c)


def _check_crc32c(where: str, data: bytes, headers: Mapping[str, str]) -> None:
    hashes = cast("Any", headers).get("X-Goog-Hash", "")
    text = next((h.strip()[7:] for h in hashes.split(",") if h.strip().startswith("crc32c=")), None)
    if text and (found := crc32c_of(data)) != (expected := from_base64(text)):
        raise IntegrityError(where, expected=to_hex(expected), found=to_hex(found))
