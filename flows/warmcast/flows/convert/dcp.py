"""Torch distributed checkpoints: a folder with ``.metadata`` and ``__*_*.distcp`` files.

``.metadata`` tells of each tensor's chunks, boxes of it in any dimensions, and where each is saved:
an archive of ``torch.save`` at an offset of a file. The chunks must fill the tensor, each place
once. Chunks that stand one after another in it are copied as they are; others are gathered, a
block of rows at a time.

Names are flat. Where the planner kept their paths, the weights are those under a name that
frameworks use for them ("model"), and are called by what follows it. Other tensors (an optimizer's)
and items that are no tensors are left out, and named.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmcast.flows.convert import unpickle
from warmcast.flows.convert.archive import Checksums
from warmcast.flows.convert.dcp_metadata import MOST_NBYTES, Chunk, Metadata, Saved, parse_metadata
from warmcast.flows.convert.memory import import_torch
from warmcast.flows.convert.state_dict import DTYPES, WRAPPERS, dense, dtype_of
from warmcast.flows.convert.tensors import (
    PIECE,
    Checkpoint,
    Extent,
    Files,
    Tensor,
    in_files,
    memory_of,
)
from warmcast.flows.convert.ties import View
from warmcast.flows.errors import InvalidCheckpoint, MissingShard
from warmcast.manifests.rules import unsafe_path

if TYPE_CHECKING:
    import torch

METADATA = ".metadata"

_NO_WEIGHTS = ("optimizer", "optim", "lr_scheduler", "scheduler", "rng_state", "dataloader")
"""First names under which trainers keep what is not the weights, where no planner tells."""


def open_dcp(files: Files, numbers: Sequence[int], checksums: Checksums) -> Checkpoint:
    """The weights of a checkpoint whose ``.metadata`` is among the files."""
    import_torch()
    by_path = {files.sources[number].path: number for number in numbers}
    number = next(n for path, n in by_path.items() if path.rpartition("/")[2] == METADATA)
    source = files.sources[number]
    if source.size > MOST_NBYTES:
        raise InvalidCheckpoint(
            source.path, expected=f"{MOST_NBYTES} bytes at most", found=source.size
        )
    metadata = parse_metadata(files.read(Extent(number, 0, source.size)), source.path)
    folder = source.path.removesuffix(METADATA)
    names, left_out = _weights(metadata, source.path)
    tensors = []
    for flat, name in names.items():
        saved = metadata.tensors[flat]
        where = f"{source.path}: tensor {flat!r}"
        _check_chunks(saved, where)
        placed = [_placed(files, by_path, folder, saved, c, where, checksums) for c in saved.chunks]
        tensors.append(_tensor(files, name, saved, placed))
    return Checkpoint(tuple(tensors), (), tuple(left_out))


@dataclass(frozen=True, slots=True)
class _Placed:
    """A chunk, its strides and offset in elements, and where its storage lies."""

    chunk: Chunk
    stride: tuple[int, ...]
    offset: int
    size: int
    place: Extent

    @property
    def extent(self) -> Extent | None:
        """Where its row-major bytes lie, if they do."""
        if not View("", 0, "", self.chunk.shape, self.stride, self.offset).is_row_major:
            return None
        nbytes = math.prod(self.chunk.shape) * self.size
        return Extent(self.place.file, self.place.offset + self.offset * self.size, nbytes)

    def values(self, files: Files) -> torch.Tensor:
        """Its elements, mapped, each as ``size`` bytes: chunks are not aligned in their files."""
        import torch

        return torch.as_strided(
            files.mapped(self.place),
            (*self.chunk.shape, self.size),
            (*(stride * self.size for stride in self.stride), 1),
            self.offset * self.size,
        )


def _weights(metadata: Metadata, path: str) -> tuple[dict[str, str], list[str]]:
    """What each flat name that is deployed is called, and what is left out."""
    paths = {name: metadata.paths.get(name, (name,)) for name in metadata.tensors}
    tops = {p[0] for p in paths.values() if len(p) > 1}
    wrapper = [top for top in WRAPPERS if top in tops]
    if len(wrapper) > 1:
        raise InvalidCheckpoint(
            path,
            expected=f"weights under one of {', '.join(WRAPPERS)}",
            found=f"tensors under {' and '.join(wrapper)}",
            do="save the model's state dict alone",
        )
    names: dict[str, str] = {}
    left: Counter[str] = Counter()
    for flat, parts in paths.items():
        if wrapper and parts[0] != wrapper[0]:
            left[parts[0]] += 1
        elif not wrapper and flat.partition(".")[0] in _NO_WEIGHTS:
            left[flat.partition(".")[0]] += 1
        else:
            names[flat] = ".".join(parts[1:] if wrapper else parts)
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice or not names:
        raise InvalidCheckpoint(
            path,
            expected="tensors of a model, each of a name of its own",
            found=f"{twice[0]!r} twice" if twice else "none",
        )
    left_out = [f"{path}: {top!r:.80} ({count} tensors)" for top, count in sorted(left.items())]
    return names, left_out + [f"{path}: {name!r:.80} (no tensor)" for name in metadata.others]


def _check_chunks(saved: Saved, where: str) -> None:
    """Raise :class:`InvalidCheckpoint` unless the chunks fill the tensor, each place once."""
    filled = [c for c in saved.chunks if math.prod(c.shape)]
    total = sum(math.prod(c.shape) for c in filled)
    if total != math.prod(saved.shape):
        raise InvalidCheckpoint(
            where,
            expected=f"chunks of {math.prod(saved.shape)} elements",
            found=total,
            do="the checkpoint is not complete; save it again",
        )
    # Swept along the first dimension: only chunks that share rows are held against each other.
    active: list[Chunk] = []
    for chunk in sorted(filled, key=lambda c: c.begin[:1]):
        active = [c for c in active if not c.begin or c.begin[0] + c.shape[0] > chunk.begin[0]]
        if any(_overlap(chunk, other) for other in active):
            raise InvalidCheckpoint(
                where, expected="chunks side by side", found=f"two over {list(chunk.begin)}"
            )
        active.append(chunk)


def _overlap(a: Chunk, b: Chunk) -> bool:
    return all(
        x < y + m and y < x + n
        for x, n, y, m in zip(a.begin, a.shape, b.begin, b.shape, strict=True)
    )


def _placed(
    files: Files,
    by_path: Mapping[str, int],
    folder: str,
    saved: Saved,
    chunk: Chunk,
    where: str,
    checksums: Checksums,
) -> _Placed:
    """Open the archive that holds a chunk, without its bytes."""
    if problem := unsafe_path(chunk.item.file):
        raise InvalidCheckpoint(
            where,
            expected="a file beside .metadata",
            found=f"{problem} in {chunk.item.file!r:.80}",
            do="do not trust this checkpoint",
        )
    number = by_path.get(folder + chunk.item.file)
    if number is None:
        raise MissingShard(
            where,
            expected=f"the file {chunk.item.file!r}",
            found="none such",
            do="the download did not finish; run it again",
        )
    loaded = unpickle.load(
        files, Extent(number, chunk.item.offset, chunk.item.nbytes), f"{folder}{chunk.item.file}"
    )
    if loaded.archive is not None:
        checksums.add(files, loaded.archive)
    return _in_storage(loaded, saved, chunk, where)


def _in_storage(loaded: unpickle.Loaded, saved: Saved, chunk: Chunk, where: str) -> _Placed:
    import torch

    tensor = loaded.value
    if not isinstance(tensor, torch.Tensor):
        raise InvalidCheckpoint(where, expected="a tensor", found=type(tensor).__name__)
    tensor = dense(where, "its chunk", tensor)
    place = loaded.places.get(unpickle.storage_of(tensor))
    found = (DTYPES[dtype_of(tensor)], tuple(tensor.shape))
    if place is None or found != (saved.dtype, chunk.shape) or tensor.is_conj() or tensor.is_neg():
        raise InvalidCheckpoint(
            where,
            expected=f"a chunk of {saved.dtype} {list(chunk.shape)}",
            found=f"{found[0]} {list(found[1])}",
        )
    view = View("", 0, "", chunk.shape, tuple(tensor.stride()), int(tensor.storage_offset()))
    if view.numel and view.end * tensor.element_size() > place.nbytes:
        raise InvalidCheckpoint(
            where, expected=f"a storage of {view.end} elements", found=f"{place.nbytes} bytes"
        )
    return _Placed(chunk, view.stride, view.offset, tensor.element_size(), place)


def _tensor(files: Files, name: str, saved: Saved, placed: Sequence[_Placed]) -> Tensor:
    shape = saved.shape
    placed = sorted((p for p in placed if math.prod(p.chunk.shape)), key=lambda p: p.chunk.begin)
    extents = [p.extent for p in placed if p.chunk.shape[1:] == shape[1:]]
    whole = [extent for extent in extents if extent is not None]
    if len(whole) == len(placed):
        return in_files(files, name, saved.dtype, shape, whole)
    return Tensor(name, saved.dtype, shape, lambda: _gathered(files, saved, placed))


def _gathered(files: Files, saved: Saved, placed: Sequence[_Placed]) -> Iterator[memoryview]:
    """The row-major bytes of a tensor of boxes, a block of rows at a time."""
    import torch

    size = placed[0].size
    rows = max(1, PIECE // (size * math.prod(saved.shape[1:])))
    for begin in range(0, saved.shape[0], rows):
        end = min(begin + rows, saved.shape[0])
        block = torch.empty((end - begin, *saved.shape[1:], size), dtype=torch.uint8)
        for item in placed:
            start, length = item.chunk.begin[0], item.chunk.shape[0]
            first, last = max(begin, start), min(end, start + length)
            if first < last:
                target = block[first - begin : last - begin]
                boxes = zip(item.chunk.begin[1:], item.chunk.shape[1:], strict=True)
                for dim, box in enumerate(boxes, 1):
                    target = target.narrow(dim, *box)
                target.copy_(item.values(files)[first - start : last - start])
        yield memory_of(block)
