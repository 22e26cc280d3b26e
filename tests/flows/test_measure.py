"""One pass over a file gives what hashing it in the plain way gives."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.flows.steps import measure as module
from warmcast.flows.steps.measure import measure
from warmcast.manifests.checksum import crc32c, to_hex
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
