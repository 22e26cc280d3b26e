"""The checks on one GPU: what they find is what google-crc32c and the sampled hash's words say."""

from __future__ import annotations

import json
import random
from importlib.metadata import EntryPoint
from pathlib import Path

import google_crc32c
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.loader import WeightVerificationError, cuda_checks, cuda_kernels, kernel_cache
from warmcast.loader.verify import measure, verify
from warmcast.manifests.checksum import to_hex
from warmcast.manifests.command import GROUP, main
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.dtypes import BITS
from warmcast.manifests.sampling import element_nbytes, sampled_hash_of

pytestmark = pytest.mark.gpu(1)

SEGMENT = cuda_checks._SEGMENT
ROW = cuda_checks._ROW
LIMIT = Deadline.never()


@pytest.fixture(scope="module")
def memory() -> tuple[torch.Tensor, bytes]:
    """Random bytes on the GPU, and the same on the host."""
    device = torch.device("cuda", 0)
    assert cuda_checks.available(device)
    data = torch.randint(0, 256, (20 << 20,), dtype=torch.uint8, device=device)
    return data, data.cpu().numpy().tobytes()


def check(memory: tuple[torch.Tensor, bytes], pieces: list[tuple[int, int]]) -> None:
    """Check the CRC32C of pieces of the memory, each given by its beginning and its length."""
    data, host = memory
    found = cuda_checks.crc32cs([data[begin : begin + length] for begin, length in pieces])
    for (begin, length), crc in zip(pieces, found, strict=True):
        assert crc == google_crc32c.value(host[begin : begin + length]), (begin, length)


@pytest.mark.parametrize("edge", [0, 16, ROW, 5 * ROW, SEGMENT, 2 * SEGMENT, 5 * SEGMENT])
def test_crc32c_about_an_edge_at_any_address(memory, edge: int) -> None:
    around = range(max(0, edge - 17), edge + 18)
    check(memory, [(begin, length) for begin in range(16) for length in around])


@settings(deadline=None, max_examples=100)
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 16 << 20), st.integers(0, 100_000) | st.integers(0, 4 << 20)),
        min_size=1,
        max_size=30,
    )
)
def test_crc32c_of_any_piece(memory, pieces: list[tuple[int, int]]) -> None:
    check(memory, pieces)


@pytest.mark.parametrize("count", [255, 256, 257, 767, 768, 769, 5000])
def test_crc32c_of_many(memory, count: int) -> None:
    generator = random.Random(count)
    check(
        memory,
        [(generator.randrange(1 << 20), generator.randrange(3000)) for _ in range(count)],
    )


def test_crc32c_on_another_stream(memory) -> None:
    data, host = memory
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        copy = data[: 3 * SEGMENT].clone()
        assert cuda_checks.crc32cs([copy]) == [google_crc32c.value(host[: 3 * SEGMENT])]


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_sampled_hashes_of_every_dtype(memory, dtype: str) -> None:
    """Random bits: NaN, infinities and subnormals are among them."""
    data, host = memory
    width = element_nbytes(dtype)
    counts = [0, 1, 99, 100, 101, 199, 200, 201, 12_345, 1_000_003]
    pieces = [(64 * place, count * width) for place, count in enumerate(counts)]
    rows = [(f"layers.{n}.weight", dtype, data[b : b + n]) for b, n in pieces]
    for (begin, length), truth in zip(pieces, measure(rows, LIMIT), strict=True):
        content = host[begin : begin + length]
        assert truth.sample == sampled_hash_of(truth.name, dtype, content)
        assert truth.crc32c == to_hex(google_crc32c.value(content))
        assert truth.nbytes == length


def test_measured_on_the_gpu_as_on_the_cpu() -> None:
    tensors = {
        "a": ("BF16", torch.randn(1000, 333).to(torch.bfloat16)),
        "b": ("F32", torch.randn(1_700_003)),
        "c": ("F8_E4M3", torch.randn(4096).to(torch.float8_e4m3fn)),
        "empty": ("F32", torch.empty(0, 3)),
        "scalar": ("I64", torch.tensor(5)),
        "columns": ("F32", torch.randn(64, 65).t()),
        "parameter": ("F64", torch.nn.Parameter(torch.randn(300, dtype=torch.float64))),
    }
    here = [(name, dtype, tensor) for name, (dtype, tensor) in tensors.items()]
    there = [(name, dtype, tensor.cuda()) for name, dtype, tensor in here]
    expected = measure(here, LIMIT)
    assert measure(there, LIMIT) == expected
    mixed = [pair[place % 2] for place, pair in enumerate(zip(here, there, strict=True))]
    assert measure(mixed, LIMIT) == expected


