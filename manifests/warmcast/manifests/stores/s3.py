"""Objects in a bucket: ``s3://bucket/prefix``, at any server that speaks S3.

Endpoint, region, credentials and certificates are found as boto3 finds them (``AWS_ENDPOINT_URL``,
``AWS_REGION``, ``AWS_ACCESS_KEY_ID``, ``AWS_CA_BUNDLE``, profiles, roles, …).

botocore signs requests and knows the protocol; the bytes go through :mod:`http`, so that every
call ends by its deadline, and reads go straight into the caller's buffer. Writes carry their
CRC32C, which the server checks, and are conditional (``If-None-Match``, ``If-Match``): of several
writers one wins, and the others are told. Objects larger than a part are uploaded by
:mod:`s3_upload`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import botocore.session
from botocore import UNSIGNED
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from warmcast.manifests.checksum import crc32c as crc32c_of
from warmcast.manifests.checksum import from_base64, to_base64, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    IntegrityError,
    NotFound,
    PreconditionFailed,
    UsageError,
    WarmcastError,
)
from warmcast.manifests.stores import Begun, ObjectInfo, ObjectReader, Part, s3_parts
from warmcast.manifests.stores.checks import (
    check_key,
    check_prefix,
    check_range,
    parse_bucket,
    pieces,
)
from warmcast.manifests.stores.http import IDLE, Attempts, Http, Transient, read_all
from warmcast.manifests.stores.ranges import read_range
from warmcast.manifests.stores.readers import VersionReader, check_empty_read, etag_if_equal
from warmcast.manifests.stores.s3_errors import error_of, error_of_botocore, error_of_client
from warmcast.manifests.stores.s3_upload import abort_all, upload_in_parts

if TYPE_CHECKING:
    import urllib3
    from mypy_boto3_s3 import S3Client

PART = 16 << 20
"""Bytes of an upload's part, and of the largest object that is sent in one request."""

_SIGNED_FOR = 3600  # seconds a signed URL is good for; it is used at once
_MOST_SMALL = 1 << 28  # bytes of an answer that is no object
_CODE = re.compile(rb"<Code>([^<]*)</Code>")


@dataclass(frozen=True, slots=True)
class _Running:
    """What the requests of the call that runs in this thread have to keep to."""

    deadline: Deadline
    cancelled: threading.Event | None
    idle: float | None


_running: ContextVar[_Running] = ContextVar("running")


@dataclass(frozen=True, slots=True)
class S3Access:
    """Where the server is and who asks, where that is not as boto3 finds it."""

    endpoint: str | None = None
    profile: str | None = None
    region: str | None = None
    anonymous: bool = False


class _RetriedPreconditionFailed(PreconditionFailed):
    """A condition did not hold when it was tried again: it may have been our own first attempt."""


