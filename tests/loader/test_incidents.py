"""Failures that others found in production, each with the guard that keeps it from coming back.

Source of the first four: "How It Breaks: A Taxonomy of Failures", of the NCCLBack article.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.loader.conftest import TIME, free_port
from tests.loader.models import Bag, Block, Encoder, assert_same, filled, snapshot
from warmcast.loader import Change
from warmcast.loader.errors import RestartRequired, SkeletonMismatch
from warmcast.manifests.errors import UsageError
from warmcast.manifests.identity import Mesh

FP8 = torch.float8_e4m3fn


def skeleton_of(loader, build):
    with loader.skeleton():
        return build()


def never_met(report) -> bool:
    """Whether a load saw no sender at all, rather than refusing what one gave."""
    peers = [stage.reason for stage in report.stages if stage.name == "peer"]
    nobody = ("no sender of", "nobody has published")
    return report.route == "origin" and len(peers) == 1 and peers[0].startswith(nobody)


# The grey frame

VAE = {"weight": torch.randn(6, 6, generator=torch.Generator().manual_seed(9))}
TABLE = torch.linspace(0, 1, 6)


class Vae(nn.Module):
    """A decoder that fills itself in its constructor, in one of the ways that exist."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.register_buffer("table", TABLE.clone(), persistent=False)
        if how == "parameter":
            self.weight = nn.Parameter(VAE["weight"].clone())
            return
        self.weight = nn.Parameter(torch.empty(6, 6))
        nn.init.normal_(self.weight)
        if how == "copy":
            with torch.no_grad():
                self.weight.copy_(VAE["weight"])
        else:
            self.load_state_dict(VAE, assign=how == "assign")


