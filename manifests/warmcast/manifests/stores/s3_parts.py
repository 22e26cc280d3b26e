"""Objects in a bucket that are sent in parts, by one process or by several after each other.

A token is the key and the id of a multipart upload. An upload is bound to a key: where that is not
known before the last byte, the upload is completed under ``transfers/staged/`` and copied by the
server, which takes no byte through this process.

Parts go from the caller's buffer to the socket under a signed URL: botocore would copy them, and
sign a SHA-256 of them where there is no TLS.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError

from warmcast.manifests.checksum import combine, from_base64, to_base64, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    CredentialsRefused,
    DeadlineExceeded,
    IntegrityError,
    NotFound,
    PreconditionFailed,
    StoreError,
)
from warmcast.manifests.stores import Begun, ObjectInfo, Part
from warmcast.manifests.stores.http import Attempts, Transient
from warmcast.manifests.stores.s3_errors import error_of_botocore
from warmcast.manifests.stores.s3_upload import abort_others

if TYPE_CHECKING:
    from warmcast.manifests.stores.s3 import S3Store

STAGED = "transfers/staged/"
_SIGNED_FOR = 3600  # seconds; a signed URL is used at once
_COPY_WHOLE = 5_000_000_000  # bytes of the largest object that S3 copies in one request
_COPY_PART = 1 << 30
_PATIENCE = 300.0  # seconds for which a server may copy or complete before it answers
_COPIES = 8  # parts that the server is asked to copy at once
_MOST_PARTS = 10_000
_CLEANUP = 5.0  # seconds to take away a copy that failed


def begin(store: S3Store, key: str | None, deadline: Deadline) -> str:
    """Begin a multipart upload; its token."""
    return _begin(store, key or f"{STAGED}{secrets.token_hex(16)}", deadline)


def put(
    store: S3Store, token: str, index: int, data: memoryview, crc32c: int, deadline: Deadline
) -> Part:
    """Send a part."""
    key, upload = _split(token)
    crc = to_base64(crc32c)
    where = store.where(key)
    headers = {"x-amz-checksum-crc32c": crc, "Content-Length": str(len(data))}
    attempts = Attempts(where, deadline)
    damaged = False
    while True:
        deadline.check(f"sending to {where}")
        try:
            url = store.client.generate_presigned_url(
                "upload_part",
                Params={
                    "Bucket": store.bucket,
                    "Key": store.name(key),
                    "UploadId": upload,
                    "PartNumber": index + 1,
                    "ChecksumCRC32C": crc,
                },
                ExpiresIn=_SIGNED_FOR,
            )
            with store.http.open("PUT", url, deadline, headers=headers, body=data) as response:
                if response.status != 200:
                    raise store.error(response, key, deadline)
                return Part(index, len(data), crc32c, response.headers.get("ETag", ""))
        except BotoCoreError as cause:
            raise error_of_botocore(where, cause) from cause
        except IntegrityError:  # on their way, if they are not again
            if damaged:
                raise
            damaged = True
        except Transient as failure:
            attempts.wait(failure)


def complete(
    store: S3Store,
    token: str,
    parts: Sequence[Part],
    key: str,
    crc32c: int,
    deadline: Deadline,
) -> bool:
    """Complete the upload, and copy the object if it is not where it is to be."""
    begun, _ = _split(token)
    size = sum(part.size for part in parts)
    if begun == key:
        return _complete(store, token, parts, size, crc32c, deadline)
    if store.head(key, deadline) is not None:
        abort(store, token, deadline)
        return False
    _complete(store, token, parts, size, crc32c, deadline)
    info = store.head(begun, deadline)
    if info is None:  # another process has copied it, or taken it away
        if store.head(key, deadline) is None:
            raise NotFound(store.where(begun), expected="the upload that was begun", found="none")
        return False
    if (info.size, info.crc32c or crc32c) != (size, crc32c):
        raise IntegrityError(
            store.where(begun),
            expected=f"{size} bytes, CRC32C {to_hex(crc32c)}",
            found=f"{info.size} bytes, CRC32C {to_hex(info.crc32c or 0)}",
            do="deploy again",
        )
    copied = _copy(store, info, key, crc32c, deadline)
    store.delete(begun, deadline)
    return copied


def abort(store: S3Store, token: str, deadline: Deadline) -> None:
    """Abort the upload, and delete what it became if that was not copied."""
    key, upload = _split(token)
    with suppress(NotFound):
        store.call(
            store.client.abort_multipart_upload,
            key,
            deadline,
            Key=store.name(key),
            UploadId=upload,
        )
    if key.startswith(STAGED):
        store.delete(key, deadline)


def begun(store: S3Store, deadline: Deadline) -> Iterator[Begun]:
    """The multipart uploads below the store's URL, and what is staged."""
    found: list[Begun] = []
    # Listing uploads is a permission of its own; a bucket's life cycle rule then has to end them.
    with suppress(CredentialsRefused):
        found += _uploads(store, deadline)
    page: dict[str, Any] = {"Prefix": store.prefix + STAGED}
    answer = store.call(store.client.list_objects_v2, STAGED, deadline, **page)
    for entry in answer.get("Contents", ()):
        key = entry["Key"].removeprefix(store.prefix)
        found.append(Begun(f"{key} -", _age(entry["LastModified"])))
    yield from found


