"""On one GPU: loads from storage, changed weights, and what a failed load leaves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_workers import REF, Fleet, Model
from warmcast.loader import Change, Loader, UsageError, cuda_checks, stream
from warmcast.loader.ahead import Ahead
from warmcast.loader.containers import flat_bytes, host_view
from warmcast.manifests.checksum import crc32c
from warmcast.manifests.errors import DeadlineExceeded, IntegrityError

pytestmark = pytest.mark.gpu(1)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ahead]]:
    """The checks that loads began while their bytes still came."""
    begun: list[Ahead] = []

    class Noted(Ahead):
        def __init__(self, tensors) -> None:
            super().__init__(tensors)
            begun.append(self)

    monkeypatch.setattr(stream, "Ahead", Noted)
    yield begun
    begun.clear()  # the class is garbage only some time later, and the tensors would be with it


def test_a_load_from_the_origin_is_right(origin: str) -> None:
    with Loader(origin) as loader:
        with loader.skeleton():
            here, there = Model(), Model()
        report = loader.load(here, REF, "cuda")
        loader.load(there, REF, "cpu")
        assert (report.route, report.verified) == ("origin", True)
        for (name, mine), theirs in zip(
            here.state_dict().items(), there.state_dict().values(), strict=True
        ):
            assert mine.is_cuda
            assert torch.equal(mine.cpu().view(torch.int16), theirs.view(torch.int16)), name


def test_most_is_checked_before_all_is_there(origin: str, ahead: list[Ahead]) -> None:
    with Loader(origin) as loader:
        for _ in range(2):  # the first may have to compile
            with loader.skeleton():
                model = Model()
            assert loader.load(model, REF, "cuda").verified
    found, tensors = ahead[-1].end(), ahead[-1]._tensors
    nbytes = [tensor.nbytes for tensor in tensors]
    assert 0.6 * sum(nbytes) < sum(nbytes[number] for number in found) < sum(nbytes)
    for number, crc in found.items():
        assert crc == crc32c(host_view(flat_bytes(tensors[number]).cpu())), number


def test_a_wrong_byte_among_the_first_is_found(
    origin: str, ahead: list[Ahead], tmp_path: Path
) -> None:
    """By the checks ahead; the load is then done again by chunks, which tell where it is."""
    wrong = tmp_path / "origin"
    shutil.copytree(origin.removeprefix("file://"), wrong)
    blob = max((p for p in wrong.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    blob.chmod(0o600)
    with blob.open("r+b") as file:
        place = 5 * file.seek(0, os.SEEK_END) // 100
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    assert cuda_checks.available(torch.device("cuda", 0))
    with Loader(f"file://{wrong}") as loader:
        with loader.skeleton():
            model = Model()
        with pytest.raises(IntegrityError, match=r"model\S* at byte \d+ .*twice"):
            loader.load(model, REF, "cuda")
        assert all(parameter.is_meta for parameter in model.parameters())
    assert ahead[0]._numbers


def test_weights_quantised_without_a_word_are_not_served(origin: str, valkey_url: str) -> None:
    with Loader(origin, valkey_url) as loader:
        with loader.skeleton():
            model = Model()
        loader.load(model, REF, "cuda")
        for layer in model.layers:
            layer.up.weight.data = layer.up.weight.data.to(torch.float8_e4m3fn)
        with pytest.raises(UsageError, match="change="):
            loader.serve(model)


def quantise(model: torch.nn.Module) -> None:
    for layer in model.layers:
        weight = layer.up.weight
        quantised = weight.detach().to(torch.float8_e4m3fn)
        layer.up.weight = torch.nn.Parameter(quantised, requires_grad=False)


def test_quantised_weights_are_true_to_what_was_published(origin: str, valkey_url: str) -> None:
    change = Change("fp8", "1", apply=quantise, prepare=quantise)
    with Loader(origin, valkey_url) as loader:
        with loader.skeleton():
            model = Model()
        loader.load(model, REF, "cuda", change=change)
        assert model.layers[3].up.weight.dtype == torch.float8_e4m3fn
        sender = loader.serve(model)
        assert sender is not None


def test_two_workers_on_one_gpu(fleet: Fleet) -> None:
    sender, receiver = fleet.start(0), fleet.start(0)
    for worker in (sender, receiver):
        worker.said("ready")
    sender.ask("load")
    assert sender.ask("serve")
    report = receiver.ask("load")
    assert (report["route"], report["transport"]) == ("peer", "ipc")
    assert receiver.ask("sum") == sender.ask("sum")


def test_a_failed_load_leaves_no_memory(origin: str) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with Loader(origin) as loader:
        with loader.skeleton():
            model = Model()
        with pytest.raises(DeadlineExceeded) as failure:
            loader.load(model, REF, "cuda", deadline=0.05)
        # The error, and with it the frames of its traceback, is still held.
        assert failure.value.__traceback__ is not None
        assert torch.cuda.memory_allocated() == before
        assert all(parameter.is_meta for parameter in model.parameters())
