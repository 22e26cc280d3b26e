"""Loading, end to end: from the origin and from a peer, the bytes that were deployed."""

from __future__ import annotations

import gc
import json
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.loader.models import (
    Bag,
    Block,
    Encoder,
    assert_same,
    bits,
    filled,
    resident,
    snapshot,
)
from warmcast.loader import stream
from warmcast.loader.dtypes import torch_dtype
from warmcast.loader.errors import SkeletonMismatch, WeightVerificationError
from warmcast.manifests import dtypes
from warmcast.manifests.canonical import canonical_json
from warmcast.manifests.errors import DeadlineExceeded, IntegrityError, NotFound, UsageError
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import parse_manifest
from warmcast.manifests.origin import Origin
from warmcast.manifests.stores.file_reader import FileReader


def skeleton_of(loader, build):
    with loader.skeleton():
        return build()


class Raw(nn.Module):
    """One weight, built without a skeleton's help."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))


class Heavy(nn.Parameter):
    """What engines do: a parameter of their own class, with attributes."""


class Engine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.empty(4, 4), requires_grad=False)
        self.trained = nn.Parameter(torch.empty(4, 4))
        self.special = Heavy(torch.empty(4, 4))
        self.special.weight_loader = "row parallel"
        self.frozen.tag = 7


class Conv(nn.Module):
    """Weights whose memory is not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.empty(6, 4).t())


class Pair(nn.Module):
    """Two parameters that know nothing of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(8, 4))
        self.b = nn.Parameter(torch.empty(8, 4))


class Pipeline(nn.Module):
    """Two parts, of which a worker may want one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(depth=1)
        self.decoder = Block(8)


# The whole way


@pytest.mark.parametrize("serving_arena", [True, False])
def test_origin_then_peer(publish, loader, serving_arena):
    deployed = publish(filled(Encoder()).state_dict())
    expected = load_file(deployed.source / "model.safetensors")
    expected["head.weight"] = expected["embed.weight"]
    first = loader()
    model = skeleton_of(first, Encoder)
    assert all(parameter.is_meta for parameter in model.parameters())
    report = first.load(model, deployed.ref, arena=serving_arena)
    assert (report.route, report.transport, report.verified) == ("origin", None, True)
    assert report.manifest == deployed.manifest.digest
    assert report.bytes == sum(tensor.nbytes for tensor in deployed.manifest.tensors)
    assert report.tensors == len(deployed.manifest.tensors)
    assert_same(model.state_dict(), expected)
    sender = first.serve(model)
    for arena in (True, False):
        second = loader()
        other = skeleton_of(second, Encoder)
        report = second.load(other, deployed.ref, arena=arena)
        assert (report.route, report.transport, report.verified) == ("peer", "gloo", True)
        assert report.source == sender.name
        assert_same(other.state_dict(), expected)
        tokens = torch.arange(5)
        assert torch.equal(other(tokens), model(tokens))
    first.close()  # ends when the transfers' threads have
    assert sender.served == 2


def test_peer_in_another_process(publish, loader, worker):
    deployed = publish(filled(Encoder(), 3).state_dict())
    mine = loader()
    model = skeleton_of(mine, Encoder)
    mine.load(model, deployed.ref)
    mine.serve(model)
    told = worker("Encoder", deployed.ref).told()
    assert told["report"]["route"] == "peer"
    assert told["state"] == {n: bits(t)[2].hex() for n, t in model.state_dict().items()}


def test_a_worker_that_received_serves(publish, loader):
    deployed = publish(filled(Encoder()).state_dict())
    first, second, third = loader(), loader(), loader()
    models = [skeleton_of(each, Encoder) for each in (first, second, third)]
    first.load(models[0], deployed.ref)
    first.serve(models[0])
    second.load(models[1], deployed.ref)
    sender = second.serve(models[1])
    first.close()
    report = third.load(models[2], deployed.ref)
    assert (report.route, report.source) == ("peer", sender.name)
    assert_same(models[2].state_dict(), models[0].state_dict())


def test_without_a_registry(publish, loader):
    deployed = publish(filled(Encoder()).state_dict())
    mine = loader(None)
    model = skeleton_of(mine, Encoder)
    assert mine.load(model, deployed.manifest.digest).route == "origin"
    assert mine.serve(model) is None


