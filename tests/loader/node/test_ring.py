"""The placement of chunks on nodes: even, the same for all, and stable."""

from __future__ import annotations

import bisect
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.loader.node.ring import Ring

BLOB = hashlib.sha256(b"model").hexdigest()
NAMES = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=12)


def names(count: int) -> list[str]:
    return [f"node-{number}" for number in range(count)]


@settings(deadline=None, max_examples=40)
@given(NAMES, st.integers(1, 200), st.integers(1, 5))
def test_every_chunk_has_its_owners(nodes: set[str], chunks: int, count: int) -> None:
    owners = Ring(nodes).owners(BLOB, chunks, count)
    assert len(owners) == chunks
    for mine in owners:
        assert len(mine) == len(set(mine)) == min(count, len(nodes))
        assert set(mine) <= nodes
    assert [mine[0] for mine in owners] == [one for (one,) in Ring(nodes).owners(BLOB, chunks)]


@settings(deadline=None, max_examples=40)
@given(NAMES, st.integers(0, 60), st.integers(1, 20))
def test_owners_are_those_whose_points_follow(nodes: set[str], chunks: int, count: int) -> None:
    """As the module's description says it, point by point."""
    names = sorted(nodes)
    points = sorted(
        (point & ~0xFFFF | index)
        for index, name in enumerate(names)
        for point in words(f"node {name}", 1024)
    )
    ring = Ring(nodes)
    places = ring.places(BLOB, chunks)
    assert places.nbytes == 4 * chunks
    for chunk, place in zip(words(f"blob {BLOB}", chunks), places.tolist(), strict=True):
        at = bisect.bisect_left(points, chunk)
        order = [names[point & 0xFFFF] for point in points[at:] + points[:at]]
        assert ring.following(place, count) == tuple(dict.fromkeys(order))[:count]


@settings(deadline=None, max_examples=40)
@given(NAMES, st.integers(0, 60), st.data())
def test_a_node_asks_for_its_own_first(nodes: set[str], chunks: int, data: st.DataObject) -> None:
    me = data.draw(st.sampled_from(sorted(nodes)) | st.text(max_size=9))
    ring = Ring(nodes)
    order = ring.order(ring.places(BLOB, chunks), me).tolist()
    assert sorted(order) == list(range(chunks))
    mine = [number for number, (owner,) in enumerate(ring.owners(BLOB, chunks)) if owner == me]
    assert set(order[: len(mine)]) == set(mine)
    first = chunks * sum(node <= me for node in nodes) // len(nodes)
    turned = [*range(first, chunks), *range(first)]
    assert [n for n in order if n in mine] == [n for n in turned if n in mine]
    assert [n for n in order if n not in mine] == [n for n in turned if n not in mine]


def words(name: str, count: int) -> list[int]:
    data = hashlib.shake_128(name.encode()).digest(8 * count)
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, 8 * count, 8)]


@settings(deadline=None, max_examples=40)
@given(NAMES, st.data())
def test_only_the_chunks_of_one_who_leaves_move(nodes: set[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(nodes)))
    before = Ring(nodes).owners(BLOB, 300, 2)
    after = Ring(nodes - {gone}).owners(BLOB, 300)
    for old, new in zip(before, after, strict=True):
        if len(nodes) == 1:
            assert new == ()
        else:  # to the next in the order, which everybody knew
            assert new[0] == (old[1] if old[0] == gone else old[0])


def test_the_order_in_which_nodes_are_known_does_not_matter() -> None:
    assert Ring(names(9)).owners(BLOB, 50) == Ring(reversed(names(9))).owners(BLOB, 50)


def test_placement_is_pinned() -> None:
    """Agents of two versions have to agree."""
    text = " ".join(owner for (owner,) in Ring(names(20)).owners(BLOB, 500))
    assert hashlib.sha256(text.encode()).hexdigest() == PINNED


@pytest.mark.parametrize("count", [20, 1000, 10_000])
def test_no_node_has_much_more_than_its_share(count: int) -> None:
    """What moves when a node leaves is what it had."""
    shares = sum(Ring(names(count)).shares(hashlib.sha256(b"%d" % n).hexdigest(), 500_000)
                 for n in range(max(1, count // 1000)))  # fmt: skip
    assert isinstance(shares, np.ndarray)
    mean = shares.sum() / count
    chance = 4 * mean**0.5  # of the chunks that were drawn
    assert shares.max() <= 1.2 * mean + chance


def test_no_nodes() -> None:
    ring = Ring([])
    assert ring.owners(BLOB, 2) == ring.owners(BLOB, 2, 3) == [(), ()]
    assert ring.order(ring.places(BLOB, 2), "node-0").tolist() == [0, 1]


PINNED = "db8de370ccdff77e6ff1b15af5006c3aedd64c3c520297abb056914a97ef4071"
