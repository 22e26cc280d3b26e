"""The manifest, schema 1: what a deployment's bytes are, and how one proves it.

Wire form: canonical JSON (see :mod:`canonical`); its SHA-256 is the manifest's digest and its name
in the origin. Checksums are 8 hex digits, sampled hashes 32, SHA-256 64; sizes and offsets count
bytes; ``begin`` and ``end`` are places in the file itself, its header included.

``tensors`` stand in load order, the order in which layers run. ``tied`` names tensors that share
another's memory: as a view of its elements, which for weights tied whole is all of them. A stored
tensor may exist only to be viewed (the common memory of tensors that overlap without one holding
the others). ``layouts`` hold, for each mesh that the deployment names, what each rank holds.

:func:`parse_manifest` believes nothing: whatever a loader would later rely on is checked here,
because a gap, an overlap or a wrong size would end as wrong bytes in a tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    model_serializer,
)

from warmcast.manifests.canonical import canonical_json, digest, parse_json
from warmcast.manifests.dtypes import MAX_NUMEL
from warmcast.manifests.errors import IntegrityError, InvalidData, InvalidManifest
from warmcast.manifests.identity import Mesh, model_key
from warmcast.manifests.rules import check_manifest

CHUNK_SIZE = 16 * 1024 * 1024
"""Bytes of a file under one chunk checksum, in manifests that we write."""

TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""How records write a time: UTC, to the second."""


def _time(text: str) -> str:
    try:
        spelled = datetime.strptime(text, TIME_FORMAT).strftime(TIME_FORMAT)
    except ValueError:
        spelled = None
    if text != spelled:
        raise ValueError("a UTC time like 2026-01-31T23:59:59Z")
    return text


