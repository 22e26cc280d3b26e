"""Headers that the format's own library wrote, or reads."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.torch import save, save_file

from warmcast.manifests.dtypes import BITS, nbytes, numel
from warmcast.manifests.header import HeaderTensor, parse_header, read_header

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def spelled(header, data=b""):
    """A file: its header's length, the header (JSON, or bytes as they are), its data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def parse(file):
    return parse_header(file, len(file), "file")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_library_wrote(dtype):
    tensors = {
        "matrix": torch.zeros(3, 5, dtype=dtype),
        "scalar": torch.zeros((), dtype=dtype),
        "nothing": torch.zeros(0, 7, dtype=dtype),
    }
    file = save(tensors, {"format": "pt", "é\n": ""})
    header = parse(file)
    assert header.metadata == {"format": "pt", "é\n": ""}
    assert {t.name: (t.dtype, t.shape) for t in header.tensors} == {
        name: (DTYPES[dtype], tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    assert header.tensors[0].begin == header.data_begin
    assert header.tensors[-1].end == len(file)


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_is_one_that_the_library_reads(dtype):
    file = spelled({"x": {"dtype": dtype, "shape": [8], "data_offsets": [0, BITS[dtype]]}})
    file += bytes(BITS[dtype])
    assert parse(file).tensors[0].nbytes == BITS[dtype]
    assert deserialize(file)[0][1]["dtype"] == dtype


@settings(deadline=None, max_examples=40)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=6,
    )
)
def test_names_places_and_bytes_agree_with_the_library(shapes):
    tensors = {}
    for number, (name, (dtype, shape)) in enumerate(shapes.items()):
        tensors[name] = torch.full(shape, number + 1).to(dtype)
    file = save(tensors)
    ours = {t.name: (t.dtype, list(t.shape), file[t.begin : t.end]) for t in parse(file).tensors}
    theirs = {n: (t["dtype"], t["shape"], bytes(t["data"])) for n, t in deserialize(file)}
    assert ours == theirs


def test_pinned():
    file = spelled(
        b'{"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},'
        b'"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
        bytes(9),
    )
    header = parse(file)
    begin = header.data_begin
    assert begin == len(file) - 9
    assert header.metadata == {}
    assert header.tensors == (
        HeaderTensor("a", "U8", (), begin, begin + 1),
        HeaderTensor("b", "F32", (2,), begin + 1, begin + 9),
    )


def test_a_file_without_tensors():
    assert parse(spelled({})).tensors == ()
    assert parse(spelled(b"{}      ")).data_begin == 16


def test_empty_tensors_stand_anywhere():
    entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    empty = {"dtype": "F32", "shape": [0, 9]}
    for place in (0, 2):
        header = {"x": entry, "y": {**empty, "data_offsets": [place, place]}}
        assert len(parse(spelled(header, b"ab")).tensors) == 2


def test_a_file_on_disk(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4)}, path)
    header = read_header(path)
    assert header == parse(path.read_bytes())
    tensor = header.tensors[0]
    assert path.read_bytes()[tensor.begin : tensor.end] == b"\0\0\x80\x3f" * 4


def test_more_bytes_than_the_header_do_no_harm():
    file = save({"w": torch.ones(4)})
    assert parse_header(file, len(file), "x") == parse_header(
        file[: 8 + int.from_bytes(file[:8], "little")], len(file), "x"
    )


def test_elements_and_bytes():
    assert numel(()) == 1
    assert numel((3, 0, 5)) == 0
    assert numel((1 << 31, 1 << 31)) == 1 << 62
    assert numel((1 << 31, 1 << 32)) is None
    assert numel([1 << 62] * 100_000) is None
    assert nbytes("F4", 2) == 1
    assert nbytes("F4", 3) is None
    assert nbytes("F6_E2M3", 4) == 3
    assert nbytes("C64", 2) == 16
