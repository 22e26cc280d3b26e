"""The garbage collector during a load: quiet, and as before when the last load ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from warmcast.loader.collector import quiet
from warmcast.loader.skeletons import skeleton


@pytest.fixture(autouse=True)
def threshold() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.unfreeze()
    yield before
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.parametrize("context", [quiet, skeleton])
def test_it_is_put_back(context, threshold) -> None:
    with pytest.raises(RuntimeError), context():
        assert gc.get_threshold()[0] > 100 * threshold[0]
        assert gc.get_freeze_count() > 10_000
        raise RuntimeError
    assert gc.get_threshold() == threshold
    assert gc.get_freeze_count() == 0


def test_contexts_that_overlap(threshold) -> None:
    """Loads of two threads need not end in the order in which they began."""
    first, second = ExitStack(), ExitStack()
    first.enter_context(quiet())
    second.enter_context(quiet())
    first.close()
    assert gc.get_threshold() != threshold
    assert gc.get_freeze_count()
    second.close()
    assert gc.get_threshold() == threshold
    assert not gc.get_freeze_count()


@pytest.mark.parametrize("own", [(0, 10, 10), (5_000_000, 10, 10)])
def test_a_collector_that_is_rarer_stays(own) -> None:
    gc.set_threshold(*own)
    with quiet():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_what_others_set_meanwhile_stays() -> None:
    with quiet():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


def test_frozen_objects_of_the_process_stay_frozen() -> None:
    gc.freeze()
    with quiet():
        pass
    assert gc.get_freeze_count() > 10_000  # some may have ended


def test_garbage_is_still_collected() -> None:
    class Ring:
        def __init__(self) -> None:
            self.me = self

    before = gc.get_stats()[0]["collections"]
    with quiet():
        for _ in range(3_000_000):
            Ring()
    assert gc.get_stats()[0]["collections"] > before
