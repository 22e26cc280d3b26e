"""Which tensors share a file: what changes in one place leaves the other files as they are."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.convert.shards import shard
from warmcast.flows.run import deploy
from warmcast.flows.steps.order import load_order


@dataclass(frozen=True)
class Item:
    name: str
    nbytes: int


def model(layers: int = 8, embed: int = 40, layer: int = 10, head: int = 40) -> list[Item]:
    return [
        Item("embed.weight", embed),
        *(Item(f"layers.{n}.{w}", layer) for n in range(layers) for w in ("a", "b")),
        Item("norm.weight", 1),
        Item("head.weight", head),
    ]


def files(items, limit, by="size") -> set[tuple[Item, ...]]:
    return {tuple(file) for file in shard(items, limit, by)}


def names(items, limit, by="size"):
    return [[item.name for item in file] for file in shard(items, limit, by)]


def test_layers_stand_in_aligned_ranges():
    found = names(model(), 90)
    layers = [[f"layers.{n}.{w}" for n in range(b, b + 4) for w in ("a", "b")] for b in (0, 4)]
    assert found == [["embed.weight"], *layers, ["norm.weight", "head.weight"]]
    assert names(model(), 10**6) == [[item.name for item in model()]]


def test_by_layer():
    found = names(model(), 10**6, "layer")
    layers = [[f"layers.{n}.a", f"layers.{n}.b"] for n in range(8)]
    assert found == [["embed.weight"], *layers, ["norm.weight", "head.weight"]]


def test_a_layer_over_the_limit_is_cut_between_tensors():
    assert names(model(2), 15) == [
        ["embed.weight"], ["layers.0.a"], ["layers.0.b"], ["layers.1.a"], ["layers.1.b"],
        ["norm.weight"], ["head.weight"],
    ]  # fmt: skip


def test_stacks_are_apart():
    items = [Item(f"{stack}.{n}.w", 10) for stack in ("encoder", "decoder") for n in range(3)]
    assert names(items, 30) == [
        [f"encoder.{n}.w" for n in range(3)], [f"decoder.{n}.w" for n in range(3)],
    ]  # fmt: skip


def test_a_resized_embedding_changes_its_own_file():
    before, after = files(model(), 90), files(model(embed=45), 90)
    assert before - after == {(Item("embed.weight", 40),)}
    assert after - before == {(Item("embed.weight", 45),)}


def test_layers_that_are_added_change_no_full_range():
    before, after = files(model(8), 90), files(model(10), 90)
    assert before < after


@pytest.mark.parametrize("changed", range(8))
def test_a_layer_that_grows_changes_its_range_alone(changed):
    items = [
        Item(item.name, 1000) if item.name == f"layers.{changed}.a" else item for item in model()
    ]
    untouched = {
        f for f in files(model(), 90) if not any(f"layers.{changed}." in i.name for i in f)
    }
    assert len(untouched) == 3
    assert untouched <= files(items, 90)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"(embed|head|norm|(layers|h)\.(0|[1-9][0-9]{0,6})\.[ab])", fullmatch=True),
        st.integers(0, 50),
    ),
    st.integers(1, 200),
    st.sampled_from(["size", "layer"]),
)
def test_every_tensor_once_in_load_order_and_within_the_limit(sizes, limit, by):
    items = [Item(name, nbytes) for name, nbytes in sizes.items()]
    found = shard(items, limit, by)
    flat = [item for file in found for item in file]
    assert flat == sorted(items, key=lambda item: load_order(item.name))
    for file in found:
        assert sum(item.nbytes for item in file) <= limit or len(file) == 1


def weights(rows: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    state = {f"layers.{n}.weight": torch.randn(8, 8, generator=generator) for n in range(8)}
    return {"embed.weight": torch.ones(rows, 8)} | state | {"norm.weight": torch.ones(8)}


def test_a_fine_tune_moves_what_it_changed(source, file_url, work):
    options = ConvertOptions(max_shard_nbytes=600)

    def moved(state) -> set[str]:
        torch.save(state, source / "pytorch_model.bin")
        result = deploy(source, file_url, "m@a", work=work, convert=options)
        tensors = {t.name for t in result.manifest.tensors if t.file in result.moved}
        return tensors

    state = weights()
    assert moved(state) == set(state)
    state["layers.5.weight"] = state["layers.5.weight"] + 1
    assert moved(state) == {"layers.4.weight", "layers.5.weight"}
    state["embed.weight"] = torch.ones(11, 8)
    assert moved(state) == {"embed.weight"}
