"""Storage to device: whatever is cut out of a file, along any axis, by chunks of any size."""

from __future__ import annotations

import ctypes
import io
import math
import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loader.models import Bag, bits, resident
from tests.manifests.builders import CREATED_AT, file_entry, safetensors_file, tensor_entries
from warmcast.flows.steps.layouts import layout_for
from warmcast.loader import stream as streaming
from warmcast.loader.chunks import Incoming, chunks_of, joined
from warmcast.loader.containers import collect
from warmcast.loader.dtypes import torch_dtype
from warmcast.loader.plan import Targets, make_plan
from warmcast.loader.staging import Staging
from warmcast.loader.stream import stream
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, StoreError
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import Manifest, build_manifest
from warmcast.manifests.origin import Origin, blob_key
from warmcast.manifests.sampling import element_nbytes

NEVER = Deadline.never()
DTYPES = ("U8", "BOOL", "F8_E4M3", "BF16", "F16", "F32", "I64", "C64")


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    with Origin.open((tmp_path_factory.mktemp("origin") / "store").as_uri()) as opened:
        yield opened


def put(
    origin: Origin, tensors: dict[str, tuple[str, tuple[int, ...], bytes]], chunk: int, mesh: Mesh
) -> Manifest:
    """A manifest of one file in the origin, with chunks of this size and this mesh's layout."""
    data = safetensors_file(tensors)
    file = file_entry("model.safetensors", data, chunk)
    origin.put_blob(file.sha256, io.BytesIO(data), file.size, int(file.crc32c, 16), NEVER)
    entries = tensor_entries("model.safetensors", data)
    layouts = []
    if mesh.plan:
        layouts = [layout_for(entries, (), mesh, lambda t: memoryview(data)[t.begin : t.end])]
    return build_manifest(
        model="m", revision="r", upstream="u", created_at=CREATED_AT, chunk_size=chunk,
        files=[file], tensors=entries, config={}, layouts=layouts,
    )  # fmt: skip


