"""Pieces of cached files sent by C. The GPU is five functions here that copy within host memory."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, count, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warmcast.loader import dma, driver, pump, staging
from warmcast.loader.chunks import Chunk, Incoming
from warmcast.loader.combs import Comb
from warmcast.loader.pump import Gpu, Link, Sender
from warmcast.loader.staging import Staging
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, StoreError, WarmcastError
from warmcast.manifests.manifest import FileEntry
from warmcast.manifests.stores.file_reader import FileReader

SLOT = 4096
FAILED = 700
NOT_READY = 600
STREAM = 77


class HostGpu:
    """Copies when it is asked whether it has, and writes down what it was asked for.

    ``busy`` batches are not done yet when they are first asked about; ``fail_at`` numbers the copy
    that fails.
    """

    def __init__(self, *, batches: bool = True, busy: int = 0) -> None:
        self.batches: list[int] = []
        self.recorded: list[int] = []
        self.ended: list[int] = []
        self.synchronized: list[int] = []
        self.fail_at = -1
        self.query_fails = False
        self.busy = busy
        self._copies = 0
        self._begun: list[tuple[int, int, int]] = []
        self._marked: dict[int, list[tuple[int, int, int]]] = {}
        self._asked: Counter[int] = Counter()
        self._events: list[int] = []
        number, pointer, size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
        numbers, sizes = ctypes.POINTER(number), ctypes.POINTER(size)
        self._functions = (
            ctypes.CFUNCTYPE(ctypes.c_int, number, pointer, size, pointer)(self._copy),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(driver.Rows), pointer)(self._copy_rows),
            ctypes.CFUNCTYPE(
                ctypes.c_int, numbers, numbers, sizes, size, pointer, sizes, size, sizes, pointer
            )(self._copy_all),
            ctypes.CFUNCTYPE(ctypes.c_int, number, pointer)(self._record),
            ctypes.CFUNCTYPE(ctypes.c_int, number)(self._query),
        )
        self.functions = Gpu(*(ctypes.cast(f, ctypes.c_void_p) for f in self._functions))
        if not batches:
            self.functions.copy_all = None

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        assert stream == STREAM
        self._copies += 1
        if self._copies == self.fail_at:
            return FAILED
        self._begun.append((to, source, nbytes))
        return 0

    def _copy_rows(self, request, stream: int) -> int:
        rows = request.contents
        assert (rows.src_type, rows.dst_type) == (driver.HOST, driver.DEVICE)
        assert (rows.src_x, rows.src_y, rows.dst_x, rows.dst_y) == (0, 0, 0, 0)
        for row in range(rows.height):
            to = rows.dst_device + row * rows.dst_pitch
            self._copy(to, rows.src_host + row * rows.src_pitch, rows.width, stream)
        return 0

    def _copy_all(
        self, to, source, nbytes, count, attributes, first, attributes_count, _, stream
    ) -> int:
        assert ctypes.cast(attributes, ctypes.POINTER(ctypes.c_int))[0] == 1  # in stream order
        assert (first[0], attributes_count) == (0, 1)
        self.batches.append(count)
        return max(self._copy(to[k], source[k], nbytes[k], stream) for k in range(count))

    def _record(self, event: int, stream: int) -> int:
        assert stream == STREAM
        self.recorded.append(event)
        assert event not in self._marked
        self._marked[event], self._begun = self._begun, []
        return 0

    def mark(self) -> SimpleNamespace:
        """An event as Python has them."""
        event = len(self._events) + 1
        self._events.append(event)
        return SimpleNamespace(
            event=event,
            record=self._record,
            wait=lambda: self._query(event) if event in self._marked else 0,
            free=lambda: None,
        )

    def synchronize(self, stream: int) -> int:
        """Wait for all that was begun."""
        self.synchronized.append(stream)
        return max(map(self._query, list(self._marked)), default=0)

    def _query(self, event: int) -> int:
        if self.query_fails:
            return FAILED
        self._asked[event] += 1
        if self._asked[event] <= self.busy:
            return NOT_READY
        self._asked[event] = 0
        for to, source, nbytes in self._marked.pop(event):
            ctypes.memmove(to, source, nbytes)
        self.ended.append(event)
        return 0


@pytest.fixture(scope="module")
def library():
    found = pump.library()
    if found is None and shutil.which(sysconfig.get_config_var("CC") or "cc") is None:
        pytest.skip("no C compiler")
    assert found is not None, "not built, or for another version: run python infra/native.py"
    return found


@pytest.fixture(autouse=True, scope="module")
def time_enough() -> Iterator[None]:
    """A call ends with its pieces, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pump, "_SLICE", 600 * 10**9)
        yield


@pytest.fixture
def gpu() -> HostGpu:
    return HostGpu()


@contextmanager
def linked(gpu: HostGpu) -> Iterator[Link]:
    """A link to that GPU."""
    events = count(1001)

    def mark() -> SimpleNamespace:
        return SimpleNamespace(event=ctypes.c_void_p(next(events)), free=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dma, "Mark", mark)
        patch.setattr(
            driver, "waiting", lambda: SimpleNamespace(cuStreamSynchronize=gpu.synchronize)
        )
        link = Link(pump.library(), gpu.functions, STREAM)
        try:
            yield link
        finally:
            link.free()


@pytest.fixture
def link(library, gpu: HostGpu) -> Iterator[Link]:
    with linked(gpu) as made:
        yield made


@contextmanager
def sender_of(link: Link, slots: int = 2, *, pinned: bool = True) -> Iterator[Sender]:
    """A sender through slots of its own."""
    memory = torch.empty(slots * SLOT, dtype=torch.uint8)
    sender = link.sender(memory.data_ptr(), SLOT, slots, pinned=pinned)
    try:
        yield sender
    finally:
        sender.settle()
        sender.free()


