"""A thread's way from a file to a GPU of host memory: by C, by Python, or by turns."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch

from tests.loader.host_gpu import SLOT, STREAM, whole
from warmcast.loader import dma, pump, staging, stream
from warmcast.loader.pump import Link
from warmcast.loader.staging import Staging
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, StoreError
from warmcast.manifests.stores.file_reader import FileReader

pytestmark = pytest.mark.usefixtures("time_enough")


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
        free = staging.Memory.free
        monkeypatch.setattr(staging.Memory, "pin", lambda memory: setattr(memory, "pinned", True))
        monkeypatch.setattr(
            staging.Memory,
            "free",
            lambda memory: (setattr(memory, "pinned", False), free(memory)),
        )
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


def test_what_was_wrong_at_first_does_not_come_last(link, gpu, host, monkeypatch):
    """A chunk that is read again goes to the same places, and a batch's copies are in no order."""

    class Wrong:
        size, step, local, cached = len(host.data), SLOT, False, None
        flips = 1

        def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
            host.reader.read_into(offset, buffer, deadline)
            if offset == 3 * SLOT:
                buffer[0] ^= self.flips
                self.flips = 0

        def close(self) -> None:
            """The file is the host's."""

    class Origin:
        url = "file:///origin"

        def open_blob(self, sha256: str, deadline: Deadline) -> Wrong:
            return Wrong()

    monkeypatch.setattr(staging, "_LANE", 40 * SLOT)  # nothing has to wait for a slot
    gpu.busy = 3 * 10  # and the first batch would last until all was read twice
    chunk = replace(host.chunk, crc32c=to_hex(crc32c(host.data)))
    with stream._Blobs(Origin()) as blobs:
        streaming = stream._Streaming(
            blobs,
            host.staging,
            torch.device("cpu"),
            Deadline.after(30),
            None,
            threading.Event(),
            careful=False,
        )
        part = stream._LaidOut(chunk, blobs.reader(chunk.file, Deadline.after(30)), SLOT)
        assert streaming._bring(part, host.lane)
    assert host.came() == host.data
