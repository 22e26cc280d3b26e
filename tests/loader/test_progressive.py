"""A model that runs while its weights arrive: each tensor is waited for, and the verdict is."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import nn

from tests.loader.models import assert_same, filled
from warmcast.flows.steps import measure
from warmcast.loader import Change, WeightVerificationError, stream
from warmcast.loader.progressive import Gate
from warmcast.loader.verify import verify
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, UsageError, WarmcastError
from warmcast.manifests.manifest import build_manifest
from warmcast.manifests.stores.file_reader import FileReader


class Deep(nn.Module):
    """Layers that run in another order than that of their names, one of them by its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.last = nn.Linear(64, 64)
        self.attention = nn.MultiheadAttention(64, 4)
        self.register_buffer("scale", torch.randn(64))
        self.used = nn.Module()
        self.used.weight = nn.Parameter(torch.empty(64, 64))
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        x = x + self.attention(x, x, x)[0]
        return self.last(nn.functional.linear(x, self.used.weight))


@pytest.fixture
def slow(monkeypatch):
    """Reads wait for their turn: ``slow(n)`` lets the next ``n`` reads through."""
    turns = threading.Semaphore(0)
    read = FileReader.read_into

    def waiting(self, *args):
        assert turns.acquire(timeout=30)
        read(self, *args)

    monkeypatch.setattr(FileReader, "read_into", waiting)
    monkeypatch.setattr(stream, "_threads", lambda: 1)
    return lambda count: [turns.release() for _ in range(count)]


@pytest.fixture
def deployed(publish, monkeypatch):
    """Chunks are so small that a tensor or two are in each."""
    monkeypatch.setattr(measure.measure, "__defaults__", (4096,))
    monkeypatch.setitem(build_manifest.__kwdefaults__, "chunk_size", 4096)
    return publish(filled(Deep(), 1).state_dict())


def skeleton(loader):
    with loader.skeleton():
        return Deep()


def right():
    return filled(Deep(), 1)


def run_beside(model, x):
    """The forward, in a thread; its output or error comes into the list."""
    out: list[object] = []

    def forward() -> None:
        try:
            out.append(model(x))
        except WarmcastError as cause:
            out.append(cause)

    thread = threading.Thread(target=forward)
    thread.start()
    return thread, out


def test_it_computes_what_the_weights_say(loader, deployed):
    mine = loader()
    model = skeleton(mine)
    report = mine.load(model, deployed.ref, progressive=True)
    x = torch.randn(8, 64)
    assert torch.equal(model(x), right()(x))
    assert (report.route, report.verified) == ("origin", False)
    assert mine.finish(model).verified
    assert_same(model.state_dict(), right().state_dict())
    assert mine.serve(model) is not None


def test_nothing_runs_on_weights_that_are_not_there(loader, deployed, slow):
    mine = loader()
    model = skeleton(mine)
    slow(16)
    mine.load(model, deployed.ref, progressive=True)
    x = torch.randn(8, 64)
    thread, out = run_beside(model, x)
    for _ in range(40):
        came = list(out)
        if mine._loaded[model][0].background._verified:
            break
        assert not came
        slow(1)
    slow(100)
    thread.join(30)
    assert torch.equal(out[0], right()(x))


def test_when_all_is_there_it_costs_nothing(loader, deployed):
    mine = loader()
    model = skeleton(mine)
    mine.load(model, deployed.ref, progressive=True)
    mine.finish(model)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert not parameter.__dict__
    assert all(type(buffer) is torch.Tensor for buffer in model.buffers())
    threads = [t.name for t in threading.enumerate()]
    assert "warmcast-progressive" not in threads


def test_a_wrong_byte_lets_no_output_out(loader, deployed, monkeypatch):
    mine = loader()
    model = skeleton(mine)
    loaded = threading.Event()

    def wrong(pairs, deadline):
        assert loaded.wait(30)
        raise WeightVerificationError("first.weight has CRC32C 00000000, not 11111111")

    monkeypatch.setattr("warmcast.loader.background.verify", wrong)
    report = mine.load(model, deployed.ref, progressive=True)
    assert not report.verified
    loaded.set()
    with pytest.raises(WeightVerificationError, match=r"first\.weight"):
        model(torch.randn(8, 64))
    with pytest.raises(WeightVerificationError):
        mine.finish(model)
    with pytest.raises(WeightVerificationError):
        mine.serve(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    monkeypatch.undo()
    mine.load(model, deployed.ref)
    assert_same(model.state_dict(), right().state_dict())


def test_a_damaged_blob(loader, deployed):
    content = bytearray(deployed.blob.read_bytes())
    content[-100] ^= 1
    deployed.blob.chmod(0o600)
    deployed.blob.write_bytes(content)
    mine = loader()
    model = skeleton(mine)
    with pytest.raises(IntegrityError, match="at byte"):
        mine.load(model, deployed.ref, progressive=True)
        model(torch.randn(8, 64))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_closing_ends_what_still_goes_on(loader, deployed, slow):
    mine = loader()
    model = skeleton(mine)
    slow(16)
    mine.load(model, deployed.ref, progressive=True)
    weight = weakref.ref(model.last.weight)
    thread, out = run_beside(model, torch.randn(8, 64))
    closing = threading.Thread(target=mine.close)
    background = mine._loaded[model][0].background
    closing.start()
    assert background._stop.wait(30)
    slow(100)
    closing.join(30)
    thread.join(30)
    assert isinstance(out[0], WarmcastError)
    assert not [t for t in threading.enumerate() if t.name.startswith("warmcast-")]
    out.clear()
    assert weight() is None


def test_the_next_load_comes_in_the_order_it_ran(loader, deployed, monkeypatch):
    mine = loader()
    model = skeleton(mine)
    last = threading.Event()
    model.last.register_forward_hook(lambda *_: last.set())

    def later(pairs, deadline):  # as it is with models whose bytes take longer than their layers
        assert last.wait(30)
        return verify(pairs, deadline)

    monkeypatch.setattr("warmcast.loader.background.verify", later)
    mine.load(model, deployed.ref, progressive=True)
    model(torch.randn(8, 64))
    mine.finish(model)
    order = mine._origin.record("orders", deployed.manifest.model_key, Deadline.after(30))
    order = order["tensors"]
    assert order.index("used.weight") < order.index("last.weight")
    assert set(order) == {tensor.name for tensor in deployed.manifest.tensors}
    came = []
    arrive = Gate.arrive
    monkeypatch.setattr(Gate, "arrive", lambda self, n: (came.append(n), arrive(self, n)))
    monkeypatch.setattr("warmcast.loader.background.verify", verify)
    monkeypatch.setattr(stream, "_threads", lambda: 1)
    again = loader()
    second = skeleton(again)
    again.load(second, deployed.ref, progressive=True)
    again.finish(second)
    names = [tensor.name for tensor in deployed.manifest.tensors]
    assert came.index(names.index("used.weight")) < came.index(names.index("last.weight"))


def test_from_a_peer_it_is_as_any_load(loader, deployed):
    first, second = loader(), loader()
    sender, receiver = skeleton(first), skeleton(second)
    first.load(sender, deployed.ref)
    first.serve(sender)
    report = second.load(receiver, deployed.ref, progressive=True)
    assert (report.route, report.verified) == ("peer", True)


def test_what_it_cannot_do(loader, deployed):
    mine = loader()
    with pytest.raises(UsageError, match="progressive"):
        mine.load(
            skeleton(mine),
            deployed.ref,
            progressive=True,
            change=Change("x", "1", apply=lambda model: None),
        )