def written(folder: Path, nbytes: int) -> tuple[int, bytes]:
    data = random.Random(nbytes).randbytes(nbytes)
    path = folder / "file"
    path.write_bytes(data)
    return os.open(path, os.O_RDONLY), data


def chunk_of(begin: int, length: int, combs: Sequence[Comb]) -> Chunk:
    """A part of a file, and where its bytes go."""
    incoming = [
        Incoming(n, "file", comb, comb.target.nbytes, None, comb.first, comb.end, comb.address)
        for n, comb in enumerate(combs)
    ]
    entry = FileEntry(path="file", size=begin + length, sha256="0" * 64, crc32c="0" * 8, chunks=())
    return Chunk(entry, begin, length, None, incoming)


def whole(target: torch.Tensor) -> Chunk:
    """A file, each byte to where it is in the target."""
    return chunk_of(0, len(target), [Comb(0, 1, len(target), 0, len(target), target)])


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
        sender.settle()
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
        sender.settle()
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
        sender.settle()
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
        sender.settle()
    assert [comb.target.numpy().tobytes() for comb in combs] == expected
    os.close(fd)


class Host:
    """A lane to the GPU above, a file of nine pieces and some more, and where they go."""

    def __init__(self, link: Link, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data = random.Random(9).randbytes(9 * SLOT + 1)
        path.write_bytes(self.data)
        self.target = torch.zeros(len(self.data), dtype=torch.uint8)
        self.chunk = whole(self.target)
        self.reader = FileReader(
            os.open(path, os.O_RDONLY), str(path), lambda cause: StoreError(str(path), found=cause)
        )
        self.read_in_python = 0
        self.staging = Staging()
        monkeypatch.setattr(staging.Memory, "pin", lambda _: None)
        monkeypatch.setattr(staging, "_LANE", 2 * SLOT)
        self.begin(link)

    @property
    def cached(self) -> tuple[int, int] | None:
        return self.reader.cached

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        self.read_in_python += 1
        self.reader.read_into(offset, buffer, deadline)

    def begin(self, link: Link) -> None:
        """As another load does."""
        self.lane = staging.Lane(self.staging, 1, link)

    def send(self, seconds: float = 30, stop=lambda: False, source=None) -> bool:
        source, limit = source or self, Deadline.after(seconds)
        return self.lane.send(self.chunk, SLOT, source, limit, stop)

    def came(self) -> bytes:
        self.lane.link.reach(self.lane.mark(), Deadline.after(30))
        return self.target.numpy().tobytes()

    def close(self) -> None:
        self.lane.end()
        self.staging.close()
        self.reader.close()


@pytest.fixture
def host(link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(link, tmp_path / "file", monkeypatch)
    yield made
    made.close()


@pytest.mark.parametrize("built", [True, False])
def test_a_lane_sends_the_same_with_and_without_it(built, gpu, link, tmp_path, monkeypatch):
    link = link if built else dma.Link(STREAM)
    monkeypatch.setattr(dma, "Mark", gpu.mark)
    monkeypatch.setattr(dma, "copier", lambda *, pinned: gpu._copy)
    host = Host(link, tmp_path / "file", monkeypatch)
    for times in (1, 2):  # once with new slots, once with those that the lane has
        host.target.zero_()
        assert host.send()
        assert host.came() == host.data
        assert host.read_in_python == (0 if built else 10 * times)
        assert len(gpu.recorded) == len(gpu.ended)
    host.close()


def test_a_lane_has_what_others_left(link, host):
    assert host.send()
    host.lane.end()
    host.begin(link)
    assert host.send()
    assert host.came() == host.data
    assert host.staging._made == 2 * SLOT


@pytest.mark.parametrize(
    ("at_hand", "by_python"),
    [([10], 0), ([0, 10], 1), ([0, 0, 0, 5, 5, 10], 4), ([9, 9], 1), ([3, 3, 3, 6, 6, 9, 10], 3)],
)
def test_what_is_not_at_hand_is_read_in_between(at_hand, by_python, host, tmp_path):
    """Of the file so many slots are in the cache, whenever somebody asks."""
    fds = []
    for slots in at_hand:
        cut = tmp_path / f"{slots}"
        cut.write_bytes(host.data[: slots * SLOT])
        fds.append(os.open(cut, os.O_RDONLY))
    asked = chain(fds, repeat(fds[-1]))

    class Source:
        read_into = host.read_into

        @property
        def cached(self) -> tuple[int, int]:
            return next(asked), 0

    assert host.send(source=Source())
    assert host.came() == host.data
    assert host.read_in_python == by_python
    for fd in fds:
        os.close(fd)


def test_what_is_cut_off_while_it_is_sent_is_an_error(host, tmp_path):
    os.truncate(tmp_path / "file", 5 * SLOT + 3)
    with pytest.raises(StoreError, match=f"expected {SLOT} bytes at offset {5 * SLOT}, found 3"):
        host.send()
    assert host.came()[: 5 * SLOT] == host.data[: 5 * SLOT]


def test_a_lane_stops_when_it_is_told_to(host, monkeypatch):
    asked = iter([False, False, False, True])
    monkeypatch.setattr(pump, "_SLICE", -1)  # so that each piece is asked about
    assert not host.send(stop=lambda: next(asked))
    assert host.came() == host.data[: 3 * SLOT] + bytes(6 * SLOT + 1)


def test_a_lane_that_is_late_ends(host):
    host.send()
    with pytest.raises(DeadlineExceeded):
        host.send(seconds=0)
