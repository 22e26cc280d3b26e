"""Pieces of cached files sent by C. The GPU is four functions here that copy within host memory."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from warmcast.loader import driver, pump, staging
from warmcast.loader.chunks import Piece
from warmcast.loader.pump import Gpu, Pump
from warmcast.loader.staging import Staging
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, StoreError, WarmcastError
from warmcast.manifests.stores.file_reader import FileReader

SLOT = 4096
FAILED = 700


class HostGpu:
    """Copies at once, and writes down what it was asked for."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.waited: list[int] = []
        self.fail_at = -1
        self._copies = 0
        number, pointer = ctypes.c_uint64, ctypes.c_void_p
        self._functions = (
            ctypes.CFUNCTYPE(ctypes.c_int, number, pointer, ctypes.c_size_t, pointer)(self._copy),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(driver.Rows), pointer)(self._copy_rows),
            ctypes.CFUNCTYPE(ctypes.c_int, number, pointer)(self._record),
            ctypes.CFUNCTYPE(ctypes.c_int, number)(self._synchronize),
        )
        self.functions = Gpu(*(ctypes.cast(f, ctypes.c_void_p) for f in self._functions))

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        assert stream == 77
        self._copies += 1
        if self._copies == self.fail_at:
            return FAILED
        ctypes.memmove(to, source, nbytes)
        return 0

    def _copy_rows(self, request, stream: int) -> int:
        rows = request.contents
        assert (rows.src_type, rows.dst_type) == (driver.HOST, driver.DEVICE)
        assert (rows.src_x, rows.src_y, rows.dst_x, rows.dst_y) == (0, 0, 0, 0)
        for row in range(rows.height):
            to = rows.dst_device + row * rows.dst_pitch
            self._copy(to, rows.src_host + row * rows.src_pitch, rows.width, stream)
        return 0

    def _record(self, event: int, stream: int) -> int:
        self.recorded.append(event)
        return 0

    def _synchronize(self, event: int) -> int:
        self.waited.append(event)
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
def slots() -> Iterator[list[tuple[int, int]]]:
    memory = [torch.empty(SLOT, dtype=torch.uint8) for _ in range(2)]
    yield [(memory[0].data_ptr(), 1001), (memory[1].data_ptr(), 1002)]
    del memory


@pytest.fixture
def gpu() -> HostGpu:
    return HostGpu()


def written(folder: Path, nbytes: int) -> tuple[int, bytes]:
    data = random.Random(nbytes).randbytes(nbytes)
    path = folder / "file"
    path.write_bytes(data)
    return os.open(path, os.O_RDONLY), data


def whole(nbytes: int, target: torch.Tensor) -> list[Piece]:
    """A file in pieces, each to where it is in the target."""
    return [
        Piece(at, length, [(target.data_ptr() + at, 0, length, 0, 1)])
        for at in range(0, nbytes, SLOT)
        for length in [min(SLOT, nbytes - at)]
    ]


def test_a_file_comes_over_slot_by_slot(library, slots, gpu, tmp_path):
    fd, data = written(tmp_path, 5 * SLOT + 17)
    target = torch.zeros(len(data), dtype=torch.uint8)
    sender = Pump(library, gpu.functions, 77, slots)
    sender.load(whole(len(data), target), 0)
    assert sender.send((fd, 0), -1) == (6, 1)
    assert target.numpy().tobytes() == data
    # Before a slot is read into, what was last copied from it has ended.
    assert gpu.waited == gpu.recorded == [1001, 1002] * 3
    os.close(fd)


def test_it_goes_on_where_another_has_been(library, slots, gpu, tmp_path):
    fd, data = written(tmp_path, 4 * SLOT)
    target = torch.zeros(len(data), dtype=torch.uint8)
    sender = Pump(library, gpu.functions, 77, slots)
    sender.load(whole(len(data), target), 2)
    assert sender.send((fd, 0), 0) == (4, 0)
    assert gpu.waited == [1002, 1001]
    assert target.numpy().tobytes() == bytes(2 * SLOT) + data[2 * SLOT :]
    os.close(fd)


def test_a_file_that_ends_too_soon_is_left_to_others(library, slots, gpu, tmp_path):
    fd, data = written(tmp_path, 2 * SLOT + 5)
    target = torch.zeros(4 * SLOT, dtype=torch.uint8)
    sender = Pump(library, gpu.functions, 77, slots)
    sender.load(whole(4 * SLOT, target), 0)
    assert sender.send((fd, 0), -1) == (2, 1)
    assert sender.send((fd, 0), 1) == (2, 1)
    assert target.numpy().tobytes() == data[: 2 * SLOT] + bytes(2 * SLOT)
    sender.skip()
    assert sender.send((fd, 0), 1) == (3, 1)
    os.close(fd)


