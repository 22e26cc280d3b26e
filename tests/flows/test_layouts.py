"""What each rank holds, and its truth, against slices that torch makes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from warmcast.flows.run import deploy
from warmcast.flows.steps.layouts import layout_for, pieces_for
from warmcast.flows.steps.meshes import parse_mesh
from warmcast.manifests import Mesh
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.errors import UsageError
from warmcast.manifests.manifest import TensorEntry, TiedEntry
from warmcast.manifests.sampling import sampled_hash_of


def entry(name, shape, dtype="F32", nbytes=None):
    end = 4 * math.prod(shape) if nbytes is None else nbytes
    return TensorEntry(
        name=name, dtype=dtype, shape=shape, file="x", begin=0, end=end,
        crc32c="0" * 8, sample="0" * 32,
    )  # fmt: skip


def laid_out(tensors, tied, mesh, read):
    return layout_for(mesh, pieces_for(tensors, tied, mesh), read)


def never(_):
    raise AssertionError("read")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slices(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(1, 3))
    shape = (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])
    tensor = torch.randn(shape)
    mesh = Mesh.grid({"dp": 2, "tp": count}, {"w*": f"tp:{axis}"})
    raw = memoryview(bytearray(tensor.numpy().tobytes()))
    layout = laid_out([entry("w", shape), entry("other", (2,))], (), mesh, lambda _: raw)
    for rank, (_, place) in enumerate(mesh.coordinates):
        piece, whole = layout.ranks[rank]
        expected = tensor.chunk(count, axis)[place] if shape[axis] else tensor
        bytes_ = expected.contiguous().numpy().tobytes()
        assert piece.shape_of(shape) == tuple(expected.shape)
        assert piece.crc32c == to_hex(crc32c(bytes_))
        assert piece.sample == sampled_hash_of("w", "F32", bytes_)
        assert (whole.name, whole.axis) == ("other", None)


def test_deployed_layout(source, file_url):
    weight = torch.randn(6, 4)
    save_file({"a.q.weight": weight, "norm": torch.ones(3)}, source / "model.safetensors")
    mesh = Mesh.grid({"tp": 2}, {"*.q.weight": "tp:1"})
    manifest = deploy(source, file_url, "m@a", meshes=[mesh]).manifest
    layout = manifest.layout(mesh)
    assert layout is not None
    right = next(s for s in layout.ranks[1] if s.name == "a.q.weight")
    assert right.crc32c == to_hex(crc32c(weight[:, 2:].contiguous().numpy().tobytes()))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"nothing.*": "tp:0"}, "none of that name"),
        ({"a": "tp:0"}, "that tp=2 divides, found 3"),
        ({"a": "tp:2"}, "expected an axis below 2"),
        ({"a": "pp:1"}, "expected dimension:axis"),
        ({"a": "tp"}, "expected dimension:axis"),
        ({"a": "tp:-1"}, "expected dimension:axis"),
        ({"a": "tp:1", "?": "tp:0"}, "expected one rule"),
        ({"narrow": "tp:0"}, "whole bytes"),
        ({"base": "tp:0"}, "a view of a part"),
        ({"b": "tp:1", "twin": "tp:0"}, "the rule of 'b'"),
    ],
)
def test_plans_that_do_not_fit(plan, words):
    tensors = [
        entry("a", (3, 4)), entry("b", (4, 4)), entry("base", (4,)),
        entry("narrow", (4,), "F4", 2),
    ]  # fmt: skip
    tied = [
        TiedEntry(name="part", of="base", shape=(2,), stride=(1,), offset=0),
        TiedEntry(name="twin", of="b", shape=(4, 4), stride=(4, 1), offset=0),
    ]
    with pytest.raises(UsageError, match=words):
        laid_out(tensors, tied, Mesh.grid({"tp": 2}, plan), never)


def test_a_tied_name_follows_its_base():
    tied = [TiedEntry(name="twin", of="b", shape=(4,), stride=(1,), offset=0)]
    mesh = Mesh.grid({"tp": 2}, {"b": "tp:0", "twin": "tp:0"})
    layout = laid_out([entry("b", (4,))], tied, mesh, lambda _: memoryview(bytearray(16)))
    assert [s.length for rank in layout.ranks for s in rank] == [2, 2]


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"dimensions": []},
        {"dimensions": {"tp": "2"}},
        {"dimensions": {"tp": True}},
        {"dimensions": {"tp": 0}},
        {"dimensions": {"tp": 2}, "plan": []},
        {"dimensions": {"tp": 2}, "more": 1},
        {"dimensions": {"tp": 1 << 40}},
    ],
)
def test_values_that_are_no_mesh(value):
    with pytest.raises(UsageError):
        parse_mesh(value, "mesh")
