"""The plan of a load: which container gets which bytes, and what they must hash to.

A plan is made before anything is allocated or asked for, from the skeleton's containers and the
manifest, and it is exact: every container of the scope has its tensor, every tensor of the scope
has its container, dtype and shape agree. There are three exceptions, each of them reported:

- a container that its module filled itself (see :mod:`skeleton`), or that ``keep`` names, is left
  as it is;
- a tensor that the model computes instead of saving (a non-persistent buffer) is not loaded;
- a tensor that ``ignore`` names is not loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from warmcast.loader.containers import (
    ALIGNMENT,
    SEGMENT,
    Arena,
    Container,
    State,
    flat_bytes,
)
from warmcast.loader.dtypes import safetensors_name, stored_shape, torch_dtype
from warmcast.loader.errors import SkeletonMismatch
from warmcast.loader.skeletons import filled_itself
from warmcast.manifests.canonical import digest
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import Copied, Manifest, SliceEntry, TensorEntry, TiedEntry


@dataclass(frozen=True, slots=True)
class Truth:
    """What a tensor's bytes, row-major, must hash to."""

    name: str
    dtype: str
    nbytes: int
    crc32c: str
    sample: str


@dataclass(frozen=True, slots=True)
class Placement:
    """One piece of memory to fill: a stored tensor, a rank's slice of one, or a changed tensor.

    ``entry`` and ``slice`` tell where the bytes lie in the origin: in the rank's own shard, where
    it has the tensor, what the rank holds is a tensor by itself. A changed tensor, which lies only
    in the memory of workers, has neither. ``containers`` are those that lie in this memory:
    the tensor's own, and the views that are tied to it, each with its (shape, stride, offset) in
    elements.
    """

    entry: TensorEntry | None
    slice: SliceEntry | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    span: int
    truth: Truth
    containers: tuple[tuple[Container, tuple[int, ...], tuple[int, ...], int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one rank's load fills, in load order, and what it leaves alone."""

    placements: tuple[Placement, ...]
    kept: tuple[str, ...]
    skipped: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of weights to fill."""
        return sum(placement.truth.nbytes for placement in self.placements)

    @property
    def layout(self) -> str:
        """A digest of the tensors, their lengths and order, and of how an arena lays them out.

        Two workers can give each other weights if theirs are equal.
        """
        rows = [[p.truth.name, p.span] for p in self.placements]
        return digest({"alignment": ALIGNMENT, "segment": SEGMENT, "rows": rows})


@dataclass(frozen=True, slots=True)
class Targets:
    """A plan's memory: filled beside the model, installed in it when it is right.

    ``crc32cs`` has what was found of tensors, by their number, after their last byte was there.
    """

    plan: Plan
    arena: Arena | None
    tensors: tuple[Tensor, ...]
    crc32cs: dict[int, int] = field(default_factory=dict)

    @classmethod
    def allocate(cls, plan: Plan, device: torch.device, *, arena: bool = True) -> Targets:
        """Allocate every placement on ``device``: in an arena, or one by one as torch does."""
        if not arena:
            tensors = tuple(
                torch.empty_strided(p.shape, p.stride, dtype=p.dtype, device=device)
                for p in plan.placements
            )
            return cls(plan, None, tensors)
        room = Arena.allocate([p.span for p in plan.placements], device)
        tensors = tuple(
            room.view(index, p.dtype, p.shape, p.stride) for index, p in enumerate(plan.placements)
        )
        return cls(plan, room, tensors)

    def pairs(self) -> list[tuple[Truth, Tensor]]:
        """Each piece of memory with what it must hash to."""
        truths = (placement.truth for placement in self.plan.placements)
        return list(zip(truths, self.tensors, strict=True))

    def regions(self, *, whole: bool) -> list[Tensor]:
        """The memory as a transfer sees it: the arena's segments, or one region a tensor."""
        if whole and self.arena is not None:
            return [segment for segment in self.arena.segments if segment.numel()]
        return [flat_bytes(tensor) for tensor in self.tensors if tensor.numel()]

    def sites(self) -> Iterator[tuple[nn.Module, Tensor, int]]:
        """Where the tensors stand once they are installed, each with its placement's number."""
        for number, placement in enumerate(self.plan.placements):
            for container, *_ in placement.containers:
                for site in container.sites:
                    tensor = site.get()
                    if tensor is not None:
                        yield site.module, tensor, number

    def free(self) -> None:
        """Give the memory back; whoever still holds these tensors finds them empty.

        Not by resizing the storage: a transfer that was aborted may still be writing to it, and
        whoever prints a traceback's tensors would read it.
        """
        for tensor in (*(self.arena.segments if self.arena is not None else ()), *self.tensors):
            tensor.set_()  # type: ignore[call-overload]

    def installable(self) -> list[tuple[Container, Tensor]]:
        """Each container with the tensor that goes there."""
        return [
            (container, tensor.as_strided(shape, stride, tensor.storage_offset() + offset))
            for placement, tensor in zip(self.plan.placements, self.tensors, strict=True)
            for container, shape, stride, offset in placement.containers
        ]


def make_plan(
    state: State,
    manifest: Manifest,
    *,
    mesh: Mesh,
    rank: int,
    modules: Sequence[str] = (),
    ignore: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> Plan:
    """Match containers with a manifest's tensors.

    ``modules`` limits the scope to names below those submodules; ``ignore`` and ``keep`` are
    shell patterns of names. Raises :class:`SkeletonMismatch`, naming every difference (the first
    few of many).
    """
    return _Matching(state, manifest, mesh, rank, modules, ignore, keep).plan()


def plan_changed(state: State, truths: Mapping[str, Truth]) -> Plan:
    """The plan of a changed state, whose containers and truths must name the same tensors."""
    names = [container.name for container in state.containers]
    if set(names) != set(truths):
        odd = sorted(set(names) ^ set(truths))
        raise SkeletonMismatch(
            "skeleton after its change",
            expected=f"{len(truths)} tensors, as the published truth has",
            found=f"{len(names)}; {', '.join(odd[:3])} differ",
        )
    placements = []
    for container in sorted(state.containers, key=lambda c: c.name):
        tensor = container.tensor
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        placements.append(
            Placement(
                None,
                None,
                tensor.dtype,
                shape,
                stride,
                container.span,
                truths[container.name],
                ((container, shape, stride, 0),),
            )
        )
    return Plan(tuple(placements), (), ())


class _Matching:
    def __init__(
        self,
        state: State,
        manifest: Manifest,
        mesh: Mesh,
        rank: int,
        modules: Sequence[str],
        ignore: Sequence[str],
        keep: Sequence[str],
    ) -> None:
        self.state = state
        self.computed = {name for container in state.computed for name in container.names}
        self.manifest = manifest
        self.modules = tuple(modules)
        self.ignore = tuple(ignore)
        self.keep = tuple(keep)
        self.tied: Mapping[str, TiedEntry] = {entry.name: entry for entry in manifest.tied}
        self.slices = self._slices(mesh, rank)
        self.shard, self.copies = self._copies(mesh, rank)
        self.problems: list[str] = []
        self.kept: list[Container] = []

    def plan(self) -> Plan:
        owners: dict[str, Container] = {}
        views: dict[str, list[tuple[Container, TiedEntry]]] = {}
        for container in self.state.computed:
            if container.tensor.is_meta:
                self.problems.append(
                    f"{container.name} is a buffer that nobody saves, and was left on meta"
                )
        for container in self.state.containers:
            self._claim(container, owners, views)
        skipped = self._unclaimed(owners, views)
        placements = [
            placement
            for entry in self.manifest.tensors
            if entry.name in owners or entry.name in views
            if (placement := self._placement(entry, owners.get(entry.name), views)) is not None
        ]
        if not placements and not self.problems:
            self.problems.append("not one tensor of the manifest has a container")
        if self.problems:
            more = len(self.problems) - 5
            listed = "; ".join(self.problems[:5]) + (f"; and {more} more" if more > 0 else "")
            raise SkeletonMismatch(
                f"skeleton: {len(self.problems)} differences from {self.manifest.model!r}: "
                f"{listed}",
                do="build the model that was deployed, or name what differs by design "
                "with modules=, ignore= or keep=",
            )
        kept = tuple(container.name for container in self.kept)
        return Plan(tuple(placements), kept, tuple(skipped))

    def _slices(self, mesh: Mesh, rank: int) -> Mapping[str, SliceEntry] | None:
        layout = self.manifest.layout(mesh)
        if layout is not None:
            return {entry.name: entry for entry in layout.ranks[rank]}
        if mesh.plan:
            raise SkeletonMismatch(
                f"mesh {dict(mesh.dimensions)}",
                expected=f"a layout for it in the manifest of {self.manifest.model!r}",
                found=", ".join(str(dict(x.mesh.dimensions)) for x in self.manifest.layouts)
                or "none",
                do="deploy with this mesh",
            )
        return None

    def _copies(self, mesh: Mesh, rank: int) -> tuple[str, Mapping[str, Copied]]:
        """The rank's own file, and where in it tensors are."""
        layout = self.manifest.layout(mesh)
        if layout is None or not layout.shards:
            return "", {}
        shard = layout.shards[rank]
        return shard.file, {copy.name: copy for copy in shard.tensors}

    def _known(self, name: str) -> bool:
        if name in self.tied:
            name = self.tied[name].of
        return name in self.manifest.tensor and (self.slices is None or name in self.slices)

    def _claim(
        self,
        container: Container,
        owners: dict[str, Container],
        views: dict[str, list[tuple[Container, TiedEntry]]],
    ) -> None:
        if any(fnmatchcase(name, pattern) for name in container.names for pattern in self.keep):
            self._keep(container)
            return
        known = [name for name in container.names if self._known(name)]
        stored = [name for name in known if name in self.manifest.tensor]
        if stored:
            owners[stored[0]] = container
            self._agree(container, stored[0], known)
        elif known:
            tie = self.tied[known[0]]
            views.setdefault(tie.of, []).append((container, tie))
            self._agree(container, known[0], known)
        elif filled_itself(container.tensor):
            self._keep(container)
        else:
            self.problems.append(f"{container.name} is in the model but not in the manifest")

    def _keep(self, container: Container) -> None:
        if container.tensor.is_meta:
            self.problems.append(f"{container.name} is to be kept but was never filled")
        self.kept.append(container)

    def _agree(self, container: Container, chosen: str, names: Sequence[str]) -> None:
        """One container, several names in the manifest: they must mean the same bytes."""
        first = self._content(chosen)
        for name in names:
            if self._content(name) != first:
                self.problems.append(
                    f"{chosen} and {name} are one tensor in the model but two in the manifest"
                )

    def _content(self, name: str) -> tuple[object, ...]:
        tie = self.tied.get(name)
        entry = self.manifest.tensor[tie.of if tie else name]
        view: object = None
        if tie and (tie.shape, tie.stride, tie.offset) != (entry.shape, _dense(entry.shape), 0):
            view = (tie.shape, tie.stride, tie.offset)
        return (entry.dtype, entry.shape, entry.crc32c, entry.nbytes, view)

    def _unclaimed(
        self,
        owners: Mapping[str, Container],
        views: Mapping[str, Sequence[tuple[Container, TiedEntry]]],
    ) -> list[str]:
        claimed = {name for container in owners.values() for name in container.names}
        claimed.update(name for tied in views.values() for c, _ in tied for name in c.names)
        skipped = []
        for name in (*self.manifest.tensor, *self.tied):
            if name in claimed or not self._known(name) or not self._in_scope(name):
                continue
            if name in views:
                continue  # memory that exists to be viewed
            if name in self.computed or any(fnmatchcase(name, p) for p in self.ignore):
                skipped.append(name)
            elif not any(name in container.names for container in self.kept):
                self.problems.append(f"{name} is in the manifest but not in the model")
        return skipped

    def _in_scope(self, name: str) -> bool:
        return not self.modules or any(name.startswith(f"{module}.") for module in self.modules)

    def _placement(
        self,
        entry: TensorEntry,
        owner: Container | None,
        views: Mapping[str, Sequence[tuple[Container, TiedEntry]]],
    ) -> Placement | None:
        part = self.slices[entry.name] if self.slices is not None else None
        whole = stored_shape(entry.dtype, entry.shape)
        shape = part.shape_of(whole) if part else whole
        dtype = torch_dtype(entry.dtype)
        if dtype is None:
            self.problems.append(f"{entry.name} is {entry.dtype}, which this torch does not have")
            return None
        stride = tuple(owner.tensor.stride()) if owner else _dense(shape)
        tied = views.get(entry.name, ())
        if part is not None and part.axis is not None and tied:
            self.problems.append(f"{entry.name} is viewed by {tied[0][0].name} and cannot be split")
        if tied and stride != _dense(shape):
            self.problems.append(f"{entry.name} is viewed by {tied[0][0].name} but not dense")
        containers = [] if owner is None else [(owner, shape, stride, 0)]
        containers += [(c, tuple(c.tensor.shape), tie.stride, tie.offset) for c, tie in tied]
        if owner is not None:
            self._fits(owner, dtype, shape)
        for container, tie in tied:
            self._fits(container, dtype, tie.shape)
        if len(stride) != len(shape):
            return None  # another number of dimensions, as _fits has told
        numel = math.prod(shape)
        last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if numel else -1
        truth = Truth(
            entry.name,
            entry.dtype,
            numel * dtype.itemsize,
            part.crc32c if part else entry.crc32c,
            part.sample if part else entry.sample,
        )
        part = part if part is not None and part.axis is not None else None
        copy = self.copies.get(entry.name)
        if copy is not None:
            held = part.shape_of(entry.shape) if part else entry.shape
            place = {"file": self.shard, "begin": copy.begin, "end": copy.end, "shape": held}
            entry, part = entry.model_copy(update=place), None
        return Placement(
            entry,
            part,
            dtype,
            shape,
            stride,
            (last + 1) * dtype.itemsize,
            truth,
            tuple(containers),
        )

    def _fits(self, container: Container, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = container.tensor
        if tensor.dtype != dtype:
            found = safetensors_name(tensor.dtype) or str(tensor.dtype)
            self.problems.append(
                f"{container.name} is {safetensors_name(dtype)} in the manifest, "
                f"{found} in the model"
            )
        elif tuple(tensor.shape) != shape:
            self.problems.append(
                f"{container.name} is {list(shape)} in the manifest, "
                f"{list(tensor.shape)} in the model"
            )


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a row-major tensor."""
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