def test_without_the_kernels_the_host_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ("w", "BF16", torch.randn(5000, 7777, device="cuda").to(torch.bfloat16)),
        ("v", "F32", torch.randn(3, device="cuda")),
        ("empty", "F32", torch.empty(0, device="cuda")),
    ]
    fast = measure(rows, LIMIT)
    monkeypatch.setattr(cuda_checks, "available", lambda _: False)
    assert measure(rows, LIMIT) == fast


def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    cuda_checks._compiled.clear()
    constants = cuda_checks._constants()
    monkeypatch.setattr(cuda_checks, "_constants", lambda: [constants[0], *constants[:-1]])
    try:
        assert not cuda_checks.available(torch.device("cuda", 0))
    finally:
        cuda_checks._compiled.clear()
    assert "expected CRC32C" in caplog.text


def test_one_flipped_bit_in_any_tensor_is_found() -> None:
    generator = random.Random(3)
    tensors = [torch.randn(generator.randrange(1, 200_000), device="cuda") for _ in range(40)]
    names = [f"layers.{i}.weight" for i in range(len(tensors))]
    rows = [(name, "F32", tensor) for name, tensor in zip(names, tensors, strict=True)]
    pairs = list(zip(measure(rows, LIMIT), tensors, strict=True))
    for name, tensor, bit in zip(names, tensors, range(40), strict=True):
        bits = tensor.view(torch.int32)
        place = generator.randrange(len(bits))
        bits[place] ^= 1 << (bit % 31)
        with pytest.raises(WeightVerificationError, match=f"{name} has CRC32C"):
            verify(pairs, LIMIT)
        bits[place] ^= 1 << (bit % 31)
    assert verify(pairs, LIMIT).tensors == 40


def test_one_flipped_bit_anywhere_in_a_tensor_is_found() -> None:
    generator = random.Random(5)
    tensor = torch.randint(0, 256, (3 * SEGMENT + 5 * ROW + 77,), dtype=torch.uint8, device="cuda")
    pairs = [(measure([("w", "U8", tensor)], LIMIT)[0], tensor)]
    ends = [0, 15, 16, ROW - 1, ROW, SEGMENT - 1, SEGMENT, 3 * SEGMENT, len(tensor) - 1]
    for place in [*ends, *(generator.randrange(len(tensor)) for _ in range(100))]:
        tensor[place] ^= 1 << (place % 8)
        with pytest.raises(WeightVerificationError, match="w has CRC32C"):
            verify(pairs, LIMIT)
        tensor[place] ^= 1 << (place % 8)
    verify(pairs, LIMIT)


def bench(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(
            ["bench", "verify", *words],
            [EntryPoint("bench", "warmcast.infra.bench.cli:bench", GROUP)],
        )
    return end.value.code


def test_the_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    assert bench("--gb", "0.3", "--device", "cuda:0", "--json", str(file)) == 0
    result = json.loads(file.read_text())
    assert result["machine"]["device"].startswith("cuda:0")
    assert result["limits"]["memory_read_by"]
    assert len(result["cases"]) == 5


def test_the_benchmark_of_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    right = cuda_checks.crc32cs
    monkeypatch.setattr(cuda_checks, "crc32cs", lambda data: [crc ^ 1 for crc in right(data)])
    assert bench("--gb", "0.01", "--json", str(tmp_path / "x.json")) == 1
    assert "CRC32C of tensor 99 of 100: expected" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_kernels_are_kept_for_the_next_process(tmp_path, monkeypatch):
    """And compiled anew where what was kept is damaged, or none for this driver."""
    monkeypatch.setenv("WARMCAST_KERNELS", str(tmp_path))
    device = torch.device("cuda", 0)
    times = []
    compiler = cuda_kernels._cubin
    monkeypatch.setattr(
        cuda_kernels, "_cubin", lambda *given: times.append(given) or compiler(*given)
    )
    for expected in (1, 1):
        cuda_checks._compile(device)  # which tries what it has
        assert len(times) == expected
    [file] = tmp_path.iterdir()
    source, options = times[0]
    image = kernel_cache.kept(source, *options, torch.version.cuda)
    file.write_bytes(file.read_bytes()[:-1])
    cuda_checks._compile(device)
    assert len(times) == 2
    assert kernel_cache.kept(source, *options, torch.version.cuda) == image
    kernel_cache.keep(b"none of this driver's", source, *options, torch.version.cuda)
    cuda_checks._compile(device)
    assert len(times) == 3
    assert kernel_cache.kept(source, *options, torch.version.cuda) == image