def test_several_models_and_loads_in_one_process(publish, loader):
    one = publish(filled(Encoder(), 1).state_dict(), ref="one@test")
    two = publish(filled(Block(8), 2).state_dict(), ref="two@test")
    mine, other = loader(), loader()
    encoder, block = skeleton_of(mine, Encoder), skeleton_of(mine, lambda: Block(8))
    mine.load(encoder, one.ref)
    mine.load(block, two.ref)
    mine.serve(encoder)
    mine.serve(block)
    again = skeleton_of(other, Encoder)
    assert other.load(again, one.ref).route == "peer"
    assert other.load(skeleton_of(other, lambda: Block(8)), two.ref).route == "peer"
    assert_same(again.state_dict(), encoder.state_dict())


def test_a_second_load_into_one_model(publish, loader):
    old = publish(filled(Encoder(), 1).state_dict(), ref="model@old")
    new = publish(filled(Encoder(), 2).state_dict(), ref="model@new")
    mine = loader()
    model = skeleton_of(mine, Encoder)
    for deployed, seed in ((old, 1), (new, 2), (old, 1)):
        mine.load(model, deployed.ref)
        assert_same(model.state_dict(), filled(Encoder(), seed).state_dict())


@pytest.mark.parametrize("route", ["origin", "peer"])
def test_what_a_load_replaces_is_free_at_once(publish, loader, route):
    """Not when Python's collector next runs: on a GPU the next load would find no room."""
    deployed = publish(filled(Encoder(), 1).state_dict())
    if route == "peer":
        first = loader()
        sender = skeleton_of(first, Encoder)
        first.load(sender, deployed.ref)
        first.serve(sender)
    second = loader()
    model = skeleton_of(second, Encoder)
    gc.collect()
    gc.disable()
    try:
        second.load(model, deployed.ref)
        memory = [weakref.ref(parameter) for parameter in model.parameters()]
        assert second.load(model, deployed.ref).route == route
        assert not [ref for ref in memory if ref() is not None]
    finally:
        gc.enable()


def test_serving_goes_on_with_what_was_loaded_first(publish, loader):
    """The sender of an older load gives the bytes of that load, whatever the model holds now."""
    old = publish(filled(Encoder(), 1).state_dict(), ref="model@old")
    new = publish(filled(Encoder(), 2).state_dict(), ref="model@new")
    mine, other = loader(), loader()
    model = skeleton_of(mine, Encoder)
    mine.load(model, old.ref)
    mine.serve(model)
    mine.load(model, new.ref)
    receiver = skeleton_of(other, Encoder)
    assert other.load(receiver, old.ref).route == "peer"
    assert_same(receiver.state_dict(), filled(Encoder(), 1).state_dict())


# What models are made of


def every_dtype() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    state = {}
    for name in dtypes.BITS:
        dtype = torch_dtype(name)
        if dtype is None:
            continue
        raw = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=generator)
        if dtype == torch.bool:
            raw %= 2
        state[f"of_{name}"] = raw.view(dtype)
    return state | {
        "scalar": torch.tensor(3.5),
        "scalar_int": torch.tensor(-7),
        "empty": torch.empty(0, 4),
        "nothing": torch.empty(3, 0, dtype=torch.bfloat16),
        "one_byte": torch.tensor([True]),
    }


def test_every_dtype_and_shape(publish, loader):
    state = every_dtype()
    assert len(state) > 15
    deployed = publish(state, pickle=True)
    first, second = loader(), loader()
    for mine, route in ((first, "origin"), (second, "peer")):
        model = skeleton_of(mine, lambda: Bag(state))
        assert mine.load(model, deployed.ref).route == route
        assert_same(model.state_dict(), state)
        mine.serve(model)


def test_tie_in_the_skeleton(publish, loader):
    deployed = publish(filled(Encoder()).state_dict())
    assert not deployed.manifest.tied
    assert "head.weight" not in deployed.manifest.tensor
    mine = loader()
    model = skeleton_of(mine, Encoder)
    mine.load(model, deployed.ref)
    assert model.head.weight is model.embed.weight


