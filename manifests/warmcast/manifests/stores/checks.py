"""What every store holds its callers to: keys that stay below its URL, and sources that hold
the bytes they were promised with.

A key is ``/``-separated parts of ``[A-Za-z0-9._@+-]``; no part is empty, ``.`` or ``..``, and the
first is not ``.tmp``, where the file store keeps what is unfinished. The rules are the same for
all stores, so that an origin can be copied from any to any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import urlsplit

from warmcast.manifests.checksum import combine, crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, StoreError, UsageError

RESERVED = ".tmp"
"""The first part that no key has."""

_PART = re.compile(r"[A-Za-z0-9._@+-]{1,255}")
_MAX_KEY = 900  # S3 takes 1024 bytes, a store's own prefix included


def is_key_part(name: str) -> bool:
    """Whether one part of a key may have this name."""
    return _PART.fullmatch(name) is not None and name not in (".", "..")


def check_key(key: str) -> None:
    """Raise :class:`UsageError` unless ``key`` names an object below a store's URL."""
    parts = key.split("/")
    if not all(map(is_key_part, parts)) or parts[0] == RESERVED or len(key) > _MAX_KEY:
        raise UsageError(
            "object key",
            expected=f"parts of letters, digits and . _ @ + -, {_MAX_KEY} characters at most",
            found=repr(key)[:200],
        )


def check_prefix(prefix: str) -> None:
    """Raise :class:`UsageError` unless ``prefix`` is empty or begins a key."""
    if prefix:
        check_key(f"{prefix}_")


def parse_bucket(url: str, scheme: str, *, any_key: bool = False) -> tuple[str, str]:
    """The bucket of ``scheme://bucket/prefix``, and the prefix with the ``/`` after it, or empty.

    ``any_key`` takes prefixes that are no keys of ours. Raises :class:`UsageError` for a URL of
    another form.
    """
    if any_key:  # '?' and '#' may be part of it
        bucket, _, rest = url.removeprefix(f"{scheme}://").partition("/")
        prefix = rest.strip("/")
        return _checked_bucket(url, scheme, bucket), f"{prefix}/" if prefix else ""
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    if parts.scheme != scheme or not parts.netloc or "@" in parts.netloc or parts.query:
        raise UsageError("origin", expected=f"{scheme}://bucket/prefix", found=repr(url))
    if prefix:
        check_key(prefix)
    return parts.netloc, f"{prefix}/" if prefix else ""


def _checked_bucket(url: str, scheme: str, bucket: str) -> str:
    if not url.startswith(f"{scheme}://") or not is_key_part(bucket) or "@" in bucket:
        raise UsageError("bucket", expected=f"{scheme}://bucket/prefix", found=repr(url))
    return bucket


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a source's bytes, and its CRC32C."""

    data: bytes
    crc32c: int


def pieces(
    what: str, source: BinaryIO, size: int, promised: int, length: int, deadline: Deadline
) -> Iterator[Piece]:
    """The ``size`` bytes of ``source`` from where it stands, in pieces of ``length`` bytes.

    Only the last piece is shorter. After it, unless the source ended there and the CRC32C of all
    the bytes is ``promised``, :class:`IntegrityError` is raised, naming ``what``: a caller makes
    nothing visible before the iteration has ended.
    """
    total = 0
    done = 0
    while done < size:
        deadline.check(f"reading the source of {what}")
        data = _read_fully(source, min(length, size - done))
        if not data:
            raise IntegrityError(what, expected=f"{size} bytes", found=f"{done}")
        piece = Piece(data, crc32c(data))
        total = combine(total, piece.crc32c, len(data)) if done else piece.crc32c
        done += len(data)
        yield piece
    if source.read(1):
        raise IntegrityError(what, expected=f"{size} bytes", found="more")
    if total != promised:
        raise IntegrityError(
            f"{what}: CRC32C of the bytes to be sent",
            expected=to_hex(promised),
            found=to_hex(total),
            do="the source changed or is damaged; read it again",
        )


def _read_fully(source: BinaryIO, length: int) -> bytes:
    """``length`` bytes, or those that are left: a pipe or a socket gives less than asked."""
    data = source.read(length)
    if len(data) == length or not data:
        return data
    parts = [data]
    missing = length - len(data)
    while missing and (data := source.read(missing)):
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)


def check_range(what: str, offset: int) -> None:
    """Raise :class:`StoreError` for an offset that no object has."""
    if offset < 0:
        raise StoreError(what, expected="an offset of 0 or more", found=offset)
