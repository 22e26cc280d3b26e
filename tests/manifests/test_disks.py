"""Through the page cache or past it: who reads alone takes the faster way."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.manifests.files import direct
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.stores import disks, open_store
from warmcast.manifests.stores.disks import Disk, disk_of

SIZE = 4 << 20
PIECE = 1 << 20

OTHER = """
import os, sys
from warmcast.manifests.stores.disks import Disk
Disk().join(os.open(sys.argv[1], os.O_RDONLY))
print("reading", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_LOOK", -1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def judged(fd: int, *, cached: float, past: float) -> Disk:
    """A disk that is read, and how many seconds a byte takes by either way."""
    disk = Disk()
    disk.join(fd)
    disk.took(cached * disks._TRIED, disks._TRIED, past=False)
    disk.took(past * disks._TRIED, disks._TRIED, past=True)
    return disk


@pytest.mark.parametrize(
    ("cached", "past", "taken"), [(1.0, 0.5, True), (1.0, 0.99, False), (0.5, 1.0, False)]
)
def test_the_faster_way(fd: int, cached: float, past: float, taken: bool) -> None:
    assert judged(fd, cached=cached, past=past).past_the_cache() is taken


def test_each_way_is_tried_first(fd: int) -> None:
    disk = Disk()
    disk.join(fd)
    assert not disk.past_the_cache()
    disk.took(1.0, disks._TRIED - 1, past=False)
    assert not disk.past_the_cache()
    disk.took(1.0, 1, past=False)
    assert disk.past_the_cache()
    disk.took(9.0, disks._TRIED, past=True)
    assert not disk.past_the_cache()


def test_another_process_that_reads_the_file(fd: int, path: Path) -> None:
    """It is seen while it lives, however it ends."""
    disk = judged(fd, cached=1.0, past=0.5)
    assert disk.past_the_cache()
    words = [sys.executable, "-c", OTHER, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"reading\n"
            assert not disk.past_the_cache()
        finally:
            other.kill()
    assert disk.past_the_cache()


def test_another_process_at_a_file_that_was_read_before(fd: int, path: Path) -> None:
    """It will come to the others, too."""
    second = path.with_name("second")
    second.write_bytes(b"x")
    other, mine = os.open(path, os.O_RDONLY), os.open(second, os.O_RDONLY)
    disk = judged(fd, cached=1.0, past=0.5)
    disk.join(mine)
    assert disk.past_the_cache()
    Disk().join(other)
    assert not disk.past_the_cache()
    disk.leave(fd)
    assert disk.past_the_cache()
    for opened in (other, mine):
        os.close(opened)


def test_a_look_is_good_for_some_time(fd: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = judged(fd, cached=1.0, past=0.5)
    assert disk.past_the_cache()
    monkeypatch.setattr(disks, "_LOOK", 1e9)
    other = os.open(path, os.O_RDONLY)
    Disk().join(other)
    assert disk.past_the_cache()
    monkeypatch.setattr(disks, "_LOOK", -1.0)
    assert not disk.past_the_cache()
    os.close(other)


def test_memory_is_no_disk() -> None:
    fd = os.open("/proc/self/maps", os.O_RDONLY)
    assert disk_of(fd) is None
    os.close(fd)


def test_one_disk_a_file_system(fd: int, path: Path) -> None:
    other = os.open(path.parent, os.O_RDONLY)
    assert disk_of(fd) is disk_of(other)
    os.close(other)


@pytest.mark.parametrize("readers", [1, 2])
def test_a_file_is_read_so(path: Path, readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first part through the cache, then past it; all through it where two read."""
    content = path.read_bytes()
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    alone = readers == 1 and disk_of(fd) is not None and direct(path.parent)
    os.close(fd)
    monkeypatch.setattr(disks, "_TRIED", PIECE)
    monkeypatch.setattr(disks, "_WORTH", 0.0)
    monkeypatch.setattr(disks, "_known", {})
    preadv, past = os.preadv, []

    def call(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError  # nothing is in the cache, whatever was read ahead
        count = preadv(fd, buffers, offset)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            past.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", call)
    store = open_store(path.parent.as_uri())
    opened = [store.reader("file", Deadline.after(30)) for _ in range(readers)]
    with mmap.mmap(-1, SIZE) as buffer, memoryview(buffer) as view:
        for reader in reversed(opened):
            for begin in range(0, SIZE, PIECE):
                with view[begin : begin + PIECE] as piece:
                    reader.read_into(begin, piece, Deadline.after(30))
            assert bytes(view) == content
            if readers == 2 and reader is opened[-1]:
                past.clear()  # it had nobody beside it yet
    for reader in opened:
        reader.close()
    store.close()
    assert past == ([(begin, PIECE) for begin in range(PIECE, SIZE, PIECE)] if alone else [])
