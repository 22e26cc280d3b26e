"""Uploading an object in parts: several at once, in bounded memory, visible when all are there.

Each part carries its CRC32C and the completion that of the whole object (FULL_OBJECT), so that the
server refuses what differs; the completion is conditional, so that of several writers one wins.

An upload that fails is aborted. One whose process was killed stays behind, invisible; whoever next
completes the same object aborts all others of it, be they dead or alive: a live one then finds the
object there, which is what it wanted. Nobody has to guess from a clock who is dead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from warmcast.manifests.checksum import to_base64, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    CredentialsRefused,
    DeadlineExceeded,
    IntegrityError,
    NotFound,
    PreconditionFailed,
    StoreError,
)
from warmcast.manifests.stores.checks import Piece, pieces

if TYPE_CHECKING:
    from warmcast.manifests.stores.s3 import S3Store

PARALLEL = 4
"""Parts that are sent at once; one more is being read, and each is in memory."""

_MOST_PARTS = 10_000
_CLEANUP = 5.0  # seconds, of those given, kept back to take away what was begun


def upload_in_parts(
    store: S3Store,
    key: str,
    source: BinaryIO,
    size: int,
    crc32c: int,
    deadline: Deadline,
    progress: Callable[[int], None] | None,
) -> bool:
    """Upload an object that was not there; whether it was written, or another was faster."""
    work = Deadline(deadline.at - min(_CLEANUP, deadline.remaining() / 10))
    answer = store.call(
        store.client.create_multipart_upload,
        key,
        work,
        Key=store.name(key),
        ChecksumAlgorithm="CRC32C",
        ChecksumType="FULL_OBJECT",
    )
    upload = (key, str(answer["UploadId"]))
    store.unfinished.add(upload)
    try:
        parts = _send_parts(store, upload, source, size, crc32c, work, progress)
        _complete(store, upload, parts, size, crc32c, work)
    except (NotFound, PreconditionFailed):
        _abort(store, upload, deadline)
        if store.head(key, deadline) is None:
            raise
        return False
    except BaseException:
        _abort(store, upload, deadline)
        raise
    store.unfinished.discard(upload)
    abort_others(store, key, deadline)
    return True


def abort_all(store: S3Store) -> None:
    """Try once more to abort what could not be aborted when it failed."""
    for upload in list(store.unfinished):
        _abort(store, upload, Deadline.after(_CLEANUP))


def _send_parts(
    store: S3Store,
    upload: tuple[str, str],
    source: BinaryIO,
    size: int,
    crc32c: int,
    deadline: Deadline,
    progress: Callable[[int], None] | None,
) -> list[dict[str, Any]]:
    """Send all parts; what the completion has to name of each."""
    key, upload_id = upload
    cancelled = threading.Event()

    def send(number: int, piece: Piece) -> dict[str, Any]:
        crc = to_base64(piece.crc32c)
        answer = store.call(
            store.client.upload_part,
            key,
            deadline,
            cancelled,
            Key=store.name(key),
            UploadId=upload_id,
            PartNumber=number,
            Body=piece.data,
            ChecksumCRC32C=crc,
        )
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32C": crc}

    done: list[dict[str, Any]] = []
    sending: deque[tuple[int, Future[dict[str, Any]]]] = deque()

    def finish_one() -> None:
        nbytes, future = sending.popleft()
        done.append(future.result())
        if progress is not None:
            progress(nbytes)

    length = max(store.part_size, -(-size // _MOST_PARTS))
    source_pieces = pieces(store.where(key), source, size, crc32c, length, deadline)
    with ThreadPoolExecutor(PARALLEL, "warmcast-upload") as pool:
        try:
            for number, piece in enumerate(source_pieces, start=1):
                sending.append((len(piece.data), pool.submit(send, number, piece)))
                if len(sending) == PARALLEL:
                    finish_one()
            while sending:
                finish_one()
        except BaseException:
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return done


def _complete(
    store: S3Store,
    upload: tuple[str, str],
    parts: list[dict[str, Any]],
    size: int,
    crc32c: int,
    deadline: Deadline,
) -> None:
    key, upload_id = upload
    answer = store.call(
        store.client.complete_multipart_upload,
        key,
        deadline,
        Key=store.name(key),
        UploadId=upload_id,
        MultipartUpload={"Parts": parts},
        ChecksumCRC32C=to_base64(crc32c),
        ChecksumType="FULL_OBJECT",
        MpuObjectSize=size,
        IfNoneMatch="*",
    )
    found = answer.get("ChecksumCRC32C", "")
    if found and "-" not in found and found != to_base64(crc32c):
        raise IntegrityError(store.where(key), expected=to_hex(crc32c), found=found)


def _abort(store: S3Store, upload: tuple[str, str], deadline: Deadline) -> None:
    """Abort an upload; where the server cannot be reached it is left for :func:`abort_all`."""
    key, upload_id = upload
    with suppress(StoreError, DeadlineExceeded):
        with suppress(NotFound):
            store.call(
                store.client.abort_multipart_upload,
                key,
                deadline.within(_CLEANUP),
                Key=store.name(key),
                UploadId=upload_id,
            )
        store.unfinished.discard(upload)


def abort_others(store: S3Store, key: str, deadline: Deadline) -> None:
    """Abort all other uploads of an object that is now there."""
    # Listing uploads is a permission of its own, and the object is written: a bucket's life cycle
    # rule then has to do it.
    with suppress(CredentialsRefused):
        answer = store.call(
            store.client.list_multipart_uploads, key, deadline, Prefix=store.name(key)
        )
        for other in answer.get("Uploads", ()):
            if other["Key"] == store.name(key):
                _abort(store, (key, other["UploadId"]), deadline)
