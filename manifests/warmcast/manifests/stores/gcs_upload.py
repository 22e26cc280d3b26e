"""Uploading a large object by a resumable session: part after part, visible when all are there.

The session is opened with the CRC32C of the whole, which the server holds the bytes to, and with
the condition that there be no such object, which it checks when the last part has come. The last
part is sent only when the source was found to hold what was promised. A part that broke goes on
from what the server has of it.

A session that fails is cancelled. One whose process was killed, or whose URL was lost on its way
to us, cannot be found by anybody; it is invisible, costs nothing, and Google forgets it after a
week.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    DeadlineExceeded,
    PreconditionFailed,
    StoreError,
)
from warmcast.manifests.stores.checks import pieces
from warmcast.manifests.stores.gcs_errors import error_of
from warmcast.manifests.stores.http import Attempts, Transient, read_all

if TYPE_CHECKING:
    from warmcast.manifests.stores.gcs import GcsStore

_GRAIN = 256 << 10  # every part but the last is a multiple of so many bytes
_CLEANUP = 5.0  # seconds, of those given, kept back to take away what was begun
_LIMIT = 1 << 20  # bytes of an answer
_CANCELLED = 499
_INCOMPLETE = 308
_RANGE = re.compile(r"bytes=0-(\d+)")


class _SessionGone(StoreError):
    """The server knows no such session (any more)."""


def upload_resumably(
    store: GcsStore,
    key: str,
    source: BinaryIO,
    size: int,
    crc32c: int,
    deadline: Deadline,
    progress: Callable[[int], None] | None = None,
    *,
    generation: int = 0,
) -> str | None:
    """Upload an object if the one there is of ``generation`` (0: none).

    Its etag, or None if another writer was faster.
    """
    work = Deadline(deadline.at - min(_CLEANUP, deadline.remaining() / 10))
    blob = store.blob(key, crc32c)
    try:
        url: str = store.call(
            key,
            work,
            lambda: blob.create_resumable_upload_session(
                "application/octet-stream",
                size,
                checksum=None,
                if_generation_match=generation,
                retry=None,
            ),
        )
    except PreconditionFailed:
        return None
    session = _Session(store, key, url, size, work)
    store.unfinished.add((key, url))
    try:
        written = _send_all(session, source, crc32c, progress)
    except (PreconditionFailed, _SessionGone) as failure:
        _cancel(store, (key, url), deadline)
        info = store.head(key, deadline)
        if info is None or (generation and isinstance(failure, _SessionGone)):
            raise
        # Of a session that is complete, the answer that said so may be what was lost.
        ours = session.asked_again and (info.size, info.crc32c) == (size, crc32c)
        return info.etag if ours else None
    except BaseException:
        _cancel(store, (key, url), deadline)
        raise
    store.unfinished.discard((key, url))
    return store.check_written(key, size, crc32c, deadline, written)


def cancel_all(store: GcsStore) -> None:
    """Try once more to cancel what could not be cancelled when it failed."""
    for session in list(store.unfinished):
        _cancel(store, session, Deadline.after(_CLEANUP))


def _send_all(
    session: _Session, source: BinaryIO, crc32c: int, progress: Callable[[int], None] | None
) -> Mapping[str, Any]:
    """Send all of the source; what the server says of the finished object."""
    length = max(_GRAIN, session.store.part_size // _GRAIN * _GRAIN)
    held = b""
    first = 0
    # One part is held back: pieces() raises after the last if they are not what was promised.
    for piece in pieces(session.where, source, session.size, crc32c, length, session.deadline):
        if held:
            written = session.send(first, held)
            if written is not None:  # too soon: what is there is not what was promised
                return written
            first += len(held)
            if progress is not None:
                progress(len(held))
        held = piece.data
    written = session.send(first, held)
    if written is None:
        raise StoreError(session.where, expected="an object", found="an upload that never ends")
    if progress is not None:
        progress(len(held))
    return written


class _Session:
    """One resumable upload, as the server keeps it; its URL is a credential of its own."""

    def __init__(self, store: GcsStore, key: str, url: str, size: int, deadline: Deadline) -> None:
        self.store = store
        self.where = store.where(key)
        self.size = size
        self.deadline = deadline
        self.asked_again = False
        """Whether an answer was lost, or was no success."""
        self._url = url
        self._in_doubt = False

    def send(self, first: int, data: bytes) -> Mapping[str, Any] | None:
        """Send the bytes from ``first``; what the server says of the object if it is complete."""
        attempts = Attempts(self.where, self.deadline)
        end = first + len(data)
        start = first
        while True:
            try:
                if self._in_doubt:
                    answer = self._put(b"", f"bytes */{self.size}")
                else:
                    rest = data[start - first :] if start > first else data
                    answer = self._put(rest, f"bytes {start}-{end - 1}/{self.size}")
                if not isinstance(answer, int):
                    return answer
                start = self._check_kept(answer, first, start, end)
                if start == end:
                    return None
            except Transient as failure:
                self.asked_again = self._in_doubt = True
                attempts.wait(failure)

    def _check_kept(self, kept: int, first: int, start: int, end: int) -> int:
        """Judge how many bytes the server says it has; where to go on from."""
        if not first <= kept <= end:
            raise StoreError(self.where, expected=f"{first} to {end} bytes kept", found=kept)
        was_asked, self._in_doubt = self._in_doubt, False
        if kept == self.size or (kept == start and not was_asked):
            raise Transient(self.where, f"an upload that stays at {kept} bytes")
        return kept

    def _put(self, body: bytes, content_range: str) -> Mapping[str, Any] | int:
        """One request of the session: the finished object, or how many bytes the server has."""
        headers = {"Content-Range": content_range, "Content-Length": str(len(body))}
        with self.store.http.open(
            "PUT", self._url, self.deadline, headers=headers, body=body
        ) as response:
            answer = read_all(response, _LIMIT, self.deadline, self.where)
            if response.status == _INCOMPLETE:
                kept = _RANGE.fullmatch(response.headers.get("Range", ""))
                return int(kept[1]) + 1 if kept else 0
            if response.status in (200, 201):
                found: Mapping[str, Any] = json.loads(answer)
                return found
            if response.status in (404, 410):
                raise _SessionGone(
                    self.where,
                    expected="the upload that was begun",
                    found=response.status,
                    do="start it again",
                )
            retry_after = response.headers.get("Retry-After")
            raise error_of(self.where, response.status, answer, retry_after)


def _cancel(store: GcsStore, session: tuple[str, str], deadline: Deadline) -> None:
    """Cancel an upload; where the server cannot be reached it is left for :func:`cancel_all`."""
    key, url = session
    where = store.where(key)
    soon = deadline.within(_CLEANUP)
    attempts = Attempts(where, soon)
    with suppress(StoreError, DeadlineExceeded):
        while True:
            try:
                with store.http.open(
                    "DELETE", url, soon, headers={"Content-Length": "0"}
                ) as response:
                    answer = read_all(response, _LIMIT, soon, where)
                    if response.status not in (_CANCELLED, 200, 204, 404, 410):
                        raise error_of(where, response.status, answer)
                    break
            except Transient as failure:
                attempts.wait(failure)
        store.unfinished.discard(session)
