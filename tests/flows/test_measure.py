"""One pass over a file gives what hashing it in the plain way gives."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.flows.steps import measure as module
from warmcast.flows.steps.measure import Measuring, Progressed, measure
from warmcast.manifests import sha256
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.errors import InvalidData
from warmcast.manifests.sampling import sampled_hash_of


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@st.composite
def files(draw):
    """A file's bytes, and tensors that lie in it one behind the other."""
    position = draw(st.integers(0, 40))
    tensors = []
    for number in range(draw(st.integers(0, 6))):
        dtype, width = draw(st.sampled_from([("U8", 1), ("BF16", 2), ("F32", 4), ("I64", 8)]))
        numel = draw(st.integers(0, 300))
        tensors.append(Tensor(f"t{number}", dtype, (numel,), position, position + numel * width))
        position += numel * width
    seed = draw(st.integers(0, 1 << 30))
    data = hashlib.shake_128(seed.to_bytes(4, "big")).digest(position)
    return data, tensors


@settings(max_examples=100, deadline=None)
@given(files(), st.integers(16, 2000), st.integers(16, 2000))
def test_measure(file, chunk_size, buffer_size):
    data, tensors = file

    def read(offset, view):
        view[:] = data[offset : offset + len(view)]

    ticks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BUFFER", buffer_size)
        found = measure("x", len(data), list(reversed(tensors)), read, ticks.append, chunk_size)
    assert sum(ticks) == len(data)
    assert found.file.sha256 == hashlib.sha256(data).hexdigest()
    assert found.file.crc32c == to_hex(crc32c(data))
    chunks = [data[i : i + chunk_size] for i in range(0, len(data), chunk_size)]
    assert found.file.chunks == tuple(to_hex(crc32c(chunk)) for chunk in chunks)
    by_name = {entry.name: entry for entry in found.tensors}
    for tensor in tensors:
        raw = data[tensor.begin : tensor.end]
        entry = by_name[tensor.name]
        assert (entry.begin, entry.end, entry.file) == (tensor.begin, tensor.end, "x")
        assert entry.crc32c == to_hex(crc32c(raw))
        assert entry.sample == sampled_hash_of(tensor.name, tensor.dtype, raw)


@settings(max_examples=100, deadline=None)
@given(files(), st.integers(16, 2000), st.integers(1, 20), st.integers(0, 30))
def test_a_pass_that_is_put_down_and_taken_up(file, chunk_size, blocks, at):
    """Wherever it was put down, by whatever pieces it goes on, it ends as one pass does."""
    data, tensors = file
    view = memoryview(bytearray(data))
    step = 64 * blocks
    expected = measure(
        "x", len(data), tensors, lambda o, v: v.__setitem__(slice(None), view[o : o + len(v)]),
        lambda _: None, chunk_size,
    )  # fmt: skip
    first = Measuring("x", len(data), tensors, chunk_size)
    put_down = min(at * step, len(data) // step * step)
    feed(first, view[:put_down], step)
    record = first.progressed()
    kept = Progressed.model_validate_json(record.model_dump_json())
    second = Measuring("x", len(data), tensors, chunk_size)
    assert second.resume(kept)
    feed(second, view, step)
    assert second.measured() == expected


def feed(measuring, view, step):
    for start in range(measuring.nbytes, len(view), step):
        piece = view[start : start + step]
        measuring.take(piece, measuring.pieces(start, piece))


def test_a_pass_over_another_file_is_not_taken_up():
    data = memoryview(bytearray(640))
    tensors = [Tensor("a", "U8", (100,), 0, 100), Tensor("b", "U8", (100,), 100, 200)]
    first = Measuring("x", 640, tensors)
    feed(first, data, 64)
    record = first.progressed()
    for other in (Measuring("x", 100, tensors), Measuring("x", 640, tensors[:1])):
        with pytest.raises(InvalidData, match="journal"):
            other.resume(record)


def test_without_openssl_there_is_no_state(monkeypatch):
    data = memoryview(bytearray(range(256)))
    first = Measuring("x", 256, [])
    feed(first, data, 64)
    record = first.progressed()
    monkeypatch.setattr(sha256, "_functions", lambda: None)
    plain = Measuring("x", 256, [])
    assert not plain.resume(record)
    feed(plain, data, 64)
    assert plain.progressed() is None
    assert plain.measured() == first.measured()