def test_tie_that_only_the_manifest_knows(publish, loader):
    weight = torch.randn(8, 4)
    deployed = publish({"a": weight, "b": weight}, pickle=True)
    assert len(deployed.manifest.tensors) == len(deployed.manifest.tied) == 1
    first, second = loader(), loader()
    for mine, route in ((first, "origin"), (second, "peer")):
        model = skeleton_of(mine, Pair)
        assert mine.load(model, deployed.ref).route == route
        assert_same(model.state_dict(), {"a": weight, "b": weight})
        assert model.a.data_ptr() == model.b.data_ptr()
        mine.serve(model)


def test_tie_in_the_skeleton_of_two_equal_tensors(publish, loader):
    """A checkpoint that stores a tied weight twice, alike, fits a model that ties it."""
    weight = torch.randn(8, 4)
    deployed = publish({"a": weight, "b": weight.clone()})
    assert len(deployed.manifest.tensors) == 2

    def tied():
        model = Pair()
        model.b = model.a
        return model

    mine = loader()
    model = skeleton_of(mine, tied)
    mine.load(model, deployed.ref)
    assert model.a is model.b
    assert torch.equal(model.a, weight)


def test_tie_in_the_skeleton_of_two_different_tensors_is_refused(publish, loader):
    deployed = publish({"a": torch.randn(8, 4), "b": torch.randn(8, 4)})

    def tied():
        model = Pair()
        model.b = model.a
        return model

    mine = loader()
    model = skeleton_of(mine, tied)
    with pytest.raises(SkeletonMismatch, match="one tensor in the model but two in the manifest"):
        mine.load(model, deployed.ref)


def test_overlapping_views(publish, loader):
    line, fused = torch.arange(10.0), torch.randn(12, 4)
    state = {
        "left": line[:6],
        "right": line[4:],
        "qkv": fused,
        "k": fused[4:8],
        "column": fused[:, 1],
        "turned": fused.t(),
    }
    deployed = publish(state, pickle=True)
    assert len(deployed.manifest.tensors) == 2
    first, second = loader(), loader()
    for mine, route in ((first, "origin"), (second, "peer")):
        model = skeleton_of(mine, lambda: Bag(state))
        assert mine.load(model, deployed.ref).route == route
        assert_same(model.state_dict(), state)
        mine.serve(model)
    model.qkv.zero_()
    model.left.fill_(-1)
    assert not model.k.any()
    assert not model.column.any()
    assert not model.turned.any()
    assert model.right.tolist() == [-1, -1, 6, 7, 8, 9]


def test_containers_that_are_not_row_major(publish, loader):
    source = filled(Conv())
    deployed = publish(source.state_dict())
    first, second = loader(), loader()
    for mine, route in ((first, "origin"), (second, "peer")):
        model = skeleton_of(mine, Conv)
        strides = {name: tensor.stride() for name, tensor in model.state_dict().items()}
        assert not model.conv.weight.is_contiguous()
        assert mine.load(model, deployed.ref, arena=route == "origin").route == route
        assert_same(model.state_dict(), source.state_dict())
        assert {name: t.stride() for name, t in model.state_dict().items()} == strides
        mine.serve(model)


def test_row_major_and_channels_last_do_not_meet(publish, loader):
    deployed = publish(filled(nn.Conv2d(3, 8, 3)).state_dict())
    first, second = loader(), loader()
    model = skeleton_of(first, lambda: nn.Conv2d(3, 8, 3))
    first.load(model, deployed.ref)
    first.serve(model)
    other = skeleton_of(second, lambda: nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last))
    assert second.load(other, deployed.ref).route == "origin"
    assert_same(other.state_dict(), model.state_dict())


