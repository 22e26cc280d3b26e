import json
import math
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.manifests.canonical import canonical_json, digest, parse_json
from warmcast.manifests.errors import InvalidData, InvalidHeader

modest = settings(deadline=None, max_examples=100)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


def nested(levels):
    value = 0
    for _ in range(levels):
        value = [value]
    return value


def test_pinned():
    value = {
        "ß": [1, 1.0, -0.0, 1e22, 1e-7, 0.1],
        "b": {"z": None, "a": True},
        "a": 'line\nquote"\u2028\U0001f600\x7f\x01',
        "": [],
        "\uffff": 1,
        "\U00010000": 2,
    }
    spelled = (
        '{"":[],"a":"line\\nquote\\"\u2028\U0001f600\x7f\\u0001","b":{"a":true,"z":null},'
        '"ß":[1,1.0,-0.0,1e+22,1e-07,0.1],"\uffff":1,"\U00010000":2}'
    )
    assert canonical_json(value) == spelled.encode()
    assert digest(value) == "29c6f26d24254dd687965156576817ebb9122a295da912c155082f26bde3eef9"
    assert digest({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@modest
@given(json_values)
def test_a_value_comes_back(value):
    data = canonical_json(value)
    assert parse_json(data, "x") == value
    assert canonical_json(parse_json(data, "x")) == data


@modest
@given(st.dictionaries(text, json_values, max_size=5), st.randoms())
def test_the_order_of_keys_does_not_matter(value, random):
    items = list(value.items())
    random.shuffle(items)
    assert digest(dict(items)) == digest(value)


def test_other_containers_are_spelled_as_the_plain_ones():
    assert canonical_json(MappingProxyType({"a": (1, [2])})) == b'{"a":[1,[2]]}'


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (math.nan, "value: expected a JSON value"),
        ({"a": [1, math.inf]}, r"value\.a\[1\]"),
        ({1: 2}, "string keys"),
        ({"a": b"bytes"}, r"value\.a"),
        ({"a": {1, 2}}, r"value\.a"),
        ("\ud800", "surrogate"),
        ({"a\udfff": 1}, "surrogate"),
        ({"a": ["ok", "\udc80"]}, r"value\.a\[1\]"),
        (1 << 64, "64 bits"),
        (-(1 << 63) - 1, "64 bits"),
        ([10**5000], "64 bits"),
        (nested(101), "100 levels"),
        (nested(100_000), "100 levels"),
    ],
)
def test_what_has_no_spelling_is_refused(value, place):
    with pytest.raises(InvalidData, match=place):
        canonical_json(value)


def test_a_value_that_holds_itself_is_refused():
    value = {}
    value["self"] = value
    with pytest.raises(InvalidData, match="100 levels"):
        canonical_json(value)


def test_a_hundred_levels_are_spelled():
    assert canonical_json(nested(100)) == b"[" * 100 + b"0" + b"]" * 100


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nul",
        b"{} {}",
        b"\xff",
        b'"\xed\xa0\x80"',
        b"\xef\xbb\xbf{}",
        b"NaN",
        b"[Infinity]",
        b'{"a":-Infinity}',
        b"[1e999]",
        b'{"a":1,"a":1}',
        b'[{"b":{"a":1,"c":2,"a":3}}]',
        b'"\\ud800"',
        b'[["\\uDFFFx"]]',
        b'{"\\udc00\\ud800":1}',
        pytest.param(b"[" * 200_000, id="deep lists"),
        pytest.param(b'{"a":' * 200_000, id="deep objects"),
        pytest.param(b"9" * 5000, id="long number"),
        b"'a'",
        b"[1,]",
    ],
)
@pytest.mark.parametrize("error", [InvalidData, InvalidHeader])
def test_what_is_not_plain_json_is_refused(data, error):
    with pytest.raises(InvalidData, match="the thing: expected") as caught:
        parse_json(data, "the thing", error)
    assert type(caught.value) is error
    assert len(str(caught.value)) < 700
    assert str(caught.value).isprintable()


def test_the_key_that_stands_twice_is_named():
    with pytest.raises(InvalidData) as caught:
        parse_json(b'{"a":1,"b":2,"b":3}', "x")
    assert str(caught.value) == "x: expected unique keys, found the key 'b' twice"


def test_escaped_pairs_are_text():
    assert parse_json(rb'["\ud83d\ude00", "\\ud800"]', "x") == ["\U0001f600", r"\ud800"]


@modest
@given(st.binary(max_size=60) | json_values.map(lambda v: json.dumps(v).encode()))
def test_bytes_parse_or_are_refused(data):
    try:
        value = parse_json(memoryview(data), "x")
    except InvalidData:
        return
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
