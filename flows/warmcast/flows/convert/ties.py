"""Which tensors are stored, and which are views of a stored one.

The input is what torch knows of each tensor: its storage, dtype, shape, strides and offset. Two
tensors are tied where they share *elements*; two halves of one storage that share none are not.

- One tensor under several names: the first in load order is stored, the others are tied whole.
- Tensors inside another that is row-major: that one is stored, the others are views of it.
- Any other overlap (partial; inside a tensor that is not row-major; a tensor that overlaps itself,
  as an expanded one does): the elements' common span is stored as a 1-D tensor of a name of its
  own, ``warmcast.storage.N``, and every name is a view of it.
- A tensor that shares nothing is stored row-major, whatever its strides.

Tensors without elements share nothing. Tensors of different dtypes over one storage are stored
apart, because a view has its base's dtype. Of each storage, at most twice its length is stored for
each dtype, whatever the views.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warmcast.flows.steps.order import load_order
from warmcast.manifests.canonical import canonical_json
from warmcast.manifests.manifest import TiedEntry

HIDDEN = "warmcast.storage."
"""What the name of a tensor that exists only to be viewed begins with."""

METADATA = "warmcast.tied"
"""The key of a header's metadata under which views of stored tensors stand, as JSON."""

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as torch sees it; strides and offset count elements of ``dtype``."""

    name: str
    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """What makes two views of one storage the same tensor: a length of 1 has no stride."""
        default = row_major(self.shape)
        stride = tuple(
            d if n == 1 else s for n, s, d in zip(self.shape, self.stride, default, strict=True)
        )
        return self.shape, stride, self.offset

    @property
    def numel(self) -> int:
        """The elements it has, which an expanded one counts more than once."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """One past the last element."""
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + sum((n - 1) * s for n, s in steps) + 1

    @property
    def is_row_major(self) -> bool:
        """Whether its elements stand in order, without gaps."""
        return self.place[1] == row_major(self.shape)


@dataclass(frozen=True, slots=True)
class Stored:
    """What is written for a group of tensors, and the names that are views of it.

    ``span`` is None where ``view`` is written row-major, and ``(begin, end)`` in elements of
    ``view``'s storage where that span is written under ``name``.
    """

    name: str
    view: View
    span: tuple[int, int] | None
    tied: tuple[TiedEntry, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is written."""
        return self.view.shape if self.span is None else (self.span[1] - self.span[0],)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a row-major tensor."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def resolve_ties(views: Iterable[View], first_hidden: int = 0) -> list[Stored]:
    """Decide for every tensor; hidden names count from ``first_hidden``."""
    groups: dict[tuple[int, str], list[View]] = {}
    stored = []
    for view in sorted(views, key=lambda v: load_order(v.name)):
        if 0 in view.shape:
            stored.append(Stored(view.name, view, None, ()))
        else:
            groups.setdefault((view.storage, view.dtype), []).append(view)
    for group in groups.values():
        spans = []
        for component in _components(group):
            whole = _stored_whole(component)
            if whole is None:
                spans.append(component)
            else:
                stored.append(whole)
        for views in _merged(spans):
            stored.append(_stored_span(views, f"{HIDDEN}{first_hidden}"))
            first_hidden += 1
    return stored


