"""Objects in a bucket of Google's that are sent in parts, by one process or by several.

A token is random. Each part is an object, ``transfers/parts/<token>/<index>``, written if there is
none; the server composes them, 32 at a time, into the object. Until then that has no key, so none
has to be known before its last byte. Resumable sessions would take parts in order only.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from warmcast.manifests.checksum import combine, to_base64, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, NotFound, PreconditionFailed, UsageError
from warmcast.manifests.stores import Begun, Part
from warmcast.manifests.stores.http import Transient, read_all

if TYPE_CHECKING:
    from warmcast.manifests.stores.gcs import GcsStore

_FOLDER = "transfers/parts/"
_BEGUN = "begun"
_MOST = 32  # objects that one request composes
_AT_ONCE = 8
_ANSWER = 1 << 20  # bytes of an answer
_HEX = frozenset("0123456789abcdef")


def begin(store: GcsStore, deadline: Deadline) -> str:
    """A new token; an empty object tells when it was begun."""
    token = secrets.token_hex(16)
    store.create(f"{_folder(token)}{_BEGUN}", b"", deadline)
    return token


def put(
    store: GcsStore, token: str, index: int, data: memoryview, crc32c: int, deadline: Deadline
) -> Part:
    """Write a part, unless it is there."""
    key = f"{_folder(token)}{index:06d}"
    generation = _put(store, key, data, crc32c, deadline)
    if generation is None:
        info = store.head(key, deadline)
        if info is None:
            raise NotFound(store.where(key), expected="the upload that was begun", found="none")
        if (info.size, info.crc32c) != (len(data), crc32c):
            raise IntegrityError(
                store.where(key),
                expected=f"{len(data)} bytes, CRC32C {to_hex(crc32c)}",
                found=f"{info.size} bytes of an earlier attempt",
                do="the source changed; deploy again",
            )
        generation = info.etag
    return Part(index, len(data), crc32c, generation)


def _put(
    store: GcsStore, key: str, data: memoryview, crc32c: int, deadline: Deadline
) -> str | None:
    """Write an object from the caller's buffer, which the library would copy several times.

    Its generation; None if there is an object already.
    """
    about = json.dumps({"name": store.name(key), "crc32c": to_base64(crc32c)})
    boundary = secrets.token_hex(16)
    kind = "application/octet-stream"
    head = (
        f"--{boundary}\r\nContent-Type: application/json\r\n\r\n{about}\r\n"
        f"--{boundary}\r\nContent-Type: {kind}\r\n\r\n"
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()
    headers = {
        "Content-Type": f"multipart/related; boundary={boundary}",
        "Content-Length": str(len(head) + len(data) + len(tail)),
    }
    url = f"{store.uploads}?uploadType=multipart&ifGenerationMatch=0"
    call = store.asking(key, deadline)
    while True:
        deadline.check(f"sending to {call.where}")
        try:
            sent = headers | call.headers()
            with store.http.open(
                "POST", url, deadline, headers=sent, body=(head, data, tail)
            ) as response:
                if response.status != 200:
                    raise call.error(response)
                written = json.loads(read_all(response, _ANSWER, deadline, call.where))
            return store.check_written(key, len(data), crc32c, deadline, written)
        except PreconditionFailed:
            return None
        except Transient as failure:
            call.attempts.wait(failure)


def complete(
    store: GcsStore,
    token: str,
    parts: Sequence[Part],
    key: str,
    crc32c: int,
    deadline: Deadline,
) -> bool:
    """Compose the parts, if there is no object under ``key``; whether it was written."""
    whole = 0
    for part in parts:
        whole = combine(whole, part.crc32c, part.size)
    if whole != crc32c:
        raise IntegrityError(store.where(key), expected=to_hex(crc32c), found=to_hex(whole))
    written = False
    try:
        if store.head(key, deadline) is None:
            composed = _compose(store, token, parts, key, deadline)
            size = sum(part.size for part in parts)
            store.check_written(key, size, crc32c, deadline, composed)
            written = True
    except (NotFound, PreconditionFailed):
        # Somebody else wrote it; or we did, and the answer was lost.
        if store.head(key, deadline) is None:
            raise
    abort(store, token, deadline)
    return written


def _compose(
    store: GcsStore, token: str, parts: Sequence[Part], key: str, deadline: Deadline
) -> Mapping[str, Any]:
    """Compose the object, by way of others where there are many parts; what the server says."""
    folder = _folder(token)
    if store.head(f"{folder}{_BEGUN}", deadline) is None:
        raise NotFound(store.where(key), expected="the upload that was begun", found="none")
    level = [(f"{folder}{part.index:06d}", part.tag) for part in parts]
    depth = 0
    while len(level) > _MOST:
        depth += 1
        groups = [level[i : i + _MOST] for i in range(0, len(level), _MOST)]
        names = [f"{folder}c{depth}-{i:06d}" for i in range(len(groups))]
        with ThreadPoolExecutor(_AT_ONCE, "warmcast-compose") as pool:
            made = partial(store.compose, deadline=deadline, generation=None)
            etags = [str(found["generation"]) for found in pool.map(made, groups, names)]
        level = list(zip(names, etags, strict=True))
    return store.compose(level, key, deadline=deadline, generation=0)


def abort(store: GcsStore, token: str, deadline: Deadline) -> None:
    """Delete the parts; what tells of them goes last."""
    keys = [info.key for info in store.list(_folder(token), deadline)]
    last = f"{_folder(token)}{_BEGUN}"
    with ThreadPoolExecutor(_AT_ONCE, "warmcast-delete") as pool:
        list(pool.map(lambda key: store.delete(key, deadline), (k for k in keys if k != last)))
    store.delete(last, deadline)


def begun(store: GcsStore, deadline: Deadline) -> Iterator[Begun]:
    """The tokens of which there are parts, and the age of the youngest."""
    newest: dict[str, datetime] = {}
    for key, at in store.created(_FOLDER, deadline):
        token = key.removeprefix(_FOLDER).partition("/")[0]
        with suppress(UsageError):
            _folder(token)
            newest[token] = max(at, newest.get(token, at))
    for token, at in sorted(newest.items()):
        yield Begun(token, (datetime.now(UTC) - at).total_seconds())


def _folder(token: str) -> str:
    if len(token) != 32 or not _HEX.issuperset(token):
        raise UsageError("token", expected="one that begin_parts gave", found=repr(token))
    return f"{_FOLDER}{token}/"
