"""Plans of broadcasts: every region rides once, and both sides plan alike."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.loader.transports.nccl_packing import SMALL, packed, unpacked

LENGTHS = st.lists(st.integers(1, 300), max_size=120)


@given(LENGTHS, st.integers(2, 200), st.integers(200, 400), st.integers(400, 4000))
@settings(deadline=None, max_examples=200)
def test_every_region_rides_once(lengths: list[int], small: int, first: int, chunk: int) -> None:
    plan = packed(lengths, small=small, first=first, chunk=chunk)
    places = [place for part in plan.chunks for place in part.places]
    assert sorted([*plan.direct, *(index for index, _ in places)]) == list(range(len(lengths)))
    assert all(lengths[index] < small for index, _ in places)
    assert [index for index, _ in places] == sorted(index for index, _ in places)
    for part in plan.chunks:
        assert part.places
        end = 0
        for index, offset in part.places:
            assert offset >= end
            assert offset % 16 == 0
            end = offset + lengths[index]
        assert end == part.nbytes <= chunk


@given(st.lists(st.integers(1, 199), min_size=16, max_size=400))
@settings(deadline=None, max_examples=100)
def test_chunks_grow_and_shrink(lengths: list[int]) -> None:
    chunks = packed(lengths, small=200, first=200, chunk=3200).chunks
    assert chunks[0].nbytes <= 200
    for part, following in pairwise(chunks):
        room = min(part.nbytes + 200, 3200)
        assert following.nbytes <= 2 * room
    left = sum(length + 15 for length in lengths)
    for part in chunks:
        assert part.nbytes <= max(200, left / 2)
        left -= part.nbytes
    # Few launches: as many as a chunk in the middle is long, and those of both ends.
    assert len(chunks) <= sum(lengths) / (3200 - 215) + 2 * 5 + 4


def test_few_small_regions_go_one_by_one() -> None:
    lengths = [5, SMALL, *[100] * 10]
    assert packed(lengths) == unpacked(lengths)
    assert packed([]) == unpacked([])


def test_small_and_large() -> None:
    lengths = [SMALL - 1, SMALL] * 400
    plan = packed(lengths)
    assert plan.direct == tuple(range(1, 800, 2))
    sizes = [part.nbytes // (1 << 20) + 1 for part in plan.chunks]
    assert sizes == [64, 128, 256, 256, 256, 256, 192, 96, 64, 32]
    assert sum(sizes) == 400 * 4