def _uploads(store: S3Store, deadline: Deadline) -> list[Begun]:
    found = []
    page: dict[str, Any] = {"Prefix": store.prefix}
    while True:
        answer = store.call(store.client.list_multipart_uploads, "", deadline, **page)
        for upload in answer.get("Uploads", ()):
            key = upload["Key"].removeprefix(store.prefix)
            if " " not in key:  # else it is none of ours
                found.append(Begun(f"{key} {upload['UploadId']}", _age(upload["Initiated"])))
        if not answer.get("IsTruncated"):
            return found
        page["KeyMarker"] = answer["NextKeyMarker"]
        page["UploadIdMarker"] = answer["NextUploadIdMarker"]


def _begin(store: S3Store, key: str, deadline: Deadline) -> str:
    answer = store.call(
        store.client.create_multipart_upload,
        key,
        deadline,
        Key=store.name(key),
        ChecksumAlgorithm="CRC32C",
        ChecksumType="FULL_OBJECT",
    )
    return f"{key} {answer['UploadId']}"


def _complete(
    store: S3Store,
    token: str,
    parts: Sequence[Part],
    size: int,
    crc32c: int,
    deadline: Deadline,
) -> bool:
    """Complete an upload under its own key; False if there is an object already."""
    key, upload = _split(token)
    whole = 0
    for part in parts:
        whole = combine(whole, part.crc32c, part.size)
    if whole != crc32c:
        raise IntegrityError(store.where(key), expected=to_hex(crc32c), found=to_hex(whole))
    try:
        answer = store.call(
            store.client.complete_multipart_upload,
            key,
            deadline,
            idle=_PATIENCE,
            Key=store.name(key),
            UploadId=upload,
            MultipartUpload={
                "Parts": [
                    {
                        "PartNumber": part.index + 1,
                        "ETag": part.tag,
                        "ChecksumCRC32C": to_base64(part.crc32c),
                    }
                    for part in parts
                ]
            },
            ChecksumCRC32C=to_base64(crc32c),
            ChecksumType="FULL_OBJECT",
            MpuObjectSize=size,
            IfNoneMatch="*",
        )
    except (NotFound, PreconditionFailed):
        # Somebody else wrote it; or we did, and the answer was lost.
        if store.head(key, deadline) is None:
            raise
        if not key.startswith(STAGED):
            abort(store, token, deadline)
        return False
    found = answer.get("ChecksumCRC32C", "")
    if found and "-" not in found and found != to_base64(crc32c):
        raise IntegrityError(store.where(key), expected=to_hex(crc32c), found=found)
    if not key.startswith(STAGED):
        abort_others(store, key, deadline)
    return True


def _copy(store: S3Store, source: ObjectInfo, key: str, crc32c: int, deadline: Deadline) -> bool:
    """Have the server copy an object, if there is none under ``key``."""
    place = {"Bucket": store.bucket, "Key": store.name(source.key)}
    if source.size <= _COPY_WHOLE:
        try:
            store.call(
                store.client.copy_object,
                key,
                deadline,
                idle=_PATIENCE,
                Key=store.name(key),
                CopySource=place,
                CopySourceIfMatch=source.etag,
                IfNoneMatch="*",
            )
        except PreconditionFailed:
            if store.head(key, deadline) is None:
                raise
            return False
        return True
    token = _begin(store, key, deadline)
    length = max(_COPY_PART, -(-source.size // _MOST_PARTS))

    def copy(index: int) -> Part:
        first = index * length
        last = min(first + length, source.size) - 1
        answer = store.call(
            store.client.upload_part_copy,
            key,
            deadline,
            idle=_PATIENCE,
            Key=store.name(key),
            UploadId=_split(token)[1],
            PartNumber=index + 1,
            CopySource=place,
            CopySourceRange=f"bytes={first}-{last}",
            CopySourceIfMatch=source.etag,
        )["CopyPartResult"]
        return Part(
            index,
            last + 1 - first,
            from_base64(answer["ChecksumCRC32C"]),
            answer["ETag"],
        )

    try:
        with ThreadPoolExecutor(_COPIES, "warmcast-copy") as pool:
            parts = list(pool.map(copy, range(-(-source.size // length))))
        return _complete(store, token, parts, source.size, crc32c, deadline)
    except BaseException:
        with suppress(StoreError, DeadlineExceeded):
            abort(store, token, Deadline.after(_CLEANUP))
        raise


def _split(token: str) -> tuple[str, str]:
    key, _, upload = token.partition(" ")
    return key, upload


def _age(at: datetime) -> float:
    return (datetime.now(UTC) - at).total_seconds()
