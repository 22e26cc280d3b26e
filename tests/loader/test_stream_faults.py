"""What storage does wrong while a model is loaded: right weights, or an error naming the place."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch

from tests.loader.models import Bag, assert_same
from warmcast.loader.errors import WeightVerificationError
from warmcast.manifests.errors import DeadlineExceeded, IntegrityError, StoreError
from warmcast.manifests.identity import Mesh
from warmcast.manifests.stores.file_reader import FileReader

ROWS, ROW = 4096, 8192  # 32 MiB, two chunks of a manifest and a bit
WHERE = 20 << 20
MESH = Mesh.grid({"tp": 8}, {"weight": "tp:0"})


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (ROWS, ROW), dtype=torch.uint8, generator=generator)
    return {"weight": data, "bias": data[0].clone()}


def empty(rows: int = ROWS) -> Bag:
    return Bag(
        {
            "weight": torch.empty(rows, ROW, dtype=torch.uint8),
            "bias": torch.empty(ROW, dtype=torch.uint8),
        }
    )


Spoil = Callable[[int, memoryview], None]


@pytest.fixture
def reads(monkeypatch):
    """What happens at reads: ``reads(spoil)`` has each followed by ``spoil(offset, buffer)``."""
    read = FileReader.read_into

    def install(spoil: Spoil) -> None:
        def spoilt(self, offset, buffer, deadline):
            read(self, offset, buffer, deadline)
            spoil(offset, buffer)

        monkeypatch.setattr(FileReader, "read_into", spoilt)

    return install


def times(count: int, act: Spoil) -> Spoil:
    """Do it at the first reads of the place, and no more."""
    left = [count]

    def spoil(offset: int, buffer: memoryview) -> None:
        if offset <= WHERE < offset + len(buffer) and left[0]:
            left[0] -= 1
            act(offset, buffer)

    return spoil


def flip(offset: int, buffer: memoryview) -> None:
    buffer[WHERE - offset] ^= 1


def fail(offset: int, buffer: memoryview) -> None:
    raise StoreError("disk", expected="to read", found=os.strerror(5))


@pytest.mark.parametrize("fault", [flip, fail])
def test_wrong_once_is_read_again(loader, publish, reads, fault):
    deployed = publish(state())
    reads(times(1, fault))
    model = empty()
    report = loader().load(model, deployed.ref)
    assert report.verified
    assert_same(model.state_dict(), state())


def test_always_wrong_names_file_and_offset(loader, publish, reads):
    deployed = publish(state())
    reads(times(100, flip))
    model = empty()
    with pytest.raises(IntegrityError, match=rf"model\.safetensors at byte {16 << 20} .*twice"):
        loader().load(model, deployed.ref)


def test_always_failing_says_what_failed(loader, publish, reads):
    deployed = publish(state())
    reads(times(100, fail))
    with pytest.raises(StoreError, match="Input/output error"):
        loader().load(empty(), deployed.ref)


def test_threads_that_fail_at_once_hold_no_memory(loader, publish, reads):
    """The frames of an error hold slots, and errors that are kept are held by their frames."""
    deployed = publish({f"{n:02}": torch.ones(1 << 20, dtype=torch.uint8) for n in range(31)})
    both = threading.Barrier(2)  # one for each chunk

    def late(offset: int, buffer: memoryview) -> None:
        both.wait(30)
        raise DeadlineExceeded("no time left while reading")

    reads(late)
    mine = loader()
    gc.disable()
    try:
        with pytest.raises(DeadlineExceeded):
            mine.load(
                Bag({f"{n:02}": torch.empty(1 << 20, dtype=torch.uint8) for n in range(31)}),
                deployed.ref,
            )
        mine.close()
    finally:
        gc.enable()


def test_a_rank_reads_little_more_than_its_slice(loader, publish, reads, ranks):
    deployed = publish(state(), meshes=[MESH])
    seen: list[tuple[int, int]] = []
    reads(lambda offset, buffer: seen.append((offset, len(buffer))))

    def work(rank, group):
        model = empty(ROWS // 8)
        loader(registry=None, group=group).load(model, deployed.ref, mesh=MESH)
        return model.state_dict()

    parts = ranks(8, work)
    whole = state()["weight"]
    for rank, part in enumerate(parts):
        assert torch.equal(part["weight"], whole[rank * ROWS // 8 : (rank + 1) * ROWS // 8])
    # Each row once, and for each rank the bias, with what lies between two pieces of one chunk.
    assert sum(length for _, length in seen) < 2.2 * ROWS * ROW


def test_part_of_a_chunk_that_was_wrong_is_read_again_with_care(loader, publish, reads, ranks):
    """It cannot be checked before the tensor is; then all of the chunk is read, and checked."""
    deployed = publish(state(), meshes=[MESH])
    reads(times(1, flip))

    def work(rank, group):
        model = empty(ROWS // 8)
        report = loader(registry=None, group=group).load(model, deployed.ref, mesh=MESH)
        return model.state_dict(), [stage.name for stage in report.stages]

    results = ranks(8, work)
    whole = state()["weight"]
    for rank, (part, stages) in enumerate(results):
        assert torch.equal(part["weight"], whole[rank * ROWS // 8 : (rank + 1) * ROWS // 8])
        assert stages.count("read") == 2, "all ranks read anew, for one of them was wrong"


def test_a_truth_that_does_not_hold_is_not_read_for_ever(loader, publish, reads, ranks):
    deployed = publish(state(), meshes=[MESH])
    reads(times(1000, flip))

    def work(rank, group):
        loader(registry=None, group=group).load(empty(ROWS // 8), deployed.ref, mesh=MESH)

    results = ranks(8, work)
    assert all(isinstance(result, Exception) for result in results)
    assert [r for r in results if isinstance(r, (IntegrityError, WeightVerificationError))]
