"""Rank files: what each rank of a mesh holds, as a safetensors file that is read front to back.

A slice along any axis but the first lies in a tensor's bytes as many short runs. A rank file has
each of a rank's slices as one run, and beside them the whole tensors that are small; large ones
that no rank splits are read where they are stored, because all ranks of a node can share them.
Ranks that hold the same (the replicas of a data-parallel dimension) share a file.

    warmcast-shards/<mesh key, 16 digits>/rank-00000-of-00004.safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from warmcast.flows.local import LocalFile
from warmcast.flows.workfolder import WorkFolder
from warmcast.manifests import dtypes
from warmcast.manifests.errors import UsageError
from warmcast.manifests.header import MAX_NBYTES
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import Copied, Shard, TensorEntry

FOLDER = "warmcast-shards"

SMALL_NBYTES = 1 << 20
"""Bytes up to which a tensor that is not split is copied into every rank file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of a tensor: ``length`` along ``axis`` from ``start``, or all of it."""

    tensor: TensorEntry
    axis: int | None = None
    start: int = 0
    length: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        whole = self.tensor.shape
        if self.axis is None:
            return whole
        return (*whole[: self.axis], self.length, *whole[self.axis + 1 :])

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        if self.axis is None or not self.tensor.nbytes:
            return self.tensor.nbytes
        return self.tensor.nbytes // self.tensor.shape[self.axis] * self.length


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file to be: its path, the ranks that read it, its header, and where its tensors are."""

    path: str
    ranks: tuple[int, ...]
    header: bytes
    shard: Shard

    @property
    def size(self) -> int:
        """The file's length in bytes."""
        return self.shard.tensors[-1].end


def is_copied(piece: Piece) -> bool:
    """Whether a rank file has it."""
    return piece.axis is not None or piece.tensor.nbytes <= SMALL_NBYTES


def rank_files(mesh: Mesh, ranks: Sequence[Sequence[Piece]]) -> list[RankFile]:
    """The files for what each rank holds. Raises :class:`UsageError` if a rank's has nothing."""
    readers: dict[tuple[Piece, ...], list[int]] = {}
    for rank, pieces in enumerate(ranks):
        # Widest elements first, as in every file we write: each is then aligned to its elements.
        held = sorted(filter(is_copied, pieces), key=lambda p: -dtypes.BITS[p.tensor.dtype])
        readers.setdefault(tuple(held), []).append(rank)
    if () in readers:
        raise UsageError("presharded", expected="tensors that ranks split", found="none")
    return [
        _rank_file(
            f"{FOLDER}/{mesh.key[:16]}/rank-{of[0]:05d}-of-{mesh.size:05d}.safetensors",
            tuple(of),
            held,
        )
        for held, of in readers.items()
    ]


def _rank_file(path: str, ranks: tuple[int, ...], held: Sequence[Piece]) -> RankFile:
    fields: dict[str, object] = {}
    position = 0
    for piece in held:
        fields[piece.tensor.name] = {
            "dtype": piece.tensor.dtype,
            "shape": list(piece.shape),
            "data_offsets": [position, position + piece.nbytes],
        }
        position += piece.nbytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_NBYTES:
        raise UsageError("presharded", expected="a header the format allows", found=len(text))
    header = len(text).to_bytes(8, "little") + text
    copies = []
    position = len(header)
    for piece in held:
        end = position + piece.nbytes
        copies.append(Copied(name=piece.tensor.name, begin=position, end=end))
        position = end
    return RankFile(path, ranks, header, Shard(file=path, tensors=tuple(copies)))


class RankFiles:
    """Rank files in the work folder, written in any order of their tensors."""

    def __init__(self, files: Sequence[RankFile], folder: WorkFolder) -> None:
        folder.need(sum(file.size for file in files))
        self._folder = folder.part()
        self._files = files
        self._first = {file.ranks[0]: number for number, file in enumerate(files)}
        self._places = [{copy.name: copy for copy in file.shard.tensors} for file in files]
        for number, file in enumerate(files):
            self._location(number).write_bytes(file.header)

    def put(self, rank: int, name: str, data: memoryview) -> None:
        """Write what ``rank`` holds of a tensor, if it is its file's first and the file has it."""
        number = self._first.get(rank)
        place = None if number is None else self._places[number].get(name)
        if number is None or place is None:
            return
        with self._location(number).open("r+b", buffering=0) as file:
            done = 0
            while done < len(data):
                done += os.pwrite(file.fileno(), data[done:], place.begin + done)

    def local(self) -> list[LocalFile]:
        """The files, when all was written."""
        return [
            LocalFile.of(file.path, self._location(number), file.size)
            for number, file in enumerate(self._files)
        ]

    def _location(self, number: int) -> Path:
        return self._folder / str(number)
