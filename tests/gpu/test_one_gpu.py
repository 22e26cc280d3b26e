"""On one GPU: storage to device, and checks that find what is wrong there."""

from __future__ import annotations

import random

import pytest
import torch

from tests.gpu.gpu_workers import REF, Fleet, Model
from warmcast.loader import Change, Loader, UsageError, WeightVerificationError, cuda_checks
from warmcast.loader.verify import measure, verify
from warmcast.manifests.checksum import crc32c, crc32c_at, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded
from warmcast.manifests.sampling import sampled_hash_of

pytestmark = pytest.mark.gpu(1)


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


def test_measured_on_the_gpu_as_on_the_cpu() -> None:
    tensors = {
        "a": torch.randn(1000, 333).to(torch.bfloat16),
        "b": torch.randn(17_000_003),
        "c": torch.randn(4096).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(5),
        "columns": torch.randn(64, 65).t(),
    }
    dtypes = {"a": "BF16", "c": "F8_E4M3", "scalar": "I64"}
    rows = [(name, dtypes.get(name, "F32"), t.cuda()) for name, t in tensors.items()]
    for truth in measure(rows, Deadline.after(60)):
        tensor = tensors[truth.name].contiguous()
        data = bytes(tensor.view(-1).view(torch.uint8).tolist()) if tensor.numel() < 1e6 else None
        data = data if data is not None else tensor.numpy().tobytes()
        assert truth.crc32c == to_hex(crc32c(data))
        assert truth.sample == sampled_hash_of(truth.name, truth.dtype, data)


def test_crc32c_of_any_length_at_any_address() -> None:
    device = torch.device("cuda", 0)
    assert cuda_checks.available(device)
    generator = random.Random(11)
    memory = torch.randint(0, 256, (40_000_000,), dtype=torch.uint8, device=device)
    host = memory.cpu()
    edges = [0, 1, 15, 16, 17, 16383, 16384, 16385, 2**21 - 1, 2**21, 2**21 + 1, 5 * 2**21 + 7]
    lengths = edges + [generator.randrange(5_000_000) for _ in range(200)]
    begins = [generator.randrange(len(memory) - length - 16) & ~15 for length in lengths]
    begins[-50:] = [begin | generator.randrange(16) for begin in begins[-50:]]
    pieces = [memory[b : b + n] for b, n in zip(begins, lengths, strict=True)]
    found = cuda_checks.crc32cs(pieces)
    for begin, length, crc in zip(begins, lengths, found, strict=True):
        assert crc == crc32c_at(host.data_ptr() + begin, length), (begin, length)


def test_without_the_kernels_the_host_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("w", "BF16", torch.randn(5000, 777, device="cuda").to(torch.bfloat16))]
    fast = measure(rows, Deadline.after(60))
    monkeypatch.setattr(cuda_checks, "available", lambda _: False)
    assert measure(rows, Deadline.after(60)) == fast


def test_one_flipped_bit_in_any_tensor_is_found() -> None:
    generator = random.Random(3)
    tensors = [torch.randn(generator.randrange(1, 200_000), device="cuda") for _ in range(40)]
    names = [f"layers.{i}.weight" for i in range(len(tensors))]
    rows = [(name, "F32", tensor) for name, tensor in zip(names, tensors, strict=False)]
    truths = measure(rows, Deadline.after(60))
    for name, tensor, bit in zip(names, tensors, range(40), strict=False):
        bits = tensor.view(torch.int32)
        place = generator.randrange(len(bits))
        bits[place] ^= 1 << (bit % 31)
        with pytest.raises(WeightVerificationError, match=f"{name} has CRC32C"):
            verify(list(zip(truths, tensors, strict=False)), Deadline.after(60))
        bits[place] ^= 1 << (bit % 31)
    verify(list(zip(truths, tensors, strict=False)), Deadline.after(60))


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