def tie_metadata(
    ties: Iterable[TiedEntry], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Ties as a safetensors header's metadata, so that a converted file tells them itself.

    ``shapes`` are those of the stored tensors.

    Names that share a tensor whole stand as ``safetensors.torch.save_model`` writes them,
    ``{removed: kept}``; other views under :data:`METADATA`, as the manifest writes them.
    """
    whole, views = {}, []
    for tie in ties:
        shape = shapes[tie.of]
        if tie.shape == shape and tie.stride == row_major(shape) and tie.offset == 0:
            whole[tie.name] = tie.of
        else:
            views.append(tie.model_dump(mode="json"))
    return whole | ({METADATA: canonical_json(views).decode()} if views else {})


def _stored_whole(views: Sequence[View]) -> Stored | None:
    """Tensors that share elements, as one of them and its views; None if none will do.

    ``views`` are in load order.
    """
    first, *rest = views
    if all(v.place == first.place for v in rest):
        if _overlaps_itself(first):
            return None
        tied = tuple(_tie(v, first.name, row_major(v.shape), 0) for v in rest)
        return Stored(first.name, first, None, tied)
    extent = _extent(views)
    base = next((v for v in views if v.is_row_major and (v.offset, v.end) == extent), None)
    if base is None:
        return None
    tied = tuple(
        _tie(v, base.name, v.place[1], v.offset - base.offset) for v in views if v is not base
    )
    return Stored(base.name, base, None, tied)


def _stored_span(views: Sequence[View], hidden: str) -> Stored:
    """Tensors as views of their common span."""
    begin, end = _extent(views)
    tied = tuple(_tie(v, hidden, v.place[1], v.offset - begin) for v in views)
    return Stored(hidden, views[0], (begin, end), tied)


def _merged(components: Iterable[list[View]]) -> Iterator[list[View]]:
    """Groups whose spans overlap, as one: else many that interleave would each be stored long."""
    run: list[View] = []
    for views in sorted(components, key=_extent):
        if run and _extent(views)[0] >= _extent(run)[1]:
            yield run
            run = []
        run = run + views
    if run:
        yield run


def _extent(views: Sequence[View]) -> tuple[int, int]:
    return min(v.offset for v in views), max(v.end for v in views)


def _tie(view: View, of: str, stride: tuple[int, ...], offset: int) -> TiedEntry:
    return TiedEntry(name=view.name, of=of, shape=view.shape, stride=stride, offset=offset)


def _components(views: Sequence[View]) -> Iterator[list[View]]:
    """Tensors of one storage and dtype, grouped by whether they share elements."""
    order = {view.name: position for position, view in enumerate(views)}
    run: list[View] = []
    end = -1
    for view in sorted(views, key=lambda v: (v.offset, v.end)):
        if run and view.offset >= end:
            yield from _split(sorted(run, key=lambda v: order[v.name]))
            run = []
        run.append(view)
        end = max(end, view.end)
    yield from _split(sorted(run, key=lambda v: order[v.name]))


def _split(views: list[View]) -> Iterator[list[View]]:
    """Group tensors whose extents overlap by whether their elements do."""
    places = {v.place for v in views}
    if len(places) == 1 or all(_is_dense(v) for v in views):
        # Without gaps inside, an overlap of extents is one of elements.
        yield views
        return
    begin, end = _extent(views)
    by_place: dict[Any, list[View]] = {}
    for view in views:
        by_place.setdefault(view.place, []).append(view)
    yield from _painted(list(by_place.values()), begin, end)


def _painted(classes: list[list[View]], begin: int, end: int) -> Iterator[list[View]]:
    """Paint each tensor's elements with a colour of its own; what it paints over, it is tied to.

    One byte an element (four beyond 255 tensors), and no longer than the storage. A tensor with
    more elements than places overlaps itself, and is taken to touch its whole extent: painting it
    could take for ever.
    """
    import torch

    few = len(classes) <= 255
    canvas = torch.zeros(end - begin, dtype=torch.uint8 if few else torch.int32)
    parent = list(range(len(classes) + 1))

    def root(colour: int) -> int:
        while parent[colour] != colour:
            colour = parent[colour]
        return colour

    for colour, (view, *_) in enumerate(classes, 1):
        area = canvas[view.offset - begin : view.end - begin]
        if math.prod(view.shape) <= len(area):
            area = torch.as_strided(canvas, view.shape, view.stride, view.offset - begin)
        # In pieces, because finding the distinct values of a tensor takes several times its memory.
        for piece in area.reshape(-1).split(_PIECE):
            for below in torch.unique(piece).tolist():
                if below:
                    parent[root(below)] = root(colour)
        area.fill_(colour)
    groups: dict[int, list[View]] = {}
    for colour, same in enumerate(classes, 1):
        groups.setdefault(root(colour), []).extend(same)
    for group in groups.values():
        yield sorted(group, key=lambda v: load_order(v.name))


def _is_dense(view: View) -> bool:
    """Whether the elements fill their extent, in whatever order of dimensions."""
    return math.prod(view.shape) == view.end - view.offset and not _overlaps_itself(view)


def _overlaps_itself(view: View) -> bool:
    """Whether two places of the tensor may be one element.

    Exact where each stride steps over all that lies below it, as in every slice and permutation
    of a row-major tensor; others are taken to overlap, which costs a hidden name and no bytes.
    """
    reach = 0
    for stride, length in sorted(zip(view.stride, view.shape, strict=True)):
        if length == 1:
            continue
        if stride <= reach:
            return True
        reach += (length - 1) * stride
    return False
