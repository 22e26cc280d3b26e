import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded

seconds = st.floats(-1e6, 1e6)


def test_a_deadline_in_the_past_is_over():
    late = Deadline.after(-1)
    assert late.expired
    assert late.remaining() == 0
    with pytest.raises(DeadlineExceeded, match="no time left while reading x"):
        late.check("reading x")


def test_it_is_a_timeout_to_those_who_know_only_python():
    with pytest.raises(TimeoutError):
        Deadline.after(0).check("waiting")


def test_never_is_never_over():
    never = Deadline.never()
    never.check("anything")
    assert not never.expired
    assert never.remaining() == math.inf
    assert never.share(0.5).remaining() == math.inf
    assert Deadline.after(math.inf) == never


@given(seconds, seconds)
def test_a_part_never_outlives_the_whole(whole, part):
    deadline = Deadline.after(whole)
    assert deadline.within(part).at <= deadline.at


@given(seconds, st.floats(0, 1))
def test_a_share_never_outlives_a_running_whole(whole, fraction):
    deadline = Deadline.after(whole)
    assert deadline.share(fraction).at <= deadline.at


def test_time_that_is_no_number_is_over():
    assert Deadline.after(math.nan).expired