Crc32c = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Sample = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Size = Annotated[int, Field(ge=0, le=MAX_NUMEL, strict=True)]
Time = Annotated[str, AfterValidator(_time)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class Record(BaseModel):
    """What comes from outside: frozen, nothing unknown, nothing converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))


class FileEntry(Record):
    """One file of the deployment: a blob in the origin, under a path for people and tools."""

    path: Name
    size: Size
    sha256: Sha256
    crc32c: Crc32c
    chunks: tuple[Crc32c, ...]


class TensorEntry(Record):
    """One stored tensor: its bytes in a file, and the truth about them."""

    name: Name
    dtype: str
    shape: tuple[Size, ...]
    file: Name
    begin: Size
    end: Size
    crc32c: Crc32c
    sample: Sample

    @property
    def nbytes(self) -> int:
        """The tensor's length in bytes."""
        return self.end - self.begin


class TiedEntry(Record):
    """A tensor that is a view of a stored one's elements; strides and offset count elements."""

    name: Name
    of: Name
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size


class SliceEntry(Record):
    """What a rank holds of a stored tensor: ``length`` along ``axis`` from ``start``, or all.

    The truth (``crc32c``, ``sample``) is that of the slice, row-major.
    """

    name: Name
    axis: Size | None = None
    start: Size = 0
    length: Size = 0
    crc32c: Crc32c
    sample: Sample

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The slice's shape, from the stored tensor's."""
        if self.axis is None:
            return whole
        return (*whole[: self.axis], self.length, *whole[self.axis + 1 :])


class MeshRecord(Record):
    """A mesh as a manifest writes it; see :class:`identity.Mesh`."""

    dimensions: tuple[tuple[Name, Annotated[int, Field(ge=1, strict=True)]], ...]
    coordinates: tuple[tuple[Size, ...], ...]
    plan: dict[str, str]

    def mesh(self) -> Mesh:
        """The mesh itself."""
        return Mesh(self.dimensions, self.coordinates, self.plan)


class Copied(Record):
    """Where a shard holds what its rank has of a tensor, row-major; places in the file itself."""

    name: Name
    begin: Size
    end: Size


class Shard(Record):
    """A file in which what a rank holds lies in one run; of some of its tensors, or all.

    The file holds the copies without gaps to its end. Ranks that hold the same may share one.
    """

    file: Name
    tensors: tuple[Copied, ...]


class Layout(Record):
    """One mesh: its key, what each of its ranks holds, in load order, and each rank's shard.

    Where there are no ``shards``, the record does not have the field.
    """

    mesh: MeshRecord
    mesh_key: Sha256
    ranks: tuple[tuple[SliceEntry, ...], ...]
    shards: tuple[Shard, ...] = ()

    @model_serializer(mode="wrap")
    def _without_no_shards(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        record: dict[str, Any] = handler(self)
        if not self.shards:
            del record["shards"]
        return record


class Manifest(Record):
    """The record of one deployment. Build it with :func:`build_manifest`."""

    schema_: Literal[1] = Field(default=1, validation_alias="schema", serialization_alias="schema")
    model: Name
    revision: str
    upstream: str
    created_at: Time
    chunk_size: Annotated[int, Field(ge=4096, le=1 << 40, strict=True)]
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    tied: tuple[TiedEntry, ...] = ()
    config: dict[str, Any]
    config_hash: Sha256
    model_key: Sha256
    layouts: tuple[Layout, ...] = ()

    @cached_property
    def data(self) -> bytes:
        """The canonical JSON."""
        return canonical_json(self.model_dump(mode="json", by_alias=True))

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the canonical JSON, and the manifest's name in the origin."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def file(self) -> Mapping[str, FileEntry]:
        """The files by path."""
        return {entry.path: entry for entry in self.files}

    @cached_property
    def tensor(self) -> Mapping[str, TensorEntry]:
        """The stored tensors by name."""
        return {entry.name: entry for entry in self.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    def layout(self, mesh: Mesh) -> Layout | None:
        """The layout for a mesh, if the deployment named it."""
        return next((entry for entry in self.layouts if entry.mesh_key == mesh.key), None)

    def same_content(self, other: Manifest) -> bool:
        """Whether both describe the same bytes and names, whenever each was made."""
        return self.model_copy(update={"created_at": other.created_at}) == other


def build_manifest(
    *,
    model: str,
    revision: str,
    upstream: str,
    created_at: str,
    files: Iterable[FileEntry],
    tensors: Iterable[TensorEntry],
    tied: Iterable[TiedEntry] = (),
    config: Mapping[str, Any],
    layouts: Iterable[Layout] = (),
    chunk_size: int = CHUNK_SIZE,
) -> Manifest:
    """Build a manifest, computing its keys, and hold it to the rules that parsing checks.

    Files may come in any order. Raises :class:`InvalidManifest`, naming the field.
    """
    files = tuple(sorted(files, key=lambda f: f.path))
    with _as_invalid_manifest("manifest"):
        # Through its own spelling, so that what is parsed later equals what was built.
        plain: dict[str, Any] = parse_json(canonical_json(config), "config")
        manifest = Manifest(
            model=model,
            revision=revision,
            upstream=upstream,
            created_at=created_at,
            chunk_size=chunk_size,
            files=files,
            tensors=tuple(tensors),
            tied=tuple(tied),
            config=plain,
            config_hash=digest(plain),
            model_key=_model_key(plain, files),
            layouts=tuple(layouts),
        )
        check_manifest(manifest, "manifest")
        manifest.data  # noqa: B018 - spelled now, so that it cannot fail later
    return manifest


def parse_manifest(
    data: bytes, expected_digest: str | None = None, where: str = "manifest"
) -> Manifest:
    """Parse and check a manifest's bytes.

    Raises :class:`IntegrityError` if their SHA-256 is not ``expected_digest``, and
    :class:`InvalidManifest`, naming the field, for whatever else is wrong: another spelling than
    the canonical one too, because a manifest would then have two digests.
    """
    if expected_digest is not None:
        found = hashlib.sha256(data).hexdigest()
        if found != expected_digest:
            raise IntegrityError(
                f"{where}: digest",
                expected=expected_digest,
                found=found,
                do="the stored copy is damaged; delete it and deploy again",
            )
    record = parse_json(data, where, InvalidManifest)
    if not isinstance(record, dict):
        raise InvalidManifest(where, expected="a JSON object", found=type(record).__name__)
    schema = record.get("schema")
    if type(schema) is not int or schema != 1:
        raise InvalidManifest(
            f"{where}: schema",
            expected=1,
            found=repr(schema),
            do="upgrade warmcast" if isinstance(schema, int) and schema > 1 else None,
        )
    manifest = parse_record(Manifest, record, where)
    check_manifest(manifest, where)
    if manifest.data != data:
        raise InvalidManifest(
            where, expected="canonical JSON with every field", found="another spelling"
        )
    return manifest


R = TypeVar("R", bound=Record)


def parse_record(kind: type[R], record: Any, where: str) -> R:
    """Validate a JSON value as ``kind``; :class:`InvalidManifest` names the first wrong field."""
    with _as_invalid_manifest(where):
        return kind.model_validate_json(canonical_json(record))


@contextmanager
def _as_invalid_manifest(where: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as cause:
        first = cause.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "record"
        message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        expected, found = {
            "missing": ("the field", "nothing"),
            "extra_forbidden": ("no such field", repr(first["input"])[:80]),
        }.get(first["type"], (message, repr(first["input"])[:80]))
        raise InvalidManifest(f"{where}: {place}", expected=expected, found=found) from None
    except InvalidManifest:
        raise
    except InvalidData as cause:
        raise InvalidManifest(f"{where}: {cause}") from None


def _model_key(config: Mapping[str, Any], files: Iterable[FileEntry]) -> str:
    return model_key(dict(config), ((f.path, f.size, f.crc32c, f.sha256) for f in files))
