"""Layouts: what each rank of a mesh holds of every tensor, and the truth about it.

A plan maps glob patterns of tensor names to ``"dimension:axis"``: ``{"*.q_proj.weight": "tp:0"}``
splits along the tensor's axis 0 into as many equal slices as the mesh's dimension ``tp`` is long.
What no pattern names, every rank holds whole. A plan that does not fit the tensors is an error: a
name misspelt would otherwise be a tensor silently held whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from warmcast.flows.steps.shards import Piece
from warmcast.manifests import dtypes
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.errors import UsageError
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import Layout, MeshRecord, SliceEntry, TensorEntry, TiedEntry
from warmcast.manifests.sampling import sampled_hash_of

Put = Callable[[int, str, memoryview], None]
"""Takes what a rank holds of a tensor: the rank, the tensor's name, row-major bytes."""


@dataclass(frozen=True, slots=True)
class _Split:
    """A tensor is split over ``dimension`` (an index into the mesh's) along ``axis``."""

    dimension: int
    axis: int


def pieces_for(
    tensors: Sequence[TensorEntry], tied: Sequence[TiedEntry], mesh: Mesh
) -> list[list[Piece]]:
    """What each rank of a mesh holds of stored tensors, in their order.

    Raises :class:`UsageError` for a plan that does not fit.
    """
    splits = _splits(tensors, tied, mesh)
    ranks: list[list[Piece]] = []
    for coordinate in mesh.coordinates:
        held = []
        for tensor in tensors:
            split = splits.get(tensor.name)
            if split is None:
                held.append(Piece(tensor))
                continue
            length = tensor.shape[split.axis] // mesh.dimensions[split.dimension][1]
            start = coordinate[split.dimension] * length
            held.append(Piece(tensor, split.axis, start, length))
        ranks.append(held)
    return ranks


def layout_for(
    tensors: Sequence[TensorEntry],
    tied: Sequence[TiedEntry],
    mesh: Mesh,
    read: Callable[[TensorEntry], memoryview],
) -> Layout:
    """The layout of a mesh over stored tensors; ``read`` gives the bytes of one that is split.

    Raises :class:`UsageError` for a plan that does not fit.
    """
    return layout_of(mesh, pieces_for(tensors, tied, mesh), read)


def layout_of(
    mesh: Mesh,
    ranks: Sequence[Sequence[Piece]],
    read: Callable[[TensorEntry], memoryview],
    put: Put | None = None,
    *,
    copied: Callable[[Piece], bool] = lambda _: False,
) -> Layout:
    """The layout of a mesh whose ranks hold these pieces, with the truth about each.

    ``read`` gives a tensor's bytes; it is called once for each that is split, or of which a piece
    is ``copied``: ``put`` is given those pieces. Memory: a tensor and a piece of it.
    """
    entries: list[list[SliceEntry]] = [[] for _ in ranks]
    for pieces in zip(*ranks, strict=True):
        holders: dict[Piece, list[int]] = {}
        for rank, piece in enumerate(pieces):
            holders.setdefault(piece, []).append(rank)
        tensor = pieces[0].tensor
        wanted = put is not None and any(map(copied, holders))
        data = read(tensor) if wanted or pieces[0].axis is not None else memoryview(b"")
        for piece, holding in holders.items():
            held = _cut(piece, data)
            entry = _entry(piece, held)
            for rank in holding:
                entries[rank].append(entry)
                if put is not None and copied(piece):
                    put(rank, tensor.name, held)
    return Layout(
        mesh=MeshRecord(
            dimensions=mesh.dimensions, coordinates=mesh.coordinates, plan=dict(mesh.plan)
        ),
        mesh_key=mesh.key,
        ranks=tuple(map(tuple, entries)),
    )