def test_buffers(publish, loader):
    """Saved buffers are loaded; those that are computed keep what the constructor computed."""
    source = filled(Block(8))
    deployed = publish(source.state_dict())
    mine = loader()
    model = skeleton_of(mine, lambda: Block(8))
    mine.load(model, deployed.ref)
    assert model.positions.tolist() == list(range(8))
    assert_same(model.state_dict(), source.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(model(x), source(x))


def test_a_computed_buffer_that_an_older_checkpoint_saved(publish, loader):
    source = filled(Block(8))
    deployed = publish(source.state_dict() | {"positions": torch.zeros(8, dtype=torch.int64)})
    mine = loader()
    model = skeleton_of(mine, lambda: Block(8))
    assert mine.load(model, deployed.ref).skipped == ("positions",)
    assert model.positions.tolist() == list(range(8))


def test_a_submodule(publish, loader):
    """The worker of one part takes that part, under its names in the whole."""
    source = filled(Pipeline())
    deployed = publish(source.state_dict())
    first, second = loader(), loader()
    for mine, route in ((first, "origin"), (second, "peer")):
        model = skeleton_of(mine, Pipeline)
        report = mine.load(model, deployed.ref, modules=["encoder"])
        assert report.route == route
        assert report.tensors == len(source.encoder.state_dict()) - 1
        assert_same(model.encoder.state_dict(), source.encoder.state_dict())
        assert all(parameter.is_meta for parameter in model.decoder.parameters())
        mine.serve(model)
    # The rest comes with a second load, and both parts are served side by side.
    report = second.load(model, deployed.ref, modules=["decoder"])
    assert report.route == "origin"
    assert_same(model.state_dict(), source.state_dict())


@pytest.mark.parametrize("modules", [["encoders"], ["encoder", "encoder.layers"]])
def test_modules_that_make_no_sense(publish, loader, modules):
    deployed = publish(filled(Pipeline()).state_dict())
    mine = loader()
    with pytest.raises(UsageError, match="modules"):
        mine.load(skeleton_of(mine, Pipeline), deployed.ref, modules=modules)


def test_a_model_that_was_built_without_a_skeleton(publish, loader):
    source = filled(Encoder(), 5)
    deployed = publish(source.state_dict())
    first, second = loader(), loader()
    for mine, route in ((first, "origin"), (second, "peer")):
        model = Encoder()
        assert mine.load(model, deployed.ref).route == route
        assert_same(model.state_dict(), source.state_dict())
        mine.serve(model)


def test_parameters_keep_their_class_flags_and_attributes(publish, loader):
    source = filled(Engine())
    deployed = publish(source.state_dict())
    mine = loader()
    model = skeleton_of(mine, Engine)
    mine.load(model, deployed.ref)
    assert_same(model.state_dict(), source.state_dict())
    assert type(model.special) is Heavy
    assert model.special.weight_loader == "row parallel"
    assert model.frozen.tag == 7
    assert not model.frozen.requires_grad
    assert model.trained.requires_grad
    assert dict(model.named_parameters()).keys() == {"frozen", "trained", "special"}
    model.trained.sum().backward()
    assert model.trained.grad is not None


# Loads that fail, and leave the model as it was


def test_a_damaged_blob(publish, loader):
    deployed = publish(filled(Raw()).state_dict())
    data = bytearray(deployed.blob.read_bytes())
    data[-1] ^= 1
    deployed.blob.chmod(0o644)
    deployed.blob.write_bytes(data)
    mine = loader()
    model = Raw()
    unchanged = snapshot(model)
    with pytest.raises(IntegrityError, match=r"model\.safetensors at byte 0"):
        mine.load(model, deployed.ref)
    unchanged()
    # The lease was given back with the failure: nobody waits for this worker.
    other = loader()
    with pytest.raises(IntegrityError) as caught:
        other.load(Raw(), deployed.ref)
    assert "nobody else is loading it" in "".join(caught.value.__notes__)


def test_an_error_that_is_kept_keeps_no_memory(publish, loader, monkeypatch):
    """Neither the frames of its traceback, which hold views of what was being filled, nor what was
    still to be read.
    """
    deployed = publish({"weight": torch.ones(128 << 20, dtype=torch.uint8)})
    with deployed.blob.open("r+b") as blob:
        deployed.blob.chmod(0o644)
        blob.seek(1 << 20)
        blob.write(b"\2")
    read = FileReader.read_into
    others, much, again = [], threading.Event(), threading.Event()

    def in_turn(self, offset, buffer, deadline):
        """The wrong chunk after some others, and before the rest."""
        if offset == 0:
            if much.is_set():
                again.set()
            assert much.wait(30)
        elif offset >= 16 << 20 and much.is_set():
            assert again.wait(30)
        read(self, offset, buffer, deadline)
        if offset >= 16 << 20:
            others.append(len(buffer))
            if sum(others) > 40 << 20:
                much.set()

    monkeypatch.setattr(FileReader, "read_into", in_turn)
    monkeypatch.setattr(stream, "_threads", lambda: 2)
    mine = loader()
    model = skeleton_of(mine, lambda: Bag({"weight": torch.empty(0)}))
    model.weight = torch.empty(128 << 20, dtype=torch.uint8, device="meta")
    before = resident("VmRSS")
    gc.disable()
    try:
        with pytest.raises(IntegrityError) as caught:
            mine.load(model, deployed.ref)
        assert resident("VmRSS") - before < 24 << 20  # a slot of 4 MiB, and what threads leave
    finally:
        gc.enable()
    assert caught.value.__traceback__ is not None


def test_a_truth_that_does_not_hold(publish, loader, file_url, deadline):
    """Chunks that agree with the file do not help if the tensor is not the one measured."""
    deployed = publish(filled(Raw()).state_dict())
    record = json.loads(deployed.manifest.data)
    record["tensors"][0]["crc32c"] = "00000000"
    wrong = parse_manifest(canonical_json(record))
    with Origin.open(file_url) as origin:
        origin.put_manifest(wrong, deadline)
    mine = loader()
    model = Raw()
    unchanged = snapshot(model)
    with pytest.raises(WeightVerificationError, match=r"weight has CRC32C \w+, not 00000000"):
        mine.load(model, wrong.digest)
    unchanged()


def test_a_ref_that_is_not_there(publish, loader):
    publish(filled(Raw()).state_dict())
    mine = loader()
    model = Raw()
    unchanged = snapshot(model)
    with pytest.raises(NotFound, match="model@test"):
        mine.load(model, "model@tset")
    unchanged()


def test_a_deadline_that_is_over(publish, loader):
    deployed = publish(filled(Raw()).state_dict())
    mine = loader()
    model = Raw()
    unchanged = snapshot(model)
    with pytest.raises(DeadlineExceeded):
        mine.load(model, deployed.ref, deadline=0)
    unchanged()
    assert mine.load(model, deployed.ref).verified


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:banana", "meta"])
def test_a_device_that_makes_no_sense(publish, loader, device):
    deployed = publish(filled(Raw()).state_dict())
    with pytest.raises(UsageError, match="device"):
        loader().load(Raw(), deployed.ref, device=device)


def test_a_mesh_of_another_size_than_the_group(publish, loader):
    deployed = publish(filled(Raw()).state_dict())
    with pytest.raises(UsageError, match="1 ranks"):
        loader().load(Raw(), deployed.ref, mesh=Mesh.grid({"tp": 2}))


# Serving


def test_serving_a_model_that_was_not_loaded(loader):
    with pytest.raises(UsageError, match="a model that this loader has loaded"):
        loader().serve(Raw())


@pytest.mark.parametrize("how", ["written", "replaced", "cast"])
def test_weights_that_were_changed_since_are_not_served(publish, loader, how):
    deployed = publish(filled(Raw()).state_dict())
    mine = loader()
    model = Raw()
    mine.load(model, deployed.ref)
    if how == "written":
        with torch.no_grad():
            model.weight[0] = 1
    elif how == "replaced":
        model.weight = nn.Parameter(model.weight.detach().clone())
    else:
        model.half()
    with pytest.raises(UsageError, match="replaced or written since"):
        mine.serve(model)


# The report


def test_report(publish, loader):
    deployed = publish(filled(Encoder()).state_dict())
    mine = loader()
    report = mine.load(skeleton_of(mine, Encoder), deployed.ref)
    assert [stage.name for stage in report.stages] == [
        "ref", "skeleton", "identity", "registry", "peer", "next",
        "allocate", "read", "verify", "ready",
    ]  # fmt: skip
    outcome = {stage.name: stage.outcome for stage in report.stages}
    assert outcome.pop("peer") == "no"
    assert set(outcome.values()) == {"yes"}
    text = str(report).splitlines()
    assert text[0].startswith(f"model@test ({deployed.manifest.digest[:12]}) by origin from file:")
    assert "every byte checked" in text[0]
    assert len(text) == 1 + len(report.stages)
    assert text[5].startswith("├─ peer      no")
    assert "no sender" in text[5]
    assert text[-1].startswith("└─ ready")
    value = json.loads(json.dumps(report.to_json()))
    assert value["route"] == "origin"
    assert value["stages"][0]["name"] == "ref"
    assert value["bytes"] == report.bytes
