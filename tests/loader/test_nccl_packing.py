"""Plans of broadcasts: every region rides once, and both sides plan alike."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.loader.transports.nccl_packing import CHUNK, SMALL, packed, unpacked

LENGTHS = st.lists(st.integers(1, 300), max_size=120)


@given(LENGTHS, st.integers(2, 200), st.integers(200, 400))
@settings(deadline=None, max_examples=200)
def test_every_region_rides_once(lengths: list[int], small: int, chunk: int) -> None:
    plan = packed(lengths, small=small, chunk=chunk)
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


@given(LENGTHS, st.integers(2, 200))
@settings(deadline=None, max_examples=50)
def test_chunks_are_full(lengths: list[int], small: int) -> None:
    chunks = packed(lengths, small=small, chunk=400).chunks
    for part, following in pairwise(chunks):
        first, _ = following.places[0]
        assert part.nbytes + 15 + lengths[first] > 400


def test_few_small_regions_go_one_by_one() -> None:
    lengths = [5, SMALL, *[100] * 10]
    assert packed(lengths) == unpacked(lengths)
    assert packed([]) == unpacked([])


def test_small_and_large() -> None:
    lengths = [SMALL - 1, SMALL] * 20
    plan = packed(lengths)
    assert plan.direct == tuple(range(1, 40, 2))
    assert [len(part.places) for part in plan.chunks] == [CHUNK // SMALL, 4]