def test_a_descriptor_that_cannot_be_read_sends_nothing(library, slots, gpu, tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    sender = Pump(library, gpu.functions, 77, slots)
    sender.load(whole(SLOT, torch.zeros(SLOT, dtype=torch.uint8)), 0)
    assert sender.send((fd, 0), -1) == (0, -1)
    os.close(fd)


def test_an_error_of_the_driver_is_told(library, slots, gpu, tmp_path):
    fd, data = written(tmp_path, 3 * SLOT)
    gpu.fail_at = 2
    sender = Pump(library, gpu.functions, 77, slots)
    target = torch.zeros(len(data), dtype=torch.uint8)
    sender.load(whole(len(data), target), 0)
    with pytest.raises(WarmcastError, match=r"copy to the GPU: .*found error 700"):
        sender.send((fd, 0), -1)
    # What was begun from the slot is marked all the same: it is not to be freed before.
    assert gpu.recorded == [1001, 1002]
    os.close(fd)


def test_it_comes_back_after_a_while(library, slots, gpu, tmp_path, monkeypatch):
    fd, data = written(tmp_path, 3 * SLOT)
    target = torch.zeros(len(data), dtype=torch.uint8)
    sender = Pump(library, gpu.functions, 77, slots)
    sender.load(whole(len(data), target), 0)
    monkeypatch.setattr(pump, "_SLICE", -1)
    assert sender.send((fd, 0), -1) == (0, -1)
    monkeypatch.undo()
    assert sender.send((fd, 0), -1) == (3, 0)
    assert target.numpy().tobytes() == data
    os.close(fd)


@st.composite
def pieces_of(draw) -> tuple[int, list[tuple[int, int, list[tuple[int, int, int, int]]]]]:
    """Pieces that overlap or leave gaps, each with copies of one row or of several."""
    size = draw(st.integers(1, 3 * SLOT))
    pieces = []
    for _ in range(draw(st.integers(1, 6))):
        begin = draw(st.integers(0, size - 1))
        nbytes = draw(st.integers(1, min(SLOT, size - begin)))
        copies = []
        for _ in range(draw(st.integers(0, 4))):
            at = draw(st.integers(0, nbytes - 1))
            rows = draw(st.integers(1, 4))
            width = draw(st.integers(1, max(1, (nbytes - at) // rows)))
            rows = min(rows, (nbytes - at) // width)
            most = (nbytes - at - width) // (rows - 1) if rows > 1 else 0
            copies.append((at, width, draw(st.integers(width, most)) if rows > 1 else 0, rows))
        pieces.append((begin, nbytes, copies))
    return size, pieces


@given(pieces_of(), st.integers(-1, 1))
def test_every_byte_goes_where_it_belongs(library, tmp_path_factory, drawn, turn):
    size, described = drawn
    fd, data = written(tmp_path_factory.mktemp("pump"), size)
    memory = torch.empty(2 * SLOT, dtype=torch.uint8)
    places, pieces = [], []
    for begin, nbytes, copies in described:
        targets = [torch.zeros(width * rows, dtype=torch.uint8) for _, width, _, rows in copies]
        places += [
            (target, b"".join(data[begin + at + r * pitch :][:width] for r in range(rows)))
            for target, (at, width, pitch, rows) in zip(targets, copies, strict=True)
        ]
        listed = [(t.data_ptr(), *copy) for t, copy in zip(targets, copies, strict=True)]
        pieces.append(Piece(begin, nbytes, listed))
    gpu = HostGpu()
    base = memory.data_ptr()
    sender = Pump(library, gpu.functions, 77, [(base, 1001), (base + SLOT, 1002)])
    sender.load(pieces, 0)
    assert sender.send((fd, 0), turn)[0] == len(pieces)
    for target, expected in places:
        assert target.numpy().tobytes() == expected
    os.close(fd)


class Sender:
    """A lane to the GPU above, a file of nine pieces and some more, and where they go."""

    def __init__(self, gpu: HostGpu, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data = random.Random(9).randbytes(9 * SLOT + 1)
        path.write_bytes(self.data)
        self.target = torch.zeros(len(self.data), dtype=torch.uint8)
        self.pieces = whole(len(self.data), self.target)
        monkeypatch.setattr(pump, "gpu", lambda: gpu.functions)
        self.reader = FileReader(
            os.open(path, os.O_RDONLY), str(path), lambda cause: StoreError(str(path), found=cause)
        )
        self.staging = Staging()
        mark = type("Mark", (), {})
        mark.record = lambda _, event, stream: gpu._record(event.value, stream)
        mark.query = mark.wait = mark.free = lambda *_: 0

        def attach(slot: staging.Slot, _: object) -> None:
            slot.mark = mark()
            slot.mark.event = ctypes.c_void_p(slot.address)
            slot._copy = gpu._copy

        monkeypatch.setattr(staging.Slot, "attach", attach)
        self.begin()

    def begin(self) -> None:
        """As another load does."""
        self.lane = staging.Lane(self.staging, 1, None)
        self.lane._handle = 77
        self.lane.stream = type("Stream", (), {"device": None})()

    def send(self, seconds: float = 30, stop=lambda: False, source=None) -> bool:
        source, limit = source or self.reader, Deadline.after(seconds)
        return self.lane.send(self.pieces, SLOT, source, limit, stop)

    def came(self) -> bytes:
        return self.target.numpy().tobytes()

    def close(self) -> None:
        self.lane.end()
        self.staging.close()
        self.reader.close()


@pytest.fixture
def sender(gpu: HostGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    made = Sender(gpu, tmp_path / "file", monkeypatch)
    yield made
    made.close()


@pytest.mark.parametrize("built", [True, False])
def test_a_lane_sends_the_same_with_and_without_it(built, library, gpu, sender, monkeypatch):
    monkeypatch.setattr(pump, "library", lambda: library if built else None)
    for _ in range(2):  # once with new slots, once with those that the lane has
        sender.target.zero_()
        assert sender.send()
        assert sender.came() == sender.data
    assert len(gpu.recorded) == 20
    assert bool(gpu.waited) == built
    assert sorted(Counter(gpu.recorded).values()) == [10, 10]  # a slot is read into meanwhile


def test_a_lane_has_at_once_what_others_left(library, gpu, sender):
    assert sender.send()
    assert len(gpu.waited) == 8  # two slots had to be made, by Python
    sender.lane.end()
    sender.begin()
    gpu.waited.clear()
    assert sender.send()
    assert len(gpu.waited) == 10
    assert sender.staging._made == 2 * SLOT
    assert sender.staging.left(SLOT, 5) == []


@pytest.mark.parametrize("at_hand", ["10", "01", "0011", "1100", "010101"])
def test_what_is_not_at_hand_is_read_in_between(
    at_hand, library, gpu, sender, tmp_path, monkeypatch
):
    """A folder's descriptor stands for a file that cannot be read without waiting."""
    folder = os.open(tmp_path, os.O_RDONLY)
    asked = cycle(at_hand)
    monkeypatch.setattr(pump, "_SLICE", 100_000)  # some pieces at a time, not all

    class Source:
        read_into = sender.reader.read_into

        @property
        def cached(self) -> tuple[int, int]:
            return sender.reader.cached if next(asked) == "1" else (folder, 0)

    # Of one copy or two, so that none can be taken for another's.
    sender.pieces = [
        Piece(begin, length, [(to, 0, 1, 0, 1), (to + 1, 1, length - 1, 0, 1)])
        if n % 3 and length > 1
        else Piece(begin, length, [(to, 0, length, 0, 1)])
        for n, (begin, length, [(to, *_)]) in enumerate(sender.pieces)
    ]
    assert sender.send(source=Source())
    assert sender.came() == sender.data
    assert len(gpu.recorded) == len(sender.pieces)
    os.close(folder)


def test_what_is_cut_off_while_it_is_sent_is_an_error(library, sender, tmp_path):
    os.truncate(tmp_path / "file", 5 * SLOT + 3)
    with pytest.raises(StoreError, match=f"expected {SLOT} bytes at offset {5 * SLOT}, found 3"):
        sender.send()
    assert sender.came()[: 5 * SLOT] == sender.data[: 5 * SLOT]


def test_a_lane_stops_when_it_is_told_to(sender, monkeypatch):
    asked = iter([False, False, False, True])
    monkeypatch.setattr(pump, "_SLICE", -1)  # so that each piece is asked about
    assert not sender.send(stop=lambda: next(asked))
    assert sender.came() == sender.data[: 3 * SLOT] + bytes(6 * SLOT + 1)


def test_a_lane_that_is_late_ends(library, sender):
    sender.send()
    with pytest.raises(DeadlineExceeded):
        sender.send(seconds=0)
