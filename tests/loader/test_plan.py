"""The plan of a load: exact, or an error that names every difference."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from tests.loader.models import Bag, Block, Encoder
from tests.manifests.builders import CREATED_AT, file_entry, tensor_entries
from warmcast.loader.containers import collect
from warmcast.loader.errors import SkeletonMismatch
from warmcast.loader.plan import Plan, Truth, make_plan, plan_changed
from warmcast.loader.skeletons import skeleton
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import Manifest, TiedEntry, build_manifest


def manifest_of(state: dict[str, Tensor], tied: tuple[TiedEntry, ...] = ()) -> Manifest:
    """The manifest of one safetensors file; needs no origin."""
    data = save({name: tensor.detach().contiguous() for name, tensor in state.items()})
    return build_manifest(
        model="m", revision="r", upstream="u", created_at=CREATED_AT, config={}, tied=tied,
        files=[file_entry("model.safetensors", data, 1 << 24)],
        tensors=tensor_entries("model.safetensors", data),
    )  # fmt: skip


def plan_of(model: nn.Module, manifest: Manifest, **options: object) -> Plan:
    options = {"mesh": Mesh(), "rank": 0} | options
    return make_plan(collect(model, options.get("modules", ())), manifest, **options)


def differences(model: nn.Module, manifest: Manifest, **options: object) -> str:
    with pytest.raises(SkeletonMismatch) as caught:
        plan_of(model, manifest, **options)
    return str(caught.value)


def state() -> dict[str, Tensor]:
    return {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros((), dtype=torch.int64)}


def test_what_fits():
    plan = plan_of(Bag(state()), manifest_of(state()))
    assert {p.truth.name for p in plan.placements} == {"a", "b", "c"}
    assert (plan.kept, plan.skipped, plan.nbytes) == ((), (), 24 + 16 + 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"b": None}, "b is in the manifest but not in the model"),
        ({"d": torch.zeros(1)}, "d is in the model but not in the manifest"),
        ({"a": torch.zeros(3, 2)}, "a is [2, 3] in the manifest, [3, 2] in the model"),
        ({"a": torch.zeros(6)}, "a is [2, 3] in the manifest, [6] in the model"),
        ({"b": torch.zeros(4, dtype=torch.bfloat16)}, "b is F32 in the manifest, BF16 in the"),
        ({"c": torch.zeros(1, dtype=torch.int64)}, "c is [] in the manifest, [1] in the model"),
        ({"b": torch.zeros(4, dtype=torch.complex128)}, "F32 in the manifest, torch.complex128"),
    ],
)
def test_one_difference(changes, words):
    found = {n: t for n, t in (state() | changes).items() if t is not None}
    message = differences(Bag(found), manifest_of(state()))
    assert "1 differences from 'm'" in message
    assert words in message


def test_all_differences_are_named():
    found = {"a": torch.zeros(3, 2), "b": torch.zeros(4).half(), "d": torch.zeros(1)}
    message = differences(Bag(found), manifest_of(state()))
    assert "4 differences" in message
    for words in ("a is [2, 3]", "b is F32", "c is in the manifest", "d is in the model"):
        assert words in message


def test_many_differences_are_counted():
    message = differences(
        Bag({f"x{i}": torch.zeros(1) for i in range(20)} | state()), manifest_of(state())
    )
    assert "20 differences" in message
    assert "and 15 more" in message


def test_nothing_in_common():
    assert "6 differences" in differences(
        Bag({f"other.{n}".replace(".", "_"): t for n, t in state().items()}), manifest_of(state())
    )
    message = differences(nn.Module(), manifest_of(state()), ignore=["*"])
    assert "not one tensor" in message


def test_names_with_another_prefix_are_no_match():
    """A wrapper (DistributedDataParallel, compile) that renames everything is told of."""
    model = nn.Module()
    model.module = Bag(state())
    assert "module.a is in the model but not in the manifest" in differences(
        model, manifest_of(state())
    )


def test_ignore():
    wide = state() | {"lm_head.weight": torch.zeros(5), "lm_head.bias": torch.zeros(5)}
    plan = plan_of(Bag(state()), manifest_of(wide), ignore=["lm_head.*"])
    assert sorted(plan.skipped) == ["lm_head.bias", "lm_head.weight"]
    assert len(plan.placements) == 3
    assert "lm_head.bias" in differences(Bag(state()), manifest_of(wide), ignore=["*.weight"])


def test_ignore_does_not_hide_what_the_model_has():
    """A pattern that also names a container would leave it unfilled: it is loaded after all."""
    plan = plan_of(Bag(state()), manifest_of(state()), ignore=["*"])
    assert len(plan.placements) == 3


def test_keep():
    narrow = {n: t for n, t in state().items() if n != "b"}
    plan = plan_of(Bag(state()), manifest_of(narrow), keep=["b"])
    assert plan.kept == ("b",)
    plan = plan_of(Bag(state()), manifest_of(state()), keep=["b"])
    assert plan.kept == ("b",)
    assert {p.truth.name for p in plan.placements} == {"a", "c"}


@pytest.mark.parametrize("pattern", ["embed.*", "head.*"])
def test_keep_of_a_tied_tensor(pattern):
    """Kept under one name, it is kept under all."""
    state = Encoder().state_dict()
    tie = TiedEntry(name="head.weight", of="embed.weight", shape=(40, 16), stride=(16, 1), offset=0)
    manifest = manifest_of({n: t for n, t in state.items() if n != "head.weight"}, (tie,))
    plan = plan_of(Encoder(), manifest, keep=[pattern])
    assert plan.kept == ("embed.weight",)
    assert "embed.weight" not in {p.truth.name for p in plan.placements}


def test_keep_of_what_was_never_filled():
    with skeleton():
        model = nn.Linear(2, 2)
    state = {"weight": torch.zeros(2, 2)}
    assert "bias is to be kept but was never filled" in differences(
        model, manifest_of(state), keep=["bias"]
    )


def test_computed_buffers():
    saved = Block(4).state_dict()
    plan = plan_of(Block(4), manifest_of(saved))
    assert "positions" not in {p.truth.name for p in plan.placements}
    older = saved | {"positions": torch.arange(4)}
    assert plan_of(Block(4), manifest_of(older)).skipped == ("positions",)


def test_a_computed_buffer_that_nobody_computed():
    with torch.device("meta"):
        model = Block(4)
    assert "positions is a buffer that nobody saves, and was left on meta" in differences(
        model, manifest_of(Block(4).state_dict())
    )


def test_modules_limit_both_sides():
    model = nn.Module()
    model.text, model.textual = Bag(state()), Bag({"z": torch.zeros(1)})
    stored = {f"text.{n}": t for n, t in state().items()} | {"textual.y": torch.zeros(1)}
    plan = plan_of(model, manifest_of(stored), modules=("text",))
    assert {p.truth.name for p in plan.placements} == {"text.a", "text.b", "text.c"}


def test_a_mesh_with_a_plan_needs_its_layout():
    message = differences(
        Bag(state()), manifest_of(state()), mesh=Mesh.grid({"tp": 2}, {"a": "tp:1"})
    )
    assert "mesh {'tp': 2}" in message
    assert "deploy with this mesh" in message


def test_a_view_that_does_not_fit():
    tie = TiedEntry(name="v", of="b", shape=(2,), stride=(2,), offset=1)
    manifest = manifest_of(state(), (tie,))
    plan = plan_of(Bag(state() | {"v": torch.zeros(2)}), manifest)
    assert [len(p.containers) for p in plan.placements if p.truth.name == "b"] == [2]
    wrong = Bag(state() | {"v": torch.zeros(3)})
    assert "v is [2] in the manifest, [3] in the model" in differences(wrong, manifest)


def test_layout_does_not_depend_on_the_order_of_the_model():
    tensors = state()
    manifest = manifest_of(tensors)
    backwards = Bag(dict(reversed(tensors.items())))
    assert plan_of(Bag(tensors), manifest).layout == plan_of(backwards, manifest).layout


def test_changed_state_must_be_what_was_published():
    found = collect(Bag(state()))
    truths = {n: Truth(n, "F32", t.numel() * 4, "0" * 8, "0" * 32) for n, t in state().items()}
    assert len(plan_changed(found, truths).placements) == 3
    with pytest.raises(SkeletonMismatch, match="scale"):
        plan_changed(found, truths | {"scale": Truth("scale", "F32", 4, "0" * 8, "0" * 32)})


def test_ties_are_one_placement():
    model = Encoder()
    stored = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
    plan = plan_of(model, manifest_of(stored))
    sites = [len(c.sites) for p in plan.placements for c, *_ in p.containers]
    assert sorted(sites)[-2:] == [1, 2]
