"""Lay out: the layouts that a deploy is asked for, and the rank files of those that have them.

What comes of a mesh follows from it and from the files' bytes alone, so the origin remembers it
under ``upstreams/<key>``; a deploy that needs it again reads no tensor and writes no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warmcast.flows.progress import Progress
from warmcast.flows.steps.layouts import layout_of, pieces_for
from warmcast.flows.steps.meshes import MeshRequest
from warmcast.flows.steps.mirror import Mirrored, has_blob, mirror_file
from warmcast.flows.steps.shards import Piece, RankFiles, is_copied, rank_files
from warmcast.flows.workfolder import WorkFolder
from warmcast.manifests.canonical import digest
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, InvalidManifest
from warmcast.manifests.header import read_header
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import (
    FileEntry,
    Layout,
    Record,
    TensorEntry,
    TiedEntry,
    parse_record,
)
from warmcast.manifests.origin import Origin

_KIND = "upstreams"
_VERSION = 1
"""Of what is made of a mesh; part of the key under which it is remembered."""


@dataclass(frozen=True, slots=True)
class Model:
    """What is laid out: a deployment's config, files and tensors, and how a tensor is read."""

    config: Mapping[str, Any]
    files: Sequence[FileEntry]
    tensors: Sequence[TensorEntry]
    tied: Sequence[TiedEntry]
    read: Callable[[TensorEntry], memoryview]


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Layouts, their rank files, and the paths of those whose bytes were sent."""

    layouts: tuple[Layout, ...] = ()
    files: tuple[FileEntry, ...] = ()
    moved: tuple[str, ...] = ()


class LayoutRecord(Record):
    """What the origin remembers."""

    layout: Layout
    files: tuple[FileEntry, ...]


def lay_out(
    origin: Origin,
    model: Model,
    meshes: Sequence[Mesh | MeshRequest],
    folder: WorkFolder,
    deadline: Deadline,
    tick: Callable[[int], None],
    progress: Progress,
    *,
    repair: bool = False,
) -> LaidOut:
    """The layouts of ``meshes``, with rank files in the origin where they are asked for.

    Rank files are written in the work folder first. ``tick`` is told of bytes, and may raise. With
    ``repair``, rank files that the origin has are read again. Raises :class:`UsageError` for a plan
    that does not fit, and what the store raises. Memory: a tensor and a rank's slice of it.
    """
    found = []
    for wanted in meshes:
        mesh, presharded = _asked(model, wanted)
        key = _key(model, mesh, presharded=presharded)
        known = _recorded(origin, key, deadline, reread=tick if repair else None)
        if known is not None:
            found.append(LaidOut((known.layout,), known.files))
            continue
        made = _make(origin, model, mesh, folder if presharded else None, deadline, tick, progress)
        record = LayoutRecord(layout=made.layouts[0], files=made.files)
        origin.put_record(_KIND, key, record.model_dump(mode="json"), deadline)
        found.append(made)
    return LaidOut(
        tuple(layout for each in found for layout in each.layouts),
        tuple(file for each in found for file in each.files),
        tuple(path for each in found for path in each.moved),
    )


def _asked(model: Model, wanted: Mesh | MeshRequest) -> tuple[Mesh, bool]:
    """The mesh, and whether rank files are asked for."""
    if isinstance(wanted, Mesh):
        return wanted, False
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    shapes |= {tie.name: tie.shape for tie in model.tied}
    return wanted.mesh(model.config, shapes), wanted.presharded


def _make(
    origin: Origin,
    model: Model,
    mesh: Mesh,
    folder: WorkFolder | None,
    deadline: Deadline,
    tick: Callable[[int], None],
    progress: Progress,
) -> LaidOut:
    """One layout; with rank files if there is a folder to write them in."""
    ranks = pieces_for(model.tensors, model.tied, mesh)

    def read(tensor: TensorEntry) -> memoryview:
        data = model.read(tensor)
        tick(len(data))
        return data

    def wanted(piece: Piece) -> bool:
        return piece.axis is not None or (folder is not None and is_copied(piece))

    nbytes = sum(piece.tensor.nbytes for piece in ranks[0] if wanted(piece))
    if folder is None:
        with progress.stage(f"lay out for {mesh.size} ranks", nbytes):
            return LaidOut((layout_of(mesh, ranks, read),))
    planned = rank_files(mesh, ranks)
    files = RankFiles(planned, folder)
    total = nbytes + 2 * sum(file.size for file in planned)
    with progress.stage(f"lay out for {mesh.size} ranks", total):
        layout = layout_of(mesh, ranks, read, files.put, copied=is_copied)
        mirrored = []
        for file in files.local():
            header = read_header(file.location)
            mirrored.append(mirror_file(origin, file, header.tensors, deadline, tick))
    for rank_file, item in zip(planned, mirrored, strict=True):
        _check(layout, rank_file.ranks[0], item)
    shards = {rank: file.shard for file in planned for rank in file.ranks}
    layout = layout.model_copy(update={"shards": tuple(shards[r] for r in range(mesh.size))})
    return LaidOut(
        (layout,),
        tuple(item.file for item in mirrored),
        tuple(item.file.path for item in mirrored if item.moved),
    )


def _check(layout: Layout, rank: int, item: Mirrored) -> None:
    """Raise :class:`IntegrityError` if the file does not hold what the rank does."""
    truths = {entry.name: entry.crc32c for entry in layout.ranks[rank]}
    for tensor in item.measured.tensors:
        if tensor.crc32c != truths[tensor.name]:
            raise IntegrityError(
                f"{item.file.path}: {tensor.name!r}",
                expected=f"CRC32C {truths[tensor.name]}, as it was written",
                found=tensor.crc32c,
                do="the work folder's disk does not give back what was written to it",
            )


def _key(model: Model, mesh: Mesh, *, presharded: bool) -> str:
    used = {tensor.file for tensor in model.tensors}
    return digest(
        {
            "kind": "layout",
            "version": _VERSION,
            "mesh": mesh.key,
            "presharded": presharded,
            "files": sorted([f.path, f.sha256] for f in model.files if f.path in used),
            "tensors": [[t.name, t.file, t.begin, t.end] for t in model.tensors],
            "tied": [[t.name, t.of] for t in model.tied],
        }
    )


def _recorded(
    origin: Origin, key: str, deadline: Deadline, *, reread: Callable[[int], None] | None
) -> LayoutRecord | None:
    """What the origin remembers, if its rank files are there."""
    value = origin.record(_KIND, key, deadline)
    if value is None:
        return None
    try:
        record = parse_record(LayoutRecord, value, f"{_KIND}/{key}")
    except InvalidManifest:
        return None  # of another version of this program
    there = all(has_blob(origin, file, deadline, reread=reread) for file in record.files)
    return record if there else None
