"""The rules of ties, held against torch itself for views that nobody thought of."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.flows.convert.ties import HIDDEN, View, resolve_ties

NUMEL = 48


@st.composite
def views(draw):
    """Up to five views of one storage: slices, transposes, expansions, windows."""
    found = []
    for index in range(draw(st.integers(1, 5))):
        dims = draw(st.integers(0, 3))
        shape = tuple(draw(st.integers(1, 4)) for _ in range(dims))
        stride = tuple(draw(st.sampled_from([0, 1, 1, 2, 3, 4, 6, 12])) for _ in range(dims))
        reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if reach >= NUMEL:
            continue
        offset = draw(st.integers(0, NUMEL - 1 - reach))
        name = draw(st.sampled_from(["layers.{}.w", "embed.{}", "head_{}"])).format(index)
        found.append(View(name, 1, "F32", shape, stride, offset))
    return found


def rebuild(found: list[View]) -> dict[str, torch.Tensor]:
    """The tensors as they come back, from a storage whose elements are 0, 1, 2, …"""
    storage = torch.arange(float(NUMEL))
    rebuilt = {}
    for item in resolve_ties(found):
        view = item.view
        if item.span is None:
            strided = torch.as_strided(storage, view.shape, view.stride, view.offset)
            base = rebuilt[item.name] = strided.clone(memory_format=torch.contiguous_format)
        else:
            assert item.name.startswith(HIDDEN)
            base = storage[item.span[0] : item.span[1]].clone()
        for tie in item.tied:
            rebuilt[tie.name] = torch.as_strided(base, tie.shape, tie.stride, tie.offset)
    return rebuilt


@settings(max_examples=150, deadline=None)
@given(views())
def test_values_and_shared_elements_survive(found):
    storage = torch.arange(float(NUMEL))
    expected = {
        v.name: torch.as_strided(storage, v.shape, v.stride, v.offset).clone() for v in found
    }
    rebuilt = rebuild(found)
    assert set(rebuilt) == set(expected)
    for name, tensor in rebuilt.items():
        assert torch.equal(tensor, expected[name])
    for name in rebuilt:
        fresh = rebuild(found)
        fresh[name].fill_(-1)
        written = set(expected[name].reshape(-1).tolist())
        for other, tensor in fresh.items():
            hit = torch.tensor([x in written for x in expected[other].reshape(-1).tolist()])
            assert torch.equal(tensor.reshape(-1) == -1, hit), (name, other)


@settings(max_examples=200, deadline=None)
@given(views())
def test_no_more_is_stored_than_there_was(found):
    stored = resolve_ties(found)
    numel = 0
    for item in stored:
        size = 1
        for length in item.shape:
            size *= length
        numel += size
    assert numel <= 2 * NUMEL


def test_interleaved_expansions_share_one_span():
    found = [View(f"w{i}", 1, "F32", (2, 100), (0, 20), i) for i in range(20)]
    (item,) = resolve_ties(found)
    assert item.shape == (2000,)
    assert len(item.tied) == 20


def test_dtypes_are_stored_apart():
    found = [View("a", 1, "F32", (8,), (1,), 0), View("b", 1, "U8", (32,), (1,), 0)]
    assert [(i.name, i.tied) for i in resolve_ties(found)] == [("a", ()), ("b", ())]


def test_hidden_names_count_on():
    found = [View("a", 1, "F32", (4,), (1,), 0), View("b", 1, "F32", (4,), (1,), 2)]
    assert [i.name for i in resolve_ties(found, first_hidden=7)] == ["warmcast.storage.7"]
