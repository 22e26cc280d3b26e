"""A file's bytes sent by C, to a GPU of host memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.loader.host_gpu import SLOT, STREAM, HostGpu, chunk_of, linked, whole, written
from warmcast.loader import pump
from warmcast.loader.combs import Comb
from warmcast.loader.pump import Link, Sender
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, WarmcastError

pytestmark = pytest.mark.usefixtures("time_enough")


@contextmanager
def sender_of(link: Link, slots: int = 2, *, pinned: bool = True) -> Iterator[Sender]:
    """A sender through slots of its own."""
    memory = torch.empty(slots * SLOT, dtype=torch.uint8)
    sender = link.sender(memory.data_ptr(), SLOT, slots, pinned=pinned)
    try:
        yield sender
    finally:
        sender.end()


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("busy", [0, 1, 3])
def test_a_file_comes_over_slot_by_slot(library, tmp_path, batches, busy):
    fd, data = written(tmp_path, 5 * SLOT + 17)
    target = torch.zeros(len(data), dtype=torch.uint8)
    gpu = HostGpu(batches=batches, busy=busy)
    with linked(gpu) as link, sender_of(link) as sender:
        sender.load(whole(target))
        # Had a slot been read into before what was copied from it had ended, bytes were wrong.
        assert sender.pump((fd, 0), 0, -1) == (len(data), 1)
    assert target.numpy().tobytes() == data
    assert gpu.ended == gpu.recorded
    os.close(fd)


def test_it_goes_on_where_another_has_been(link, tmp_path):
    fd, data = written(tmp_path, 4 * SLOT)
    target = torch.zeros(len(data), dtype=torch.uint8)
    with sender_of(link) as sender:
        sender.load(whole(target))
        assert sender.pump((fd, 0), 2 * SLOT, 0) == (4 * SLOT, 0)
    assert target.numpy().tobytes() == bytes(2 * SLOT) + data[2 * SLOT :]
    os.close(fd)


def test_a_file_that_ends_too_soon_is_left_to_others(link, tmp_path):
    fd, data = written(tmp_path, 2 * SLOT + 5)
    target = torch.zeros(4 * SLOT, dtype=torch.uint8)
    with sender_of(link) as sender:
        sender.load(whole(target))
        assert sender.pump((fd, 0), 0, -1) == (2 * SLOT, 1)
        assert sender.pump((fd, 0), 2 * SLOT, 1) == (2 * SLOT, 1)
    assert target.numpy().tobytes() == data[: 2 * SLOT] + bytes(2 * SLOT)
    os.close(fd)


def test_a_descriptor_that_cannot_be_read_sends_nothing(link, tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    with sender_of(link) as sender:
        sender.load(whole(torch.zeros(SLOT, dtype=torch.uint8)))
        assert sender.pump((fd, 0), 0, -1) == (0, -1)
    os.close(fd)


def test_an_error_of_the_driver_is_told(link, gpu, tmp_path):
    fd, data = written(tmp_path, 3 * SLOT)
    gpu.fail_at = 2
    target = torch.zeros(len(data), dtype=torch.uint8)
    with sender_of(link) as sender:
        sender.load(whole(target))
        with pytest.raises(WarmcastError, match=r"copy to the GPU: .*found error 700"):
            sender.pump((fd, 0), 0, -1)
        with pytest.raises(WarmcastError, match="error 700"):
            link.begin(Deadline.after(30))
        assert gpu.synchronized == []
    # What was begun has ended before the slots are others'.
    assert gpu.synchronized == [STREAM]
    assert len(gpu.recorded) == 2
    os.close(fd)


def test_an_error_of_a_copy_that_was_begun_is_told(library, tmp_path):
    fd, data = written(tmp_path, 3 * SLOT)
    gpu = HostGpu()
    gpu.query_fails = True
    target = torch.zeros(len(data), dtype=torch.uint8)
    with linked(gpu) as link, sender_of(link) as sender:
        sender.load(whole(target))
        with pytest.raises(WarmcastError, match="error 700"):
            sender.pump((fd, 0), 0, -1)
    assert gpu.synchronized == [STREAM]
    os.close(fd)


def test_it_comes_back_after_a_while(link, tmp_path, monkeypatch):
    fd, data = written(tmp_path, 3 * SLOT)
    target = torch.zeros(len(data), dtype=torch.uint8)
    with sender_of(link) as sender:
        sender.load(whole(target))
        monkeypatch.setattr(pump, "_SLICE", -1)
        assert sender.pump((fd, 0), 0, -1) == (0, -1)
        monkeypatch.undo()
        assert sender.pump((fd, 0), 0, -1) == (3 * SLOT, 0)
    assert target.numpy().tobytes() == data
    os.close(fd)


def test_what_comes_while_the_gpu_is_busy_is_copied_together(library):
    gpu = HostGpu(busy=10**9)
    target = torch.zeros(8 * SLOT, dtype=torch.uint8)
    with linked(gpu) as link, sender_of(link, 8) as sender:
        for slot in range(8):
            sender.bring(slot, [(target.data_ptr() + slot * SLOT, 0, SLOT, 0, 1)])
        assert (len(gpu.recorded), gpu.batches) == (1, [])
        gpu.busy = 0
        sender.end()
        assert (len(gpu.recorded), gpu.batches) == (2, [7])


def test_no_more_is_under_way_than_keeps_the_gpu_busy(library):
    gpu, large = HostGpu(busy=10**9), 8 << 20
    memory, target = (torch.ones(large, dtype=torch.uint8) * n for n in (1, 0))
    with linked(gpu) as link:
        sender = link.sender(memory.data_ptr(), 1, 8, pinned=True)
        for slot in range(8):
            sender.bring(slot, [(target.data_ptr(), -slot, large, 0, 1)])
        assert (len(gpu.recorded), gpu.batches) == (3, [])
        gpu.busy = 0
        sender.end()
        assert (len(gpu.recorded), gpu.batches) == (4, [5])
    assert torch.equal(memory, target)


@pytest.mark.parametrize("what", ["slot", "link"])
def test_a_gpu_that_does_not_go_on_is_not_waited_for(library, what, monkeypatch):
    gpu = HostGpu(busy=10**9)
    target = torch.zeros(3 * SLOT, dtype=torch.uint8)
    monkeypatch.setattr(pump, "_SLICE", 1)
    with linked(gpu) as link, sender_of(link, 3) as sender:
        for slot in range(3):
            sender.bring(slot, [(target.data_ptr() + slot * SLOT, 0, SLOT, 0, 1)])
        with pytest.raises(DeadlineExceeded, match="waiting for the GPU"):
            sender.wait(0, Deadline.after(0)) if what == "slot" else link.begin(Deadline.after(0))
        gpu.busy = 0
        link.begin(Deadline.after(30))
        assert len(gpu.recorded) == 2


def test_memory_that_is_not_pinned_is_not_copied_in_batches(library):
    gpu = HostGpu(busy=10**9)
    target = torch.zeros(6 * SLOT, dtype=torch.uint8)
    with linked(gpu) as link, sender_of(link, 6, pinned=False) as sender:
        for slot in range(6):
            sender.bring(slot, [(target.data_ptr() + slot * SLOT, 0, SLOT, 0, 1)])
        gpu.busy = 0
        sender.end()
    assert (len(gpu.recorded), gpu.batches) == (2, [])


def test_many_threads_bring_over_one_link(library, tmp_path):
    """As they do in a load: each its own part of a file, and all through the same batches."""
    parts, each = 6, 60 * SLOT
    fd, data = written(tmp_path, parts * each)
    target = torch.zeros(len(data), dtype=torch.uint8)
    comb = Comb(0, 1, len(target), 0, len(target), target)
    gpu = HostGpu(busy=2)

    def bring(part: int) -> tuple[int, int]:
        with sender_of(link) as sender:
            sender.load(chunk_of(part * each, each, [comb]))
            return sender.pump((fd, 0), 0, -1)

    with linked(gpu) as link, ThreadPoolExecutor(parts) as pool:
        assert list(pool.map(bring, range(parts))) == [(each, 1)] * parts
    assert target.numpy().tobytes() == data
    assert gpu.ended == gpu.recorded
    assert max(gpu.batches) > 1
    os.close(fd)


@st.composite
def combs_of(draw) -> tuple[int, list[tuple[int, int, int, int, int]]]:
    """A file's size, and combs of it that overlap or leave gaps: rows, wide or narrow."""
    size = draw(st.integers(1, 3 * SLOT))
    combs = []
    for _ in range(draw(st.integers(0, 5))):
        begin = draw(st.integers(0, size - 1))
        rows = draw(st.integers(1, 9))
        pitch = draw(st.integers(1, max(1, (size - begin) // rows)))
        rows = min(rows, (size - begin) // pitch)
        low = draw(st.integers(0, pitch - 1))
        combs.append((begin, rows, pitch, low, draw(st.integers(low, pitch))))
    return size, combs


@given(combs_of(), st.integers(1, 70), st.sampled_from([0, 1, 2]), st.booleans())
def test_every_byte_goes_where_it_belongs(library, tmp_path_factory, drawn, slot, turn, batches):
    """Whatever is cut by the slots' ends, and where Python goes on in between."""
    size, described = drawn
    fd, data = written(tmp_path_factory.mktemp("pump"), size)
    nbytes = slot * SLOT // 64 + 1
    memory = torch.empty(3 * nbytes, dtype=torch.uint8)
    combs, expected = [], []
    for begin, rows, pitch, low, high in described:
        target = torch.zeros(rows * (high - low), dtype=torch.uint8)
        combs.append(Comb(begin, rows, pitch, low, high, target))
        starts = [begin + row * pitch for row in range(rows)]
        expected.append(b"".join(data[at + low : at + high] for at in starts))
    first = size // 3 // nbytes * nbytes
    with linked(HostGpu(batches=batches)) as link:
        sender = link.sender(memory.data_ptr(), nbytes, 3, pinned=True)
        chunk = chunk_of(0, size, combs)
        sender.load(chunk)
        for begin, length, copies in chunk.pieces(nbytes):
            if begin < first:  # by Python, as it would be read
                sender.wait(turn, Deadline.after(30))
                memory[turn * nbytes :][:length] = torch.tensor(list(data[begin:][:length]))
                sender.bring(turn, copies)
        assert sender.pump((fd, 0), first, turn)[0] == size
        sender.end()
    assert [comb.target.numpy().tobytes() for comb in combs] == expected
    os.close(fd)