def _splits(
    tensors: Sequence[TensorEntry], tied: Sequence[TiedEntry], mesh: Mesh
) -> dict[str, _Split]:
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    bases = {tie.name: tie for tie in tied}
    found: dict[str, tuple[str, _Split]] = {}
    for pattern, rule in mesh.plan.items():
        split = _parse(pattern, rule, mesh)
        matches = [name for name in (*shapes, *bases) if fnmatchcase(name, pattern)]
        if not matches:
            raise UsageError(
                f"plan: {pattern!r}", expected="a pattern of tensors", found="none of that name"
            )
        for name in matches:
            other = found.setdefault(name, (pattern, split))
            if other[1] != split:
                raise UsageError(
                    f"plan: {name!r}",
                    expected="one rule",
                    found=f"{mesh.plan[other[0]]!r} of {other[0]!r} and {rule!r} of {pattern!r}",
                )
    splits = {name: split for name, (_, split) in found.items()}
    for tie in tied:
        _check_tie(tie, splits, shapes)
    result = {name: split for name, split in splits.items() if name in shapes}
    for tensor in tensors:
        if tensor.name in result:
            _check_fit(tensor, result[tensor.name], mesh)
    return result


def _parse(pattern: str, rule: object, mesh: Mesh) -> _Split:
    names = [name for name, _ in mesh.dimensions]
    dimension, colon, axis = rule.partition(":") if isinstance(rule, str) else ("", "", "")
    if not colon or dimension not in names or not axis.isdecimal():
        raise UsageError(
            f"plan: {pattern!r}",
            expected=f"dimension:axis with a dimension of {', '.join(names) or 'none'}",
            found=repr(rule),
        )
    return _Split(names.index(dimension), int(axis))


def _check_tie(
    tie: TiedEntry, splits: Mapping[str, _Split], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """A tied tensor is split as its base is, and only if it is the whole of it."""
    base = splits.get(tie.of)
    if base is None and tie.name not in splits:
        return
    if splits.get(tie.name, base) != base:
        raise UsageError(
            f"plan: {tie.name!r}",
            expected=f"the rule of {tie.of!r}, whose memory it shares",
            found="another",
        )
    if tie.shape != shapes[tie.of]:
        raise UsageError(
            f"plan: {tie.of!r}",
            expected="to be whole on every rank",
            found=f"a split, while {tie.name!r} is a view of a part of it",
        )


def _check_fit(tensor: TensorEntry, split: _Split, mesh: Mesh) -> None:
    dimension, count = mesh.dimensions[split.dimension]
    where = f"plan: {tensor.name!r} of shape {list(tensor.shape)}"
    if split.axis >= len(tensor.shape):
        raise UsageError(where, expected=f"an axis below {len(tensor.shape)}", found=split.axis)
    if tensor.shape[split.axis] % count:
        raise UsageError(
            where,
            expected=f"a length along axis {split.axis} that {dimension}={count} divides",
            found=tensor.shape[split.axis],
        )
    if dtypes.BITS[tensor.dtype] % 8:
        raise UsageError(where, expected="whole bytes an element to split", found=tensor.dtype)


def _cut(piece: Piece, data: memoryview) -> memoryview:
    """A piece's row-major bytes, from those of its tensor."""
    shape, axis = piece.tensor.shape, piece.axis
    if axis is None or not data:
        return data
    rows = math.prod(shape[:axis])
    inner = len(data) // rows // shape[axis]  # bytes of one step along the axis
    begin, end = piece.start * inner, (piece.start + piece.length) * inner
    if rows == 1:
        return data[begin:end]
    row = shape[axis] * inner
    return memoryview(b"".join(data[at + begin : at + end] for at in range(0, len(data), row)))


def _entry(piece: Piece, data: memoryview) -> SliceEntry:
    tensor = piece.tensor
    if piece.axis is None:
        return SliceEntry(name=tensor.name, crc32c=tensor.crc32c, sample=tensor.sample)
    return SliceEntry(
        name=tensor.name,
        axis=piece.axis,
        start=piece.start,
        length=piece.length,
        crc32c=to_hex(crc32c(data)),
        sample=sampled_hash_of(tensor.name, tensor.dtype, data),
    )
