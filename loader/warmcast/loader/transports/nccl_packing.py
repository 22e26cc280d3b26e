"""How regions ride in broadcasts: large ones as they lie, small ones together.

Both sides of a transfer make the same plan from the lengths alone. NCCL spends some 2 µs on each
broadcast of a group beside its bytes, which is as long as 600 KB take over NVLink: small regions
are gathered into chunks of a staging buffer, and each chunk is one broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALL = 8 << 20
"""Bytes below which a region rides with others."""

CHUNK = 128 << 20
"""Bytes of a chunk at most. Each costs a launch, and the first and last are not overlapped."""

_FEWEST = 16
"""Small regions that are worth packing."""

_ALIGN = 16
"""Bytes to which regions are aligned in a chunk, for copies by whole words."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Small regions of one broadcast: (index, offset in the chunk) each, and the chunk's bytes."""

    places: tuple[tuple[int, int], ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Indices of regions that are sent from where they lie, and chunks of the others."""

    direct: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def unpacked(lengths: Sequence[int]) -> Plan:
    """The plan that packs nothing, for where there is no room for staging."""
    return Plan(tuple(range(len(lengths))), ())


def packed(lengths: Sequence[int], *, small: int = SMALL, chunk: int = CHUNK) -> Plan:
    """The plan for regions of these lengths in bytes. No region is longer than ``chunk`` that is
    smaller than ``small``.
    """
    indices = [index for index, length in enumerate(lengths) if length < small]
    if len(indices) < _FEWEST:
        return unpacked(lengths)
    direct = tuple(index for index, length in enumerate(lengths) if length >= small)
    chunks: list[Chunk] = []
    places: list[tuple[int, int]] = []
    used = 0
    for index in indices:
        offset = -(-used // _ALIGN) * _ALIGN
        if offset + lengths[index] > chunk:
            chunks.append(Chunk(tuple(places), used))
            places, offset = [], 0
        places.append((index, offset))
        used = offset + lengths[index]
    chunks.append(Chunk(tuple(places), used))
    return Plan(direct, tuple(chunks))
