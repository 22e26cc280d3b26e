"""Which tensors share a file, so that what did not change stays in files that do not change.

A fine-tune changes some layers, adds a few rows to the embedding, or one more layer. A file that
is filled up to a limit and followed by the next would then begin and end elsewhere, and so would
all behind it. Here a tensor's file depends on its neighbours alone:

- The tensors before the layers (the embeddings) are in files of their own, and so are those behind
  them (norm, head), and so is each stack of layers ("model.layers", "encoder.layer").
- In a stack a file holds the layers of an aligned range whose length is a power of two (0 to 3,
  4 to 7, …): the longest of those that fit into the limit. Whether a range fits depends on its own
  layers only, so a layer that grows can split the range that it is in, and no other.
- A layer that is longer than the limit has files of its own, filled in order. A tensor is never
  cut: one that is longer than the limit has a file of its own.

A checkpoint that fits into one file is one, unless it is cut by layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from warmcast.flows.convert.options import ShardBy
from warmcast.flows.steps.order import layer_of, load_order


class Sized(Protocol):
    """What is to be placed: a name, and bytes."""

    @property
    def name(self) -> str:
        """The tensor's name."""

    @property
    def nbytes(self) -> int:
        """The tensor's length in bytes."""


T = TypeVar("T", bound=Sized)


def shard(tensors: Iterable[T], max_nbytes: int, by: ShardBy = "size") -> list[list[T]]:
    """Divide tensors into files, in load order, of at most ``max_nbytes`` bytes of tensors."""
    ordered = sorted(tensors, key=lambda t: load_order(t.name))
    if by == "size" and _nbytes(ordered) <= max_nbytes:
        return [ordered]
    files: list[list[T]] = []
    for stack in _stacks(ordered):
        files += _range(stack, 0, _span(stack), max_nbytes if by == "size" else 0, max_nbytes)
    return files


def _stacks(ordered: Sequence[T]) -> Iterator[dict[int, list[T]]]:
    """Each stack's tensors by layer; what is in no layer is a stack of one, before and behind."""
    stacks: dict[tuple[int, str], dict[int, list[T]]] = {}
    for tensor in ordered:
        place = load_order(tensor.name)[0]
        stack, layer = layer_of(tensor.name) if place == 1 else ("", 0)
        stacks.setdefault((place, stack), {}).setdefault(layer, []).append(tensor)
    yield from stacks.values()


def _span(stack: dict[int, list[T]]) -> int:
    """The power of two that all the layers' numbers are below."""
    return 1 << max(stack).bit_length()


def _range(
    layers: dict[int, list[T]], begin: int, length: int, limit: int, max_nbytes: int
) -> list[list[T]]:
    """The files of layers ``begin`` to ``begin + length``: one, if it fits into ``limit``."""
    content = [t for n, tensors in layers.items() if begin <= n < begin + length for t in tensors]
    if not content:
        return []
    if length == 1:
        return _filled(content, max_nbytes)
    if _nbytes(content) <= limit:
        return [content]
    half = length // 2
    return [
        file
        for start in (begin, begin + half)
        for file in _range(layers, start, half, limit, max_nbytes)
    ]


def _filled(tensors: Sequence[T], max_nbytes: int) -> list[list[T]]:
    """Files filled in order."""
    files: list[list[T]] = [[]]
    filled = 0
    for tensor in tensors:
        if files[-1] and filled + tensor.nbytes > max_nbytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.nbytes
    return files


def _nbytes(tensors: Iterable[Sized]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