class _Received:
    """A body that was read already, as botocore takes it."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> Iterator[bytes]:
        yield self._body


class S3Store:
    """An :class:`ObjectStore` in a bucket. Safe between threads; not across a fork."""

    def __init__(
        self,
        url: str,
        *,
        part_size: int = PART,
        access: S3Access | None = None,
        any_key: bool = False,
    ) -> None:
        """``part_size`` (bytes) may be changed where a server's limits ask for it.

        ``any_key`` takes the objects of others, whose names need be no keys of ours.
        """
        self._any_key = any_key
        self.bucket, self.prefix = parse_bucket(url, "s3", any_key=any_key)
        self.url = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self.part_size = part_size
        access = access or S3Access()
        try:
            session = botocore.session.Session(profile=access.profile)
            self.http = Http(session.get_config_variable("ca_bundle"))
            self.client = _client(session, access, self._send)
        except (BotoCoreError, ValueError) as cause:
            raise UsageError(
                self.url, expected="settings that boto3 takes", found=str(cause)
            ) from cause
        self.unfinished: set[tuple[str, str]] = set()
        """Uploads in parts, as key and upload id, that were neither completed nor aborted."""

    # The protocol

    def head(self, key: str, deadline: Deadline) -> ObjectInfo | None:
        """What the store says of an object; None if there is none."""
        try:
            answer = self.call(
                self.client.head_object, key, deadline, Key=self.name(key), ChecksumMode="ENABLED"
            )
        except NotFound:
            return None
        return ObjectInfo(key, answer["ContentLength"], answer["ETag"], _whole_crc32c(answer))

    def read(self, key: str, deadline: Deadline, *, limit: int = 1 << 28) -> tuple[bytes, str]:
        """A small object's bytes and its etag."""
        where = self.where(key)
        url = self._signed(key, ChecksumMode="ENABLED")
        headers = {"x-amz-checksum-mode": "ENABLED"}
        attempts = Attempts(where, deadline)
        while True:
            try:
                with self.http.open("GET", url, deadline, headers=headers) as response:
                    if response.status != 200:
                        raise self.error(response, key, deadline)
                    data = read_all(response, limit, deadline, where)
                    _check_crc32c(where, data, response.headers)
                    return data, response.headers.get("ETag", "")
            except Transient as failure:
                attempts.wait(failure)

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
        url = self._signed(key)
        read_range(
            self.http,
            lambda version: (url, {} if version is None else {"If-Match": version}),
            where,
            offset,
            view,
            deadline,
            etag=etag,
            version_header="ETag",
            error_of=lambda response: self.error(response, key, deadline),
        )

    def reader(self, key: str, deadline: Deadline) -> ObjectReader:
        """Open an object: every range is read under the etag that it has now."""
        return VersionReader.open(self, key, deadline)

    def create(self, key: str, data: bytes, deadline: Deadline) -> bool:
        """Write a small object if there is none; whether it was written."""
        return self.put(key, data, crc32c_of(data), deadline, IfNoneMatch="*") is not None

    def replace(self, key: str, data: bytes, expected: str | None, deadline: Deadline) -> str:
        """Compare and swap; the new etag."""
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        try:
            etag = self.put(key, data, crc32c_of(data), deadline, **condition)
        except NotFound:
            if expected is None:
                raise
            etag = None  # how some servers answer If-Match where there is no object
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
        if size > self.part_size:
            return upload_in_parts(self, key, source, size, crc32c, deadline, progress)
        whole = pieces(self.where(key), source, size, crc32c, self.part_size, deadline)
        data = b"".join(piece.data for piece in whole)
        written = self.put(key, data, crc32c, deadline, IfNoneMatch="*") is not None
        if progress is not None:
            progress(size)
        return written

    def begin_parts(self, key: str | None, deadline: Deadline) -> str:
        """Begin an object that is sent in parts; its token."""
        return s3_parts.begin(self, key, deadline)

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
        return s3_parts.put(self, token, index, data, crc32c, deadline)

    def complete_parts(
        self, token: str, parts: Sequence[Part], key: str, crc32c: int, deadline: Deadline
    ) -> bool:
        """Make the object of these parts visible, if there is none; whether it was."""
        return s3_parts.complete(self, token, parts, key, crc32c, deadline)

    def abort_parts(self, token: str, deadline: Deadline) -> None:
        """Take away what was begun."""
        s3_parts.abort(self, token, deadline)

    def begun_parts(self, deadline: Deadline) -> Iterator[Begun]:
        """What was begun and has not ended."""
        return s3_parts.begun(self, deadline)

    def list(self, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        """The objects whose key begins with ``prefix``, in order of their keys."""
        check_prefix(prefix)
        page: dict[str, Any] = {"Prefix": self.prefix + prefix}
        found: list[ObjectInfo] = []
        while True:
            answer = self.call(self.client.list_objects_v2, prefix, deadline, **page)
            for entry in answer.get("Contents", ()):
                key = entry["Key"].removeprefix(self.prefix)
                with suppress(UsageError):  # what others put there under names that are no keys
                    self._check(key)
                    found.append(ObjectInfo(key, entry["Size"], entry["ETag"]))
            if not answer.get("IsTruncated"):
                break
            page["ContinuationToken"] = answer["NextContinuationToken"]
        # Not every server lists in order: some walk folders, where "a/b" comes before "a-b".
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, key: str, deadline: Deadline) -> None:
        """Take an object away; nothing happens if there is none."""
        self.call(self.client.delete_object, key, deadline, Key=self.name(key))

    def close(self) -> None:
        """Close the connections; abort uploads that could not be aborted when they failed."""
        abort_all(self)
        self.http.close()
        self.client.close()

    # For uploads in parts

    def name(self, key: str) -> str:
        """A key as the bucket knows it."""
        self._check(key)
        return self.prefix + key

    def where(self, key: str) -> str:
        """A key as messages name it."""
        return f"{self.url}/{key}"

    def put(
        self, key: str, data: bytes, crc32c: int, deadline: Deadline, **condition: Any
    ) -> str | None:
        """Write an object in one request; its etag, or None if the condition did not hold."""
        try:
            answer = self.call(
                self.client.put_object,
                key,
                deadline,
                Key=self.name(key),
                Body=data,
                ChecksumCRC32C=to_base64(crc32c),
                **condition,
            )
        except _RetriedPreconditionFailed:
            return etag_if_equal(self, key, data, deadline)
        except PreconditionFailed:
            return None
        return str(answer["ETag"])

    def call(
        self,
        operation: Callable[..., Any],
        key: str,
        deadline: Deadline,
        cancelled: threading.Event | None = None,
        idle: float | None = None,
        **parameters: Any,
    ) -> Any:
        """Call an operation of botocore's client on the bucket; its answer, or our errors.

        ``idle``: seconds for which the server may be at work before it answers.
        """
        where = self.where(key)
        attempts = Attempts(where, deadline, cancelled)
        while True:
            deadline.check(f"asking for {where}")
            token = _running.set(_Running(deadline, cancelled, idle))
            try:
                return operation(Bucket=self.bucket, **parameters)
            except Transient as failure:
                error: WarmcastError = failure
                cause: Exception = failure
            except ClientError as failure:
                error, cause = error_of_client(where, failure), failure
            except BotoCoreError as failure:
                error, cause = error_of_botocore(where, failure), failure
            finally:
                _running.reset(token)
            if isinstance(error, Transient):
                attempts.wait(error)
            elif isinstance(error, PreconditionFailed) and attempts.failures:
                raise _RetriedPreconditionFailed(where) from cause
            else:
                raise error from cause

    # Requests

    def _check(self, key: str) -> None:
        if not self._any_key:
            check_key(key)

    def _send(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        """Send what botocore has signed, in botocore's stead."""
        running = _running.get()
        headers = {
            name: value.decode("latin-1") if isinstance(value, bytes) else str(value)
            for name, value in request.headers.items()
            if name.lower() != "expect"  # we do not wait to be told to go on
        }
        # botocore wraps bytes so that it could send them twice.
        body = request.body.getvalue() if isinstance(request.body, BytesIO) else request.body
        with self.http.open(
            request.method,
            request.url,
            running.deadline,
            headers=headers,
            body=cast("bytes", body) or None,
            cancelled=running.cancelled,
            idle=running.idle,
        ) as response:
            received = read_all(
                response,
                _MOST_SMALL,
                running.deadline,
                request.url,
                idle=running.idle or IDLE,
            )
            headers_received = cast("Any", response.headers)
            return AWSResponse(request.url, response.status, headers_received, _Received(received))

    def _signed(self, key: str, **parameters: str) -> str:
        """A URL under which an object can be read for a while."""
        try:
            return self.client.generate_presigned_url(
                "get_object",
                Params={"Bucket": self.bucket, "Key": self.name(key), **parameters},
                ExpiresIn=_SIGNED_FOR,
            )
        except BotoCoreError as cause:
            raise error_of_botocore(self.where(key), cause) from cause

    def error(
        self, response: urllib3.BaseHTTPResponse, key: str, deadline: Deadline
    ) -> WarmcastError:
        """What an answer to a read means that is not the object."""
        where = self.where(key)
        code = _CODE.search(read_all(response, 1 << 16, deadline, where))
        return error_of(
            where,
            response.status,
            code[1].decode(errors="replace") if code else "",
            response.headers.get("Retry-After"),
        )


def _client(
    session: botocore.session.Session, access: S3Access, send: Callable[..., AWSResponse]
) -> S3Client:
    client = session.create_client(
        "s3",
        region_name=access.region,
        endpoint_url=access.endpoint,
        config=Config(
            signature_version=UNSIGNED if access.anonymous else "s3v4",
            # Checksums are sent where they are named; a default one would be taken twice.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # Retries are ours, under the deadline. botocore would sleep past it.
            retries={"total_max_attempts": 1, "mode": "standard"},
        ),
    )
    client.meta.events.register("before-send.s3", cast("Any", send))
    return cast("S3Client", client)


def _whole_crc32c(answer: Mapping[str, Any]) -> int | None:
    """The CRC32C of all of an object's bytes, unless what the server has is one over its parts."""
    text = answer.get("ChecksumCRC32C")
    if not text or "-" in text or answer.get("ChecksumType") == "COMPOSITE":
        return None
    return from_base64(text)


def _check_crc32c(where: str, data: bytes, headers: Mapping[str, str]) -> None:
    expected = _whole_crc32c(
        {
            "ChecksumCRC32C": headers.get("x-amz-checksum-crc32c"),
            "ChecksumType": headers.get("x-amz-checksum-type"),
        }
    )
    if expected is not None and (found := crc32c_of(data)) != expected:
        raise IntegrityError(where, expected=to_hex(expected), found=to_hex(found))
