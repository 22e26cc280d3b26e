"""Safetensors headers that were cut off, damaged or made to harm: refused, naming what is wrong."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from warmcast.manifests.errors import InvalidHeader
from warmcast.manifests.header import MAX_NBYTES, Header, header_nbytes, parse_header, read_header

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def spelled(header, data=bytes(24), *, length=None):
    """A file: its header's length (or a lie), the header (JSON, or bytes as they are), its data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def parse(file):
    return parse_header(file, len(file), "model.safetensors")


def refused(file):
    with pytest.raises(InvalidHeader) as caught:
        parse(file)
    message = str(caught.value)
    assert message.startswith("model.safetensors: ")
    assert message.isprintable()
    assert len(message) < 1200
    return message


def entry(**changes):
    return {"w": {**ENTRY, **changes}}


def test_the_file_that_the_rest_breaks_is_valid():
    assert isinstance(parse(spelled({"w": ENTRY})), Header)


def test_cut_off_at_every_byte():
    file = save({"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int8)}, {"k": "v"})
    parse(file)
    for size in range(len(file)):
        message = refused(file[:size])
        assert "cut off" in message


def test_cut_off_on_disk_at_every_byte(tmp_path):
    path = tmp_path / "model.safetensors"
    file = save({"a": torch.ones(1)})
    for size in range(len(file)):
        path.write_bytes(file[:size])
        with pytest.raises(InvalidHeader, match="cut off"):
            read_header(path)


def test_a_header_shorter_than_was_read():
    file = spelled({"w": ENTRY})
    with pytest.raises(InvalidHeader, match="cut off"):
        parse_header(file[:20], len(file), "x")


@pytest.mark.parametrize("grown", [b"\0", bytes(100)])
def test_bytes_after_the_last_tensor(grown):
    assert "bytes, as its header says" in refused(spelled({"w": ENTRY}) + grown)


@pytest.mark.parametrize("length", [0, 1, MAX_NBYTES + 1, 1 << 62, (1 << 63) + 1, (1 << 64) - 1])
def test_a_length_that_no_header_has(length):
    message = refused(spelled({"w": ENTRY}, length=length))
    assert "no safetensors file" in message


@pytest.mark.parametrize("more", [-1, 1, 5])
def test_a_length_that_is_a_little_off(more):
    text = json.dumps({"w": ENTRY}).encode()
    refused(spelled({"w": ENTRY}, length=len(text) + more))


def test_a_small_file_that_promises_a_huge_header_costs_nothing(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(MAX_NBYTES.to_bytes(8, "little") + b"{}")
    # In a process that could not hold the header: where it is believed, MemoryError.
    script = (
        "import sys; from pathlib import Path\n"
        "from warmcast.manifests.header import read_header\n"
        "import resource; pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        "limit = pages * resource.getpagesize() + (32 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "read_header(Path(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, check=False
    )
    assert "InvalidHeader" in done.stderr
    assert "cut off" in done.stderr


def test_a_sparse_file_of_a_terabyte_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(spelled({"w": ENTRY}))
        file.truncate(1 << 40)
    with pytest.raises(InvalidHeader, match="1,099,511,627,776"):
        read_header(path)


@pytest.mark.parametrize(
    "text",
    [
        b"  ",
        b"[]",
        b"null",
        b'"{}"',
        b" {}",
        b"{",
        b"{}x",
        b"{}{}",
        b"\xff\xfe",
        b'{"\xff":1}',
        b"\xef\xbb\xbf{}",
        b'{"\\ud800":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
        b'{"__metadata__":{"a":"\\udc00"}}',
        b'{"a":1,"a":1}',
        b'{"__metadata__":{},"__metadata__":{}}',
        b'{"w":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}',
        b'{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}',
        b'{"w":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,1]}}',
        b'{"w":{"dtype":"U8","shape":[1e999],"data_offsets":[0,1]}}',
        b'{"w":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}',
    ],
    ids=lambda text: repr(text[:40]),
)
def test_what_is_no_json_object_of_tensors(text):
    refused(spelled(text, b""))


@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_nesting_is_bounded(bracket):
    assert "nested too deeply" in refused(spelled(b'{"w":' + bracket * 200_000, b""))


@pytest.mark.parametrize("value", [None, 1, [], {"a": 1}, {"a": None}, {"a": {"b": "c"}}, "text"])
def test_metadata_that_is_no_strings(value):
    assert "__metadata__" in refused(spelled({"__metadata__": value, "w": ENTRY}))


@pytest.mark.parametrize(
    "value", [None, [], "F32", {}, {"dtype": "F32"}, {**ENTRY, "extra": 1}, 7, True]
)
def test_an_entry_that_is_no_tensor(value):
    assert "tensor 'w': expected dtype, shape, data_offsets" in refused(spelled({"w": value}))


@pytest.mark.parametrize("dtype", ["f32", "F128", "", None, 4, ["F32"], {"F32": 1}, "F32 ", "I4"])
def test_an_unknown_dtype(dtype):
    assert "tensor 'w': expected a dtype of BOOL" in refused(spelled(entry(dtype=dtype)))


@pytest.mark.parametrize(
    "shape",
    [None, 6, "6", {}, [6.0], [True, 6], ["6"], [-2, -3], [None], [[6]], [1 << 63], {"6": 1}],
)
def test_a_shape_that_is_no_list_of_lengths(shape):
    assert "tensor 'w': expected a shape of sizes" in refused(spelled(entry(shape=shape)))


@pytest.mark.parametrize(
    "shape",
    [[1 << 62, 1 << 62], [1 << 32, 1 << 32], [1 << 62, 4], [1 << 16] * 4, [1 << 62] * 10_000],
    ids=lambda shape: f"{len(shape)} lengths",
)
def test_a_shape_that_overflows(shape):
    # 2**64 elements wrap to 0 in 64 bits, and would "fit" in no bytes at all.
    assert "fits memory" in refused(spelled(entry(shape=shape, data_offsets=[0, 0]), b""))


@pytest.mark.parametrize("shape", [[6, 2], [5], [], [0], [7]])
def test_a_shape_of_other_bytes(shape):
    assert "24 bytes" in refused(spelled(entry(shape=shape)))


def test_elements_that_do_not_fill_whole_bytes():
    assert "whole bytes of F4" in refused(
        spelled(entry(dtype="F4", shape=[3], data_offsets=[0, 1]), b"a")
    )


@pytest.mark.parametrize(
    "offsets",
    [None, 24, [24], [0, 24, 24], [24, 0], [0.0, 24.0], [False, 24], ["0", "24"], [-24, 0], {}],
)
def test_offsets_that_are_no_range(offsets):
    assert "tensor 'w': expected data_offsets" in refused(spelled(entry(data_offsets=offsets)))


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ([(1, 2)], "gap"),
        ([(0, 2), (3, 4)], "gap"),
        ([(0, 2), (1, 4)], "overlap"),
        ([(0, 2), (0, 2)], "overlap"),
        ([(0, 4), (1, 1)], "overlap"),
        ([(0, 4), (6, 6)], "gap"),
        ([(1 << 62, 1 << 62)], "gap"),
    ],
)
def test_gaps_and_overlaps(places, found):
    header = {
        f"t{i}": {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for i, (begin, end) in enumerate(places)
    }
    assert found in refused(spelled(header, bytes(4)))


def test_a_tensor_after_the_files_end():
    assert "cut off" in refused(spelled(entry(), bytes(23)))


def test_names_reach_the_message_printable_and_short():
    assert "\\x1b" in refused(spelled({"\x1b[2J\n\u202e": 1}))
    refused(spelled({"n" * 1_000_000: 1}))
    refused(spelled({"w": {"x" * 1_000_000: 1}}))


@pytest.mark.parametrize(
    ("prefix", "size"), [(b"", 0), (b"\x02\0\0", 3), (b"\x02" + bytes(7), 7), (b"", 100)]
)
def test_a_file_too_short_for_a_length(prefix, size):
    with pytest.raises(InvalidHeader, match="cut off"):
        header_nbytes(prefix, size, "x")


BASE = save(
    {"a": torch.ones(2, 2), "b": torch.zeros(3, dtype=torch.int8), "c": torch.zeros(0)},
    {"format": "pt"},
)
HEADER_END = 8 + int.from_bytes(BASE[:8], "little")


def parses_or_is_refused(file):
    try:
        header = parse_header(file, len(file), "x")
    except InvalidHeader as refusal:
        assert str(refusal).isprintable()
        return
    position = header.data_begin
    for tensor in header.tensors:
        assert tensor.begin == position
        position = tensor.end
    assert position == len(file)
    try:  # what we accept, the format's own library accepts and means the same
        theirs = {name: (t["dtype"], tuple(t["shape"])) for name, t in deserialize(file)}
    except SafetensorError as error:
        raise AssertionError(file) from error
    assert theirs == {t.name: (t.dtype, t.shape) for t in header.tensors}


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_changed_bytes(changes):
    file = bytearray(BASE)
    for place, value in changes:
        file[place] = value
    parses_or_is_refused(bytes(file))


@settings(deadline=None, max_examples=300)
@given(
    st.integers(8, HEADER_END - 1),
    st.integers(0, 12),
    st.sampled_from([b"", b"0", b"-1", b"null", b"[]", b"1e3", b'"', b"}", b"{", b",", b"\\u0000"]),
)
def test_spliced_bytes_under_a_length_that_fits(place, removed, inserted):
    text = BASE[8:place] + inserted + BASE[min(place + removed, HEADER_END) : HEADER_END]
    parses_or_is_refused(spelled(text, BASE[HEADER_END:]))


sizes = st.integers(-2, 30) | st.sampled_from([True, 1.0, None, 1 << 62, 1 << 64, "1"])
hostile_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "F4", "F6_E2M3", "BF16", "nope", None]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.lists(sizes, min_size=1, max_size=3),
    }
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.text(max_size=3), hostile_entries, max_size=3), st.integers(0, 40))
def test_any_values_in_the_right_places(header, length):
    parses_or_is_refused(spelled(header, bytes(length)))


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=80))
def test_any_bytes(data):
    parses_or_is_refused(data)
