"""Convert: a checkpoint into safetensors in a work folder, or what it became at an earlier deploy.

What a conversion yields depends on the sources' bytes, the converter and its options alone. The
digest of these is a key in the origin's ``upstreams/``; the record under it holds the files,
tensors and ties that came of it, so that deploying the same sources again converts nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warmcast.flows.convert import process
from warmcast.flows.convert.child import Adapter, Format
from warmcast.flows.convert.index import write_index
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.local import LocalFile
from warmcast.flows.steps.mirror import has_blob
from warmcast.flows.workfolder import WorkFolder
from warmcast.manifests.canonical import digest
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidData
from warmcast.manifests.header import read_header
from warmcast.manifests.manifest import (
    FileEntry,
    Record,
    TensorEntry,
    TiedEntry,
    parse_record,
)
from warmcast.manifests.origin import Origin

_KIND = "upstreams"
_BUFFER = 1 << 22
_ADAPTER = "adapter_model"


class ConversionRecord(Record):
    """What a checkpoint became, as the origin keeps it under the conversion's key."""

    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    tied: tuple[TiedEntry, ...]
    left_out: tuple[str, ...]
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A LoRA adapter's weights, their format, and its parsed ``adapter_config.json``."""

    format: Format
    files: tuple[LocalFile, ...]
    config: Mapping[str, Any]

    def for_child(self) -> Adapter:
        """The adapter as the child is told of it."""
        return Adapter(self.format, tuple(map(process.source_of, self.files)), dict(self.config))


@dataclass(frozen=True, slots=True)
class Request:
    """A checkpoint to convert: its format, its files in order, and what is asked for.

    ``index`` is the index's path and the shard of each tensor, where there is one; ``config`` the
    model's parsed ``config.json``; ``adapter`` what is merged into it.
    """

    format: Format
    files: tuple[LocalFile, ...]
    options: ConvertOptions
    index: tuple[str, Mapping[str, str]] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    adapter: AdapterFiles | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        extra = self.adapter.files if self.adapter else ()
        return sum(file.size for file in (*self.files, *extra))

    @property
    def stem(self) -> str:
        """What the names of the converted files begin with."""
        alone = self.adapter is None and len(self.files) == 1
        return _ADAPTER if alone and self.files[0].path == f"{_ADAPTER}.bin" else "model"

    @property
    def tie_embeddings(self) -> bool:
        """Whether the config says that input and output embeddings are one."""
        return self.config.get("tie_word_embeddings") is True


@dataclass(frozen=True, slots=True)
class Conversion:
    """Converted files in the work folder (the index among them), and their ties.

    ``config`` is what the sources say of the model, where their format has such (GGUF).
    """

    files: tuple[LocalFile, ...]
    tied: tuple[TiedEntry, ...]
    left_out: tuple[str, ...]
    config: dict[str, Any]


def needs_conversion(format_: Format, options: ConvertOptions) -> bool:
    """Whether weights are deployed as other bytes than they are."""
    return format_ != "safetensors" or options.rewrite


def conversion_key(
    request: Request, tick: Callable[[int], None], known: Mapping[str, str] | None = None
) -> str:
    """The key of a conversion. ``known`` are SHA-256s by path; other files are read once."""
    known = known or {}

    def sources(files: Sequence[LocalFile]) -> list[list[str]]:
        return [[file.path, known.get(file.path) or _sha256(file, tick)] for file in files]

    adapter = request.adapter
    return digest(
        {
            "kind": request.format,
            "version": process.VERSION,
            "options": request.options.record(),
            "tie_embeddings": request.tie_embeddings,
            "sources": sources(request.files),
            "adapter": adapter
            and {"config": dict(adapter.config), "sources": sources(adapter.files)},
        }
    )


def recorded_conversion(
    origin: Origin, key: str, deadline: Deadline, *, reread: Callable[[int], None] | None = None
) -> ConversionRecord | None:
    """What the sources became, if the origin knows and has all of it."""
    value = origin.record(_KIND, key, deadline)
    if value is None:
        return None
    try:
        record = parse_record(ConversionRecord, value, f"{_KIND}/{key}")
    except InvalidData:
        return None  # another version's, or damaged: converting again is always right
    there = all(has_blob(origin, f, deadline, reread=reread) for f in record.files)
    return record if there else None


def record_conversion(
    origin: Origin, key: str, record: ConversionRecord, deadline: Deadline
) -> None:
    """Remember what sources became, once all of it is in the origin."""
    value = record.model_dump(mode="json")
    if not origin.put_record(_KIND, key, value, deadline):
        # One that was there and could not be used would be in the way for ever.
        origin.store.delete(f"{_KIND}/{key}.json", deadline)
        origin.put_record(_KIND, key, value, deadline)


def convert_weights(
    request: Request,
    work: WorkFolder,
    *,
    deadline: Deadline,
    tick: Callable[[int], None],
) -> Conversion:
    """Convert a checkpoint, name the files as the Hub does, and write their index.

    Raises :class:`SourceError` and its kinds, :class:`ConversionFailed`, :class:`WorkFolderFull`.
    """
    work.need(request.nbytes)
    converted = process.convert(
        request.format,
        request.files,
        work.part(),
        request.options,
        index=request.index,
        tie_embeddings=request.tie_embeddings,
        adapter=request.adapter.for_child() if request.adapter else None,
        deadline=deadline,
        tick=tick,
    )
    folder = work.part()
    extra = tuple(
        LocalFile.of(name, location.rename(folder / name)) for name, location in converted.extra
    )
    return Conversion(
        (*_named(converted.files, folder, request.stem), *extra),
        converted.tied,
        converted.left_out,
        converted.config,
    )


def _named(
    parts: Sequence[tuple[Path, tuple[str, ...]]], folder: Path, stem: str
) -> tuple[LocalFile, ...]:
    """Move files to the names that the Hub gives them; several get an index."""
    count = len(parts)
    weight_map: dict[str, str] = {}
    total = 0
    files = []
    for number, (location, tensors) in enumerate(parts, 1):
        name = (
            f"{stem}-{number:05d}-of-{count:05d}.safetensors"
            if count > 1
            else f"{stem}.safetensors"
        )
        files.append(LocalFile.of(name, location.rename(folder / name)))
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in read_header(folder / name).tensors)
    if count > 1:
        name = f"{stem}.safetensors.index.json"
        write_index(folder / name, weight_map, total)
        files.append(LocalFile.of(name, folder / name))
    return tuple(files)


def _sha256(file: LocalFile, tick: Callable[[int], None]) -> str:
    state = hashlib.sha256()
    buffer = memoryview(bytearray(_BUFFER))
    with file.opened() as opened:
        for offset in range(0, file.size, _BUFFER):
            view = buffer[: min(_BUFFER, file.size - offset)]
            file.read_into(opened, offset, view)
            state.update(view)
            tick(len(view))
    return state.hexdigest()