@st.composite
def cuts(draw):
    """A dtype, a shape, an axis of it, and a number of equal parts along that axis."""
    dtype = draw(st.sampled_from(DTYPES))
    dims = draw(st.integers(1, 4))
    axis = draw(st.integers(0, dims - 1))
    parts = draw(st.sampled_from([1, 2, 3, 4]))
    room = draw(st.sampled_from([40, 3_000, 30_000])) // element_nbytes(dtype) // parts
    shape = []
    for dimension in range(dims):
        length = draw(st.integers(0 if room < 40 else 1, max(1, min(room, 700))))
        room = max(1, room // max(length, 1))
        shape.append(length * parts if dimension == axis else length)
    return dtype, tuple(shape), axis, parts


@settings(deadline=None, max_examples=150)
@given(
    cut=cuts(),
    chunk=st.integers(4096, 12_000),
    before=st.integers(0, 9_000),
    arena=st.booleans(),
    turned=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_cut_is_what_narrow_gives(origin, cut, chunk, before, arena, turned, seed):
    dtype, shape, axis, parts = cut
    kind = torch_dtype(dtype)
    assert kind is not None
    generator = torch.Generator().manual_seed(seed)
    nbytes = math.prod(shape) * element_nbytes(dtype)
    raw = torch.randint(0, 2 if dtype == "BOOL" else 256, (nbytes,), generator=generator)
    raw = raw.to(torch.uint8)
    whole = raw.view(kind).reshape(shape) if nbytes else torch.empty(shape, dtype=kind)
    mesh = Mesh.grid({"tp": parts}, {"cut": f"tp:{axis}"})
    manifest = put(
        origin,
        {"before": ("U8", (before,), bytes(before)), "cut": (dtype, shape, bytes(raw.tolist()))},
        chunk,
        mesh,
    )
    length = shape[axis] // parts
    for rank in range(parts):
        expected = whole.narrow(axis, rank * length, length)
        container = torch.empty_like(expected.contiguous())
        if turned:  # containers whose memory is not row-major
            container = torch.empty(expected.shape[::-1], dtype=kind).permute(
                *reversed(range(expected.dim()))
            )
        model = Bag({"before": torch.zeros(before, dtype=torch.uint8)})
        model.register_buffer("cut", container)
        plan = make_plan(collect(model), manifest, mesh=mesh, rank=rank)
        targets = Targets.allocate(plan, torch.device("cpu"), arena=arena)
        stream(origin, manifest, targets, Staging(16 << 20), NEVER)
        cut_at = [p.truth.name for p in plan.placements].index("cut")
        found = targets.tensors[cut_at]
        assert bits(found) == bits(expected)
        assert found.stride() == container.stride() or found.numel() < 2
        # As to a GPU: by copies of what is read piece by piece, each chunk alone or several as one.
        for join in (iter, joined):
            targets = Targets.allocate(plan, torch.device("cpu"), arena=arena)
            copied(manifest, targets, origin, join, seed % 5000 + 1)
            assert bits(targets.tensors[cut_at]) == bits(expected)


def copied(manifest: Manifest, targets: Targets, origin: Origin, join, nbytes: int) -> None:
    """Do what a lane does with the pieces of a manifest's file, in host memory."""
    data = bytearray(manifest.files[0].size)
    origin.read_blob(manifest.files[0].sha256, 0, memoryview(data), NEVER)
    tensors = [Incoming.of(targets, number) for number in range(len(targets.tensors))]
    incoming = [tensor for tensor in tensors if tensor is not None]
    chunks = list(join(chunks_of(manifest, incoming, careful=False)))
    assert all(before.begin + before.length <= after.begin for before, after in pairwise(chunks))
    for chunk in chunks:
        pieces = chunk.pieces(nbytes)
        assert sum(piece.nbytes for piece in pieces) == chunk.length
        for begin, length, copies in pieces:
            slot = ctypes.create_string_buffer(bytes(data[begin : begin + length]), length)
            for to, at, width, pitch, rows in copies:
                assert at + (rows - 1) * pitch + width <= length
                for row in range(rows):
                    source = ctypes.addressof(slot) + at + row * pitch
                    ctypes.memmove(to + row * width, source, width)
        for tensor in chunk.incoming:
            tensor.left -= tensor.came(chunk.begin, chunk.length)
    for tensor in incoming:
        assert tensor.left == 0
        if tensor.lay_out is not None:
            tensor.lay_out()


def test_each_tensor_arrives_once(origin, monkeypatch):
    """Also where the last chunk comes in parts, of which some have nothing of it."""
    sizes = {f"part{i}": 3_000 + 5_000 * i for i in range(6)}
    tensors = {name: ("U8", (size,), bytes(size)) for name, size in sizes.items()}
    manifest = put(origin, tensors, 1 << 20, Mesh())
    monkeypatch.setattr(streaming, "_PIECE", 4096)
    # As to a GPU, which checks all that is there.
    monkeypatch.setattr(streaming._Streaming, "_checked_later", lambda *_: True)
    containers = {name: torch.ones(size, dtype=torch.uint8) for name, size in sizes.items()}
    plan = make_plan(collect(Bag(containers)), manifest, mesh=Mesh(), rank=0)
    targets = Targets.allocate(plan, torch.device("cpu"))
    arrived: list[int] = []
    stream(origin, manifest, targets, Staging(16 << 20), NEVER, arrived=arrived.append)
    assert sorted(arrived) == list(range(len(sizes)))
    assert not any(tensor.any() for tensor in targets.tensors)


def test_host_memory_is_bounded_by_the_staging_buffers(origin):
    """A model of 64 MiB in chunks of 1 MiB takes a few MiB to stream."""
    megabyte = 1 << 20
    data = bytes(range(256)) * (64 * megabyte // 256)
    manifest = put(origin, {"weight": ("U8", (len(data),), data)}, megabyte, Mesh())
    plan = make_plan(
        collect(Bag({"weight": torch.empty(len(data), dtype=torch.uint8)})),
        manifest,
        mesh=Mesh(),
        rank=0,
    )
    del data
    targets = Targets.allocate(plan, torch.device("cpu"))
    targets.tensors[0].zero_()  # its pages are there before we count
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    assert stream(origin, manifest, targets, Staging(16 << 20), NEVER) >= 64 * megabyte
    assert resident("VmHWM") - before < 32 * megabyte
    assert targets.tensors[0][-5:].tolist() == [251, 252, 253, 254, 255]


def test_a_rank_reads_only_the_chunks_it_needs(origin):
    rows, row = 64, 4096
    mesh = Mesh.grid({"tp": 4}, {"weight": "tp:0"})
    manifest = put(origin, {"weight": ("U8", (rows, row), bytes(rows * row))}, row, mesh)
    model = Bag({"weight": torch.empty(rows // 4, row, dtype=torch.uint8)})
    for rank in range(4):
        plan = make_plan(collect(model), manifest, mesh=mesh, rank=rank)
        targets = Targets.allocate(plan, torch.device("cpu"))
        # A quarter of the file, and the chunk that its last row ends in, behind the header.
        assert stream(origin, manifest, targets, Staging(16 << 20), NEVER) <= (rows // 4 + 1) * row


def test_a_chunk_that_stays_wrong(origin, tmp_path):
    """Reading ends, naming the place; no thread goes on."""
    data = bytes(range(200)) * 500
    manifest = put(origin, {"weight": ("U8", (len(data),), data)}, 4096, Mesh())
    blob = Path(origin.url.removeprefix("file://")) / blob_key(manifest.files[0].sha256)
    blob.chmod(0o600)
    content = bytearray(blob.read_bytes())
    content[3 * 4096 + 17] ^= 8
    blob.write_bytes(content)
    plan = make_plan(
        collect(Bag({"weight": torch.empty(len(data), dtype=torch.uint8)})),
        manifest,
        mesh=Mesh(),
        rank=0,
    )
    targets = Targets.allocate(plan, torch.device("cpu"))
    with pytest.raises(IntegrityError, match=r"model\.safetensors at byte 12288 .*twice"):
        stream(origin, manifest, targets, Staging(16 << 20), NEVER)
    assert not [t for t in threading.enumerate() if t.name.startswith("warmcast-stream")]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_thread_that_cannot_be_started_ends_the_stream(origin, monkeypatch, number):
    """They start each other: whichever fails, all end, and the one who waits is told."""
    data = bytes(range(200)) * 2000
    manifest = put(origin, {"weight": ("U8", (len(data),), data)}, 4096, Mesh())
    model = Bag({"weight": torch.empty(len(data), dtype=torch.uint8)})
    plan = make_plan(collect(model), manifest, mesh=Mesh(), rank=0)
    targets = Targets.allocate(plan, torch.device("cpu"))
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == f"warmcast-stream-{number}":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        stream(origin, manifest, targets, Staging(16 << 20), NEVER)
    assert not [t for t in threading.enumerate() if t.name.startswith("warmcast-stream")]


def test_a_blob_of_another_size_is_so_for_every_thread(origin):
    """Not only for the first that opens it."""
    data = bytes(range(200)) * 500
    manifest = put(origin, {"weight": ("U8", (len(data),), data)}, 4096, Mesh())
    file = manifest.files[0]
    blob = Path(origin.url.removeprefix("file://")) / blob_key(file.sha256)
    blob.chmod(0o600)
    os.truncate(blob, file.size - 1)
    with streaming._Blobs(origin) as blobs:
        for _ in range(3):
            with pytest.raises(StoreError, match=rf"\.safetensors .*found {file.size - 1}"):
                blobs.reader(file, NEVER)


def test_threads_are_few():
    assert 2 <= streaming._threads() <= 8
