"""How regions ride in broadcasts: large ones as they lie, small ones together.

Both sides of a transfer make the same plan from the lengths alone. NCCL spends some 2 µs on each
broadcast of a group beside its bytes, which is as long as 600 KB take over NVLink: small regions
are gathered into chunks of a staging buffer, and each chunk is one broadcast.

Chunks are large, because each costs a launch, but the first and the last: nothing hides the time in
which the first is gathered and the last scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALL = 4 << 20
"""Bytes below which a region rides with others."""

FIRST = 64 << 20
"""Bytes of the first chunk; each is at most twice as long as the one before. A chunk should take
the wire longer than the 0.13 ms that the host needs for a launch.
"""

CHUNK = 256 << 20
"""Bytes of a chunk at most."""

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


def packed(
    lengths: Sequence[int], *, small: int = SMALL, first: int = FIRST, chunk: int = CHUNK
) -> Plan:
    """The plan for regions of these lengths in bytes, of which those under ``small`` are packed.

    ``small`` is not more than ``first``, and that not more than ``chunk``.
    """
    indices = [index for index, length in enumerate(lengths) if length < small]
    if len(indices) < _FEWEST:
        return unpacked(lengths)
    direct = tuple(index for index, length in enumerate(lengths) if length >= small)
    left = sum(_aligned(lengths[index]) for index in indices)
    room = min(first, chunk)
    chunks: list[Chunk] = []
    places: list[tuple[int, int]] = []
    used = end = 0
    for index in indices:
        if used + lengths[index] > room:
            chunks.append(Chunk(tuple(places), end))
            left -= used
            # Never more than half of what is left, so that the last ones are short.
            room = min(chunk, 2 * room, max(first, left // 2))
            places, used = [], 0
        places.append((index, used))
        end = used + lengths[index]
        used = _aligned(end)
    chunks.append(Chunk(tuple(places), end))
    return Plan(direct, tuple(chunks))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
