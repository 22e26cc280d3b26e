import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmcast.manifests import errors
from warmcast.manifests.errors import UsageError, WarmcastError, one_line

ALL = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, WarmcastError)]


def test_a_message_says_what_was_expected_found_and_what_to_do():
    assert str(WarmcastError("x")) == "x"
    assert str(WarmcastError("x", found=0)) == "x: found 0"
    assert str(WarmcastError("x", expected=1, found=2, do="try 1")) == (
        "x: expected 1, found 2; try 1"
    )


@pytest.mark.parametrize("kind", ALL)
def test_exit_codes(kind):
    assert kind.exit_code == (2 if kind is UsageError else 1)


@pytest.mark.parametrize("kind", ALL)
def test_the_tree_is_drawn(kind):
    assert kind.__name__ in errors.__doc__


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_a_message_is_one_printable_line(what, found, do):
    assert str(WarmcastError(what, found=found, do=do)).isprintable()


def test_control_characters_and_surrogates_are_escaped():
    assert one_line("a\x1b[31m\n b\t\ud800") == r"a\u001b[31m b \ud800"


def test_long_values_are_cut():
    message = str(WarmcastError("n" * 10**6, found="v" * 10**6))
    assert len(message) < 1100
    assert "…" in message