class Pipeline(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.transformer = Encoder()
        self.vae = Vae(how)


@pytest.mark.parametrize("how", ["load", "assign", "copy", "parameter"])
@pytest.mark.parametrize("scope", ["submodule", "whole"])
def test_grey_frame(publish, loader, how, scope):
    """What a module filled itself is not wiped, and not waited for.

    Guards: a skeleton sends only uninitialised memory to meta (skeletons.py), ``modules`` limits
    what is replaced (containers.py), and ``keep`` leaves alone the rest.
    """
    source = filled(Encoder()).state_dict()
    deployed = publish({f"transformer.{name}": tensor for name, tensor in source.items()})
    limits = {"modules": ["transformer"]} if scope == "submodule" else {"keep": ["vae.*"]}
    for route in ("origin", "peer"):
        mine = loader()
        model = skeleton_of(mine, lambda: Pipeline(how))
        assert all(parameter.is_meta for parameter in model.transformer.parameters())
        assert mine.load(model, deployed.ref, **limits).route == route
        assert_same(model.transformer.state_dict(), source)
        assert torch.equal(model.vae.weight, VAE["weight"])
        assert torch.equal(model.vae.table, TABLE)
        mine.serve(model)


@pytest.mark.parametrize("how", ["load", "copy"])
def test_grey_frame_without_being_told(publish, loader, how):
    """A module that copied its weights in needs no ``keep``: it was seen to fill itself."""
    source = filled(Encoder()).state_dict()
    deployed = publish({f"transformer.{name}": tensor for name, tensor in source.items()})
    for route in ("origin", "peer"):
        mine = loader()
        model = skeleton_of(mine, lambda: Pipeline(how))
        report = mine.load(model, deployed.ref)
        assert (report.route, report.kept) == (route, ("vae.weight",))
        assert torch.equal(model.vae.weight, VAE["weight"])
        assert_same(model.transformer.state_dict(), source)
        mine.serve(model)


def test_a_parameter_that_nobody_filled_is_told(publish, loader):
    """Only what was filled is kept: initial values are no weights, and stay an error."""

    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = Encoder()
            self.norm = nn.LayerNorm(4)
            self.scale = nn.Parameter(torch.ones(4))

    source = filled(Encoder()).state_dict()
    deployed = publish({f"transformer.{name}": tensor for name, tensor in source.items()})
    mine = loader()
    model = skeleton_of(mine, Forgetful)
    unchanged = snapshot(model)
    with pytest.raises(SkeletonMismatch) as caught:
        mine.load(model, deployed.ref)
    for name in ("norm.weight", "norm.bias", "scale"):
        assert f"{name} is in the model but not in the manifest" in str(caught.value)
    unchanged()


def test_a_decoder_that_was_deployed_is_loaded(publish, loader):
    """What a module filled itself gives way to what the manifest has."""
    state = filled(Pipeline("load"), 4).state_dict()
    deployed = publish(state)
    mine = loader()
    model = skeleton_of(mine, lambda: Pipeline("load"))
    assert mine.load(model, deployed.ref).kept == ()
    assert_same(model.state_dict(), state)


# The FP8 mismatch


def replaced(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def quantise(model: nn.Module) -> None:
    """Weights of linear layers to FP8 with a scale each, as engines do after loading."""
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            scale = module.weight.detach().abs().amax() / 448
            replaced(module, "weight", (module.weight.detach() / scale).to(FP8))
            module.register_buffer("weight_scale", scale)


def as_quantised(model: nn.Module) -> None:
    """The containers of a quantised model, unfilled."""
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            replaced(module, "weight", torch.empty_like(module.weight, dtype=FP8, device="meta"))
            module.register_buffer("weight_scale", torch.empty((), device="meta"))


FP8_CHANGE = Change("fp8", "1", quantise, as_quantised)


def blocks() -> nn.Module:
    return nn.Sequential(Block(8), Block(8))


def quantised() -> nn.Module:
    model = filled(blocks())
    quantise(model)
    return model


def test_fp8_mismatch(publish, loader):
    """Truth is that of the ready state; receivers are held to it, and verify.

    Guard: after a change the truth is measured anew and published under an identity of its own
    (change.py); against the checkpoint's truth every receiver would fail.
    """
    deployed = publish(filled(blocks()).state_dict())
    expected = quantised().state_dict()
    routes = []
    for _ in range(3):
        mine = loader()
        model = skeleton_of(mine, blocks)
        report = mine.load(model, deployed.ref, change=FP8_CHANGE)
        routes.append(report.route)
        assert report.verified
        assert model[0].up.weight.dtype == FP8
        assert_same(model.state_dict(), expected)
        assert model[1].positions.tolist() == list(range(8))
        assert mine.serve(model) is not None
    assert routes == ["origin", "peer", "peer"]
    assert report.bytes < sum(tensor.nbytes for tensor in deployed.manifest.tensors)


def test_fp8_without_prepare(publish, loader):
    """Each worker loads and changes for itself; the truth of the first holds for the others."""
    change = Change("fp8", "1", quantise)
    deployed = publish(filled(blocks()).state_dict())
    for _ in range(2):
        mine = loader()
        model = skeleton_of(mine, blocks)
        assert mine.load(model, deployed.ref, change=change).route == "origin"
        assert_same(model.state_dict(), quantised().state_dict())
        assert mine.serve(model) is not None


def test_changes_do_not_meet_what_is_not_changed_so(publish, loader):
    """Guard: the change's name, version and what it depends on are part of the identity."""
    deployed = publish(filled(blocks()).state_dict())
    other_kernel = Change("fp8", "1", quantise, as_quantised, {"kernel": "2"})
    newer = Change("fp8", "2", quantise, as_quantised)
    for change in (FP8_CHANGE, None, other_kernel, newer):
        mine = loader()
        model = skeleton_of(mine, blocks)
        assert never_met(mine.load(model, deployed.ref, change=change))
        assert mine.serve(model) is not None


def test_a_change_that_was_not_declared_is_not_served(publish, loader):
    """Guard: serve() compares the containers with those that load() left (Loader.serve)."""
    deployed = publish(filled(blocks()).state_dict())
    mine, other = loader(), loader()
    model = skeleton_of(mine, blocks)
    mine.load(model, deployed.ref)
    quantise(model)
    with pytest.raises(UsageError, match="pass what changes them to load"):
        mine.serve(model)
    assert other.load(skeleton_of(other, blocks), deployed.ref, deadline=5).route == "origin"


def test_a_change_that_differs_from_worker_to_worker(publish, loader):
    """Both run, only the first serves: what it published is the truth.

    Guard: publishing never replaces a truth, and whoever comes to other bytes offers none
    (ready.py).
    """
    calls = []

    def dither(model: nn.Module) -> None:
        calls.append(1)
        with torch.no_grad():
            model[0].up.weight.add_(len(calls) / 1024)

    change = Change("dither", "1", dither)
    deployed = publish(filled(blocks()).state_dict())
    first, second, third = loader(), loader(), loader()
    models = [skeleton_of(each, blocks) for each in (first, second, third)]
    for mine, model in zip((first, second), models, strict=False):
        assert mine.load(model, deployed.ref, change=change).verified
    assert not torch.equal(models[0][0].up.weight, models[1][0].up.weight)
    assert first.serve(models[0]) is not None
    assert second.serve(models[1]) is None


def test_a_worker_with_other_bytes_than_the_truth_keeps_nobody_waiting(publish, loader):
    """It led the load of an identity whose truth is known, and will never serve it: the lease
    goes back, and the next worker leads.
    """
    calls = []

    def dither(model: nn.Module) -> None:
        calls.append(1)
        with torch.no_grad():
            model[0].up.weight.add_(len(calls) / 1024)

    change = Change("dither", "1", dither, lambda model: None)
    deployed = publish(filled(blocks()).state_dict())
    first, second, third = loader(), loader(), loader()
    model = skeleton_of(first, blocks)
    first.load(model, deployed.ref, change=change)
    first.serve(model)
    first.close()
    model = skeleton_of(second, blocks)
    assert second.load(model, deployed.ref, change=change).route == "origin"
    assert second.serve(model) is None
    report = third.load(skeleton_of(third, blocks), deployed.ref, change=change)
    assert report.route == "origin"
    assert "nobody else is loading it" in str(report)


@pytest.mark.parametrize("when", ["apply", "prepare"])
def test_a_change_that_fails_leaves_the_model_as_it_was(publish, loader, when):
    """Guard: whatever is registered after installing is undone (containers.restorer)."""

    def broken(model: nn.Module) -> None:
        (quantise if when == "apply" else as_quantised)(model)
        model[0].norm = nn.Identity()
        raise ZeroDivisionError("half way")

    deployed = publish(filled(blocks()).state_dict())
    change = Change("b", "1", broken, as_quantised) if when == "apply" else None
    change = change or Change("b", "1", quantise, broken)
    mine = loader()
    for model in (skeleton_of(mine, blocks), filled(blocks(), 8)):
        unchanged = snapshot(model)
        with pytest.raises(ZeroDivisionError, match="half way"):
            mine.load(model, deployed.ref, change=change)
        unchanged()


# The fallback trap


def test_fallback_trap(publish, loader):
    """A skeleton that was quantised before the load fits no checkpoint.

    Guard: with no peer there is no plan to fill it by, and the load ends (load._from_origin)
    instead of loading what happens to match.
    """
    deployed = publish(filled(blocks()).state_dict())
    first, second, third = loader(), loader(), loader()
    model = skeleton_of(first, blocks)
    first.load(model, deployed.ref, change=FP8_CHANGE)
    first.serve(model)

    def skeleton():
        made = blocks()
        as_quantised(made)
        return made

    received = skeleton_of(second, skeleton)
    assert second.load(received, deployed.ref, change=FP8_CHANGE).route == "peer"
    assert_same(received.state_dict(), model.state_dict())
    first.close()

    alone = skeleton_of(third, skeleton)
    unchanged = snapshot(alone)
    with pytest.raises(RestartRequired, match="restart with an unchanged skeleton"):
        third.load(alone, deployed.ref, change=FP8_CHANGE)
    unchanged()
    # Undeclared, it is a skeleton of something else.
    with pytest.raises(SkeletonMismatch, match=r"F32 in the manifest, F8_E4M3 in the model"):
        third.load(alone, deployed.ref)
    unchanged()


# The phantom mesh

PLAN = {"weight": "tp:0"}
STRAIGHT = Mesh.grid({"tp": 2}, PLAN)
CROSSED = Mesh((("tp", 2),), ((1,), (0,)), PLAN)


def load_in_group(loader, ranks, deployed, build, *, serve=True, **options):
    """A group of two, each rank with a loader of its own; reports and models by rank."""

    def work(rank, group):
        mine = loader(group=group)
        model = skeleton_of(mine, lambda: build(rank))
        report = mine.load(model, deployed.ref, **options)
        if serve:
            mine.serve(model)
        return report, model

    found = ranks(2, work)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def test_phantom_mesh(publish, loader, ranks):
    """Two layouts whose ranks hold tensors of one shape, but not the same ones.

    Guard: the mesh key, with every rank's coordinate, is part of the identity. Without it rank 0
    of the one would receive what rank 1 of it has to hold, and only verification would notice.
    """
    weight = torch.randn(16, 4)
    deployed = publish({"weight": weight}, meshes=[STRAIGHT, CROSSED])

    def build(rank):
        return Bag({"weight": torch.empty(8, 4)})

    for mesh, order in ((STRAIGHT, (0, 1)), (CROSSED, (1, 0))):
        for route in ("origin", "peer"):
            found = load_in_group(loader, ranks, deployed, build, mesh=mesh)
            for half, (report, model) in zip(order, found, strict=True):
                assert report.route == "peer" if route == "peer" else never_met(report)
                assert torch.equal(model.weight, weight[8 * half : 8 * half + 8])


# States that differ never meet


class Extra(Block):
    """The same model with a buffer more."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("extra", torch.ones(2))


def test_states_that_differ_do_not_meet(publish, loader):
    """Guard: the state key, of every container's name, dtype, shape and stride."""
    deployed = publish(filled(Block(8)).state_dict())
    first = loader()
    model = skeleton_of(first, lambda: Block(8))
    first.load(model, deployed.ref)
    first.serve(model)
    cases = [
        (lambda: Block(8).half(), r"norm.weight is F32 in the manifest, F16 in the model"),
        (lambda: Block(16), r"norm.weight is \[8\] in the manifest, \[16\] in the model"),
        (lambda: Extra(8), r"extra is in the model but not in the manifest"),
        (lambda: nn.LayerNorm(8), r"is in the manifest but not in the model"),
    ]
    for build, words in cases:
        mine = loader()
        other = skeleton_of(mine, build)
        unchanged = snapshot(other)
        with pytest.raises(SkeletonMismatch, match=words):
            mine.load(other, deployed.ref)
        unchanged()
    mine = loader()
    kept = skeleton_of(mine, lambda: Extra(8))
    assert never_met(mine.load(kept, deployed.ref, keep=["extra"]))


def test_another_deployment_of_the_same_model_is_not_met(publish, loader):
    """Guard: the model key, of every file's bytes."""
    old = publish(filled(Block(8), 1).state_dict(), ref="model@old")
    new = publish(filled(Block(8), 2).state_dict(), ref="model@new")
    first, second = loader(), loader()
    model = skeleton_of(first, lambda: Block(8))
    first.load(model, old.ref)
    first.serve(model)
    other = skeleton_of(second, lambda: Block(8))
    assert never_met(second.load(other, new.ref))
    assert_same(other.state_dict(), filled(Block(8), 2).state_dict())


class Ordered(nn.Module):
    """Submodules in a given order, two of which share a weight."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(4, 4, bias=name == "c"))
        self.a.weight = self.b.weight


def halved(model: nn.Module) -> None:
    """To bfloat16, which leaves ties as they are."""
    model.bfloat16()


@pytest.mark.parametrize(
    "change",
    [None, FP8_CHANGE, Change("half", "1", halved, halved)],
    ids=["plain", "untied", "tied"],
)
@pytest.mark.parametrize("arena", [True, False])
def test_state_dicts_in_another_order(publish, loader, arena, change):
    """Guard: both sides lay out by the manifest's order, or by name; never by the model's own."""
    deployed = publish(filled(Ordered("abcd")).state_dict())
    states = []
    for order, route in (("abcd", "origin"), ("dcba", "peer"), ("bdac", "peer")):
        mine = loader()
        model = skeleton_of(mine, lambda order=order: Ordered(order))
        assert list(dict(model.named_children())) == list(order)
        report = mine.load(model, deployed.ref, arena=arena, change=change)
        assert report.route == route
        states.append(model.state_dict())
        mine.serve(model)
    assert_same(states[1], states[0])
    assert_same(states[2], states[0])


# A rank that cannot see its peer, while the others can


@pytest.mark.parametrize("blind", [0, 1])
@pytest.mark.parametrize("why", ["gone", "no registry", "unreachable"])
def test_one_rank_sees_no_peer(publish, loader, ranks, blind, why):
    """All take the origin together, and nobody waits for what will not come.

    Guard: each branch is a vote (stages.py); without it one rank would wait in a transfer for a
    group that is reading from the origin.
    """
    deployed = publish(filled(Block(8)).state_dict())
    serving = {}

    def first(rank, group):
        serving[rank] = mine = loader(group=group)
        model = skeleton_of(mine, lambda: Block(8))
        report = mine.load(model, deployed.ref)
        mine.serve(model)
        return report.route

    assert ranks(2, first) == ["origin", "origin"]
    if why == "gone":
        serving[blind].close()

    def second(rank, group):
        options = {}
        if rank == blind and why == "no registry":
            options["registry"] = None
        if rank == blind and why == "unreachable":
            options["registry"] = f"redis://127.0.0.1:{free_port()}"
        mine = loader(group=group, **options)
        model = skeleton_of(mine, lambda: Block(8))
        report = mine.load(model, deployed.ref, deadline=TIME)
        assert_same(model.state_dict(), filled(Block(8)).state_dict())
        return report.route, report.seconds < TIME

    assert ranks(2, second) == [("origin", True)] * 2
