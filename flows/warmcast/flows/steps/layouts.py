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

from warmcast.manifests import dtypes
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.errors import UsageError
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import Layout, MeshRecord, SliceEntry, TensorEntry, TiedEntry
from warmcast.manifests.sampling import element_nbytes, sample_indices, sampled_hash


@dataclass(frozen=True, slots=True)
class _Split:
    """A tensor is split over ``dimension`` (an index into the mesh's) along ``axis``."""

    dimension: int
    axis: int


def layout_for(
    tensors: Sequence[TensorEntry],
    tied: Sequence[TiedEntry],
    mesh: Mesh,
    read: Callable[[TensorEntry], memoryview],
) -> Layout:
    """The layout of a mesh over stored tensors, in their order.

    ``read`` gives a tensor's bytes; it is called once for each that is split. Memory: one tensor.
    Raises :class:`UsageError` for a plan that does not fit.
    """
    splits = _splits(tensors, tied, mesh)
    ranks: list[list[SliceEntry]] = [[] for _ in mesh.coordinates]
    for tensor in tensors:
        split = splits.get(tensor.name)
        if split is None:
            whole = SliceEntry(name=tensor.name, crc32c=tensor.crc32c, sample=tensor.sample)
            for rank in ranks:
                rank.append(whole)
            continue
        data = read(tensor)
        count = mesh.dimensions[split.dimension][1]
        slices = [_slice(tensor, split.axis, place, count, data) for place in range(count)]
        for rank, coordinate in zip(ranks, mesh.coordinates, strict=True):
            rank.append(slices[coordinate[split.dimension]])
    return Layout(
        mesh=MeshRecord(
            dimensions=mesh.dimensions, coordinates=mesh.coordinates, plan=dict(mesh.plan)
        ),
        mesh_key=mesh.key,
        ranks=tuple(map(tuple, ranks)),
    )


def parse_mesh(value: object, where: str) -> Mesh:
    """The mesh of ``{"dimensions": {"tp": 2}, "plan": {"*.weight": "tp:0"}}``."""
    expected = '{"dimensions": {name: size}, "plan": {pattern: "dimension:axis"}}'
    if not isinstance(value, dict) or not {"dimensions"} <= set(value) <= {"dimensions", "plan"}:
        raise UsageError(where, expected=expected, found=repr(value)[:80])
    dimensions, plan = value["dimensions"], value.get("plan", {})
    sizes_fit = isinstance(dimensions, dict) and all(
        isinstance(size, int) and not isinstance(size, bool) for size in dimensions.values()
    )
    if not sizes_fit or not isinstance(plan, dict):
        raise UsageError(where, expected=expected, found=repr(value)[:80])
    if math.prod(max(1, size) for size in dimensions.values()) > _MAX_RANKS:
        raise UsageError(where, expected=f"{_MAX_RANKS} ranks at most", found=dimensions)
    return Mesh.grid(dimensions, plan)


_MAX_RANKS = 1 << 16


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


def _slice(tensor: TensorEntry, axis: int, place: int, count: int, data: memoryview) -> SliceEntry:
    """One slice, and its truth, from the tensor's row-major bytes."""
    width = element_nbytes(tensor.dtype)
    length = tensor.shape[axis] // count
    outer = math.prod(tensor.shape[:axis])
    inner = math.prod(tensor.shape[axis + 1 :])
    row = tensor.shape[axis] * inner  # elements of the tensor from one run to the next
    run = length * inner  # elements of the slice that lie together
    start = place * run
    checksum = 0
    for index in range(outer):
        begin = (index * row + start) * width
        checksum = crc32c(data[begin : begin + run * width], checksum)
    samples = bytearray()
    for index in sample_indices(tensor.name, outer * run):
        position = (index // run * row + start + index % run) * width
        samples += data[position : position + width]
    return SliceEntry(
        name=tensor.name,
        axis=axis,
        start=place * length,
        length=length,
        crc32c=to_hex(checksum),
        sample=sampled_hash(tensor.name, tensor.dtype, outer * run, bytes(samples)),
    )
