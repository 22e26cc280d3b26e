"""Convert: pickles into safetensors in a work folder, or what they became at an earlier deploy.

What a conversion yields depends on the pickles' bytes, the converter and its options alone. The
digest of these is a key in the origin's ``upstreams/``; the record under it holds the files,
tensors and ties that came of it, so that deploying the same pickles again converts nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from warmcast.flows.convert import pickle
from warmcast.flows.convert.index import write_index
from warmcast.flows.convert.ties import HIDDEN
from warmcast.flows.local import LocalFile
from warmcast.flows.steps.mirror import has_blob
from warmcast.flows.steps.weights import add_names, check_index
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


class ConversionRecord(Record):
    """What pickles became, as the origin keeps it under the conversion's key."""

    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    tied: tuple[TiedEntry, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Converted files in the work folder (the index among them), and their ties."""

    files: tuple[LocalFile, ...]
    tied: tuple[TiedEntry, ...]
    left_out: tuple[str, ...]


def conversion_key(
    pickles: Sequence[LocalFile], max_shard_nbytes: int, tick: Callable[[int], None]
) -> str:
    """The key of a conversion: reads every pickle once."""
    return digest(
        {
            "kind": "pickle",
            "version": pickle.VERSION,
            "max_shard_nbytes": max_shard_nbytes,
            "sources": [[file.path, _sha256(file, tick)] for file in pickles],
        }
    )


def recorded_conversion(
    origin: Origin, key: str, deadline: Deadline, *, reread: Callable[[int], None] | None = None
) -> ConversionRecord | None:
    """What the pickles became, if the origin knows and has all of it."""
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
    """Remember what pickles became, once all of it is in the origin."""
    value = record.model_dump(mode="json")
    if not origin.put_record(_KIND, key, value, deadline):
        # One that was there and could not be used would be in the way for ever.
        origin.store.delete(f"{_KIND}/{key}.json", deadline)
        origin.put_record(_KIND, key, value, deadline)


def convert_pickles(
    pickles: Sequence[LocalFile],
    index: tuple[str, Mapping[str, str]] | None,
    work: WorkFolder,
    *,
    max_shard_nbytes: int,
    deadline: Deadline,
    tick: Callable[[int], None],
) -> Conversion:
    """Convert pickles one after another, name the files as the Hub does, and write their index.

    Raises :class:`InvalidIndex` if the index and the pickles do not name the same tensors.
    """
    work.need(sum(file.size for file in pickles))
    parts: list[tuple[Path, tuple[str, ...]]] = []
    tied: list[TiedEntry] = []
    left_out: list[str] = []
    holder: dict[str, str] = {}
    hidden = 0
    for source in pickles:
        part = pickle.convert_pickle(
            source,
            work.part(),
            max_shard_nbytes=max_shard_nbytes,
            first_hidden=hidden,
            deadline=deadline,
            tick=tick,
        )
        names = {name for _, tensors in part.files for name in tensors}
        hidden += len({tie.of for tie in part.tied if tie.of.startswith(HIDDEN)})
        names |= {tie.name for tie in part.tied}
        add_names(holder, names, source.path)
        parts += part.files
        tied += part.tied
        left_out += part.left_out
    if index is not None:
        left_out += check_index(index, holder)
    return Conversion(_named(parts, work.part()), tuple(tied), tuple(left_out))


def _named(parts: Sequence[tuple[Path, tuple[str, ...]]], folder: Path) -> tuple[LocalFile, ...]:
    """Move files to the names that the Hub gives them; several get an index."""
    count = len(parts)
    weight_map: dict[str, str] = {}
    total = 0
    files = []
    for number, (location, tensors) in enumerate(parts, 1):
        name = (
            f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        )
        files.append(LocalFile.of(name, location.rename(folder / name)))
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in read_header(folder / name).tensors)
    if count > 1:
        name = "model.safetensors.index.json"
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
