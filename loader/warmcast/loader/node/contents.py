"""What an agent has to know of a manifest: its blobs, and the checksums of their chunks.

The manifest of a model of 2 TB in 100,000 tensors takes 3 s and 400 MiB to parse. An agent needs
neither names nor tensors: it holds the bytes to their digest, reads them as far as the files, which
the canonical spelling has near the beginning, and keeps a few bytes a chunk. All other rules of a
manifest are checked by the workers, who read the whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, overload

from pydantic import BaseModel, ConfigDict

from warmcast.loader.node.cache import Spec
from warmcast.manifests.errors import IntegrityError, InvalidManifest
from warmcast.manifests.manifest import Crc32c, Sha256, Size

LARGEST = 64 << 20
"""Bytes of a chunk, at most: an agent holds some of them in memory."""

_SMALLEST = 4096
_AFTER_FILES = b'],"layouts":'


class Checksums(Sequence[str]):
    """CRC32Cs of chunks, 8 hex digits each, in one text."""

    __slots__ = ("_text",)

    def __init__(self, checksums: Sequence[str]) -> None:
        self._text = "".join(checksums)

    def __len__(self) -> int:
        return len(self._text) // 8

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        return self._text[8 * places : 8 * places + 8]


@dataclass(frozen=True, slots=True)
class Contents:
    """The blobs of a manifest: one a file, in its files' order, and by their SHA-256."""

    files: Sequence[Spec]
    blobs: Mapping[str, Spec]


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    size: Size
    sha256: Sha256
    chunks: tuple[Crc32c, ...]


def parse_contents(data: bytes, digest: str, where: str) -> Contents:
    """The contents of the manifest with a digest (64 hex digits).

    Raises :class:`IntegrityError` if the bytes are others, and :class:`InvalidManifest` for files
    that an agent cannot keep.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise IntegrityError(
            f"{where}: digest",
            expected=digest,
            found=found,
            do="the stored copy is damaged; delete it and deploy again",
        )
    fields = _fields_to_files(data, where)
    chunk_size = fields.get("chunk_size")
    if type(chunk_size) is not int or not _SMALLEST <= chunk_size <= LARGEST:
        raise InvalidManifest(
            f"{where}: chunk_size",
            expected=f"{_SMALLEST} to {LARGEST} bytes, for agents",
            found=chunk_size,
            do="deploy it again with smaller chunks",
        )
    records = fields["files"]
    if not isinstance(records, list):
        raise InvalidManifest(f"{where}: files", expected="a list", found=repr(records)[:80])
    files = [_spec(file, chunk_size, f"{where}: files.{n}") for n, file in enumerate(records)]
    return Contents(files, {spec.sha256: spec for spec in files})


def _spec(record: object, chunk_size: int, where: str) -> Spec:
    try:
        file = _File.model_validate(record)
    except ValueError as cause:
        raise InvalidManifest(where, expected="a file", found=str(cause).splitlines()[-1]) from None
    needed = -(-file.size // chunk_size)
    if len(file.chunks) != needed:
        raise InvalidManifest(
            f"{where}.chunks",
            expected=f"{needed} checksums for {file.size} bytes",
            found=len(file.chunks),
        )
    return Spec(file.sha256, file.size, chunk_size, Checksums(file.chunks))


def _fields_to_files(data: bytes, where: str) -> dict[str, Any]:
    """A manifest's fields down to its files."""
    # What precedes the files may have this mark in it, too: then all is looked through.
    for end in (data.find(_AFTER_FILES) + 1, len(data)):
        with suppress(ValueError, RecursionError):
            # One byte a character, of which only those that are ASCII anyway are of interest.
            return _read_to_files(data[:end].decode("latin-1"))
    raise InvalidManifest(where, expected="canonical JSON with files", found="something else")


def _read_to_files(text: str) -> dict[str, Any]:
    decoder = json.JSONDecoder()
    fields: dict[str, Any] = {}
    at = 0
    while "files" not in fields:
        if text[at : at + 1] != (",{"[not fields]):
            raise ValueError(text[at : at + 1])
        key, at = decoder.raw_decode(text, at + 1)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise ValueError(key)
        fields[key], at = decoder.raw_decode(text, at + 1)
    return fields
