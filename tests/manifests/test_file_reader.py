"""Reading a local file from where its bytes are, and from disks that do not do what they should."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.manifests.files import direct
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, NotFound, StoreError
from warmcast.manifests.stores import ObjectReader, disks, file_reader, open_store
from warmcast.manifests.stores.file import FileStore

SIZE = 3 * 4096 + 777
CONTENT = bytes(i * 7 % 251 for i in range(SIZE))
preadv = os.preadv


def soon() -> Deadline:
    return Deadline.after(30)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    store = open_store((tmp_path / "store").as_uri())
    store.create("a", CONTENT, soon())
    yield store
    store.close()


@pytest.fixture(params=["cached", "cold", "faster direct", "direct", "asked in vain"])
def reader(
    request: pytest.FixtureRequest, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectReader]:
    """A reader, by each of its ways."""
    way = request.param
    if way == "direct":
        monkeypatch.setattr(file_reader, "_memory_free", lambda: 0)
    if way == "faster direct":
        monkeypatch.setattr(disks.Disk, "past_the_cache", lambda _: True)
    if way in ("cold", "faster direct", "direct"):
        monkeypatch.setattr(os, "preadv", _only(lambda flags: flags == 0, errno.EAGAIN))
    if way == "asked in vain":
        monkeypatch.setattr(os, "preadv", _only(lambda flags: flags == 0, errno.EOPNOTSUPP))
    reader = store.reader("a", soon())
    yield reader
    reader.close()


def _only(allowed: Callable[[int], bool], error: int) -> Callable[..., int]:
    def call(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if not allowed(flags):
            raise OSError(error, os.strerror(error))
        return preadv(fd, buffers, offset, flags)

    return call


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, SIZE), (0, 4096), (4096, 4096), (4096, SIZE - 4096), (1, 5000), (SIZE - 3, 3), (77, 0)],
)
def test_any_range_by_any_way(reader: ObjectReader, offset: int, length: int) -> None:
    buffer = bytearray(length)
    reader.read_into(offset, memoryview(buffer), soon())
    assert bytes(buffer) == CONTENT[offset : offset + length]
    assert reader.size == SIZE
    assert reader.local


@settings(deadline=None, max_examples=60)
@given(
    offset=st.integers(0, SIZE),
    length=st.integers(0, SIZE),
    most=st.integers(1, 5000),
    past=st.booleans(),
)
def test_short_reads(tmp_path_factory, offset: int, length: int, most: int, past: bool) -> None:
    """A file system may give less than was asked for, at every call."""
    length = min(length, SIZE - offset)
    with pytest.MonkeyPatch.context() as patch:
        store = open_store((tmp_path_factory.mktemp("short") / "store").as_uri())
        store.create("a", CONTENT, soon())
        reader = store.reader("a", soon())

        def short(fd: int, buffers: list[memoryview], at: int, flags: int = 0) -> int:
            if past and flags:
                raise BlockingIOError
            return preadv(fd, [buffers[0][:most]], at, flags)

        patch.setattr(os, "preadv", short)
        patch.setattr(disks.Disk, "past_the_cache", lambda _: past)
        buffer = bytearray(length)
        reader.read_into(offset, memoryview(buffer), soon())
        assert bytes(buffer) == CONTENT[offset : offset + length]
        reader.close()


def test_threads_that_ask_in_vain_together_find_the_file_at_hand_all_the_same(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is told that nothing can be asked for while another has just been told, and goes on."""
    reader = store.reader("a", soon())
    inner = bytearray(SIZE)

    def refuse(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if not flags:
            return preadv(fd, buffers, offset)
        if not any(inner):
            inner[:] = b"x" * SIZE
            reader.read_into(0, memoryview(inner), soon())
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "preadv", refuse)
    outer = bytearray(SIZE)
    reader.read_into(0, memoryview(outer), soon())
    assert inner == outer == CONTENT
    assert reader.cached is not None
    assert reader.cached[1] == 0
    reader.close()


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EAGAIN])
def test_whether_a_file_system_can_be_asked_is_known_at_once(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(os, "preadv", _only(lambda flags: flags == 0, error))
    reader = store.reader("a", soon())
    assert reader.cached is not None
    assert reader.cached[1] == (0 if error == errno.EOPNOTSUPP else os.RWF_NOWAIT)
    reader.close()


def test_memory_that_is_not_aligned_is_read_past_the_cache_all_the_same(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reader, "_memory_free", lambda: 0)
    reader = store.reader("a", soon())
    buffer = bytearray(SIZE + 1)
    reader.read_into(0, memoryview(buffer)[1:], soon())
    assert bytes(buffer[1:]) == CONTENT
    reader.close()


def test_an_error_of_the_disk_is_the_stores(
    reader: ObjectReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", _only(lambda _: False, errno.EIO))
    with pytest.raises(StoreError, match="Input/output error"):
        reader.read_into(0, memoryview(bytearray(10)), soon())


@pytest.mark.parametrize("way", ["cached", "past", "too large"])
def test_a_file_that_is_not_cached_is_hardly_asked_for(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The kernel reads ahead for who asks in vain: past the cache that would be read twice."""
    piece, pieces = 16 * 4096, 40
    content = os.urandom(piece * pieces)
    store.create("b", content, soon())
    asked: list[int] = []

    def call(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            asked.append(len(buffers[0]))
            raise BlockingIOError
        return preadv(fd, buffers, offset)

    if way == "too large":
        monkeypatch.setattr(file_reader, "_memory_free", lambda: 0)
    monkeypatch.setattr(disks.Disk, "past_the_cache", lambda _: way == "past")
    monkeypatch.setattr(os, "preadv", call)
    reader = store.reader("b", soon())
    asked.clear()
    with mmap.mmap(-1, piece) as aligned:
        for number in range(pieces):
            reader.read_into(number * piece, memoryview(aligned), soon())
            assert aligned[:] == content[number * piece :][:piece]
        assert asked == [piece, 4096]  # the first; from then on it is known that it is not there
        reader.read_into(0, memoryview(aligned), soon())  # anew: another stretch
        assert asked == [piece, 4096, 4096]
    reader.close()


def test_a_descriptor_that_cannot_be_read() -> None:
    """Nothing is mapped at a process's first bytes, and reading them is an error of the device."""

    def explain(cause: OSError) -> StoreError:
        return StoreError("memory", found=cause.strerror)

    reader = file_reader.FileReader(os.open("/proc/self/mem", os.O_RDONLY), "memory", explain)
    with pytest.raises(StoreError, match="Input/output error"):
        reader.read_into(0, memoryview(bytearray(10)), soon())
    reader.close()


@pytest.mark.parametrize("nowait", [errno.EAGAIN, errno.EOPNOTSUPP], ids=["cold", "unsupported"])
def test_a_file_larger_than_the_memory_is_read_past_the_cache(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nowait: int
) -> None:
    """Every time, and all but the tail that is no whole block."""
    reads: list[tuple[bool, int, int]] = []

    def call(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(nowait, os.strerror(nowait))
        count = preadv(fd, buffers, offset)
        reads.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), offset, count))
        return count

    monkeypatch.setattr(file_reader, "_memory_free", lambda: 0)
    monkeypatch.setattr(os, "preadv", call)
    reader = store.reader("a", soon())
    if not direct(tmp_path):
        pytest.skip("this file system has no reads past the cache")
    with mmap.mmap(-1, 4 * 4096) as buffer, memoryview(buffer) as view:
        for _ in range(2):
            reads.clear()
            with view[:SIZE] as part:
                reader.read_into(0, part, soon())
            assert bytes(view[:SIZE]) == CONTENT
            assert sum(count for past, _, count in reads if past) >= 3 * 4096
            assert sum(count for past, _, count in reads if not past) <= SIZE - 3 * 4096
    reader.close()


def test_a_file_system_without_direct_reads(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = os.open

    def refuse(path: str, flags: int, *more: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opens(path, flags, *more, **options)

    monkeypatch.setattr(file_reader, "_memory_free", lambda: 0)
    monkeypatch.setattr(os, "open", refuse)
    reader = store.reader("a", soon())
    buffer = bytearray(SIZE)
    reader.read_into(0, memoryview(buffer), soon())
    assert bytes(buffer) == CONTENT
    reader.close()


def test_a_file_that_ends_before(store: FileStore, tmp_path: Path) -> None:
    reader = store.reader("a", soon())
    path = tmp_path / "store" / "a"
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(StoreError, match="expected 4096 bytes at offset 4096, found 904"):
        reader.read_into(4096, memoryview(bytearray(4096)), soon())
    reader.close()


def test_a_file_that_is_replaced_is_read_on_as_it_was(store: FileStore, tmp_path: Path) -> None:
    reader = store.reader("a", soon())
    other = tmp_path / "other"
    other.write_bytes(b"x" * SIZE)
    other.replace(tmp_path / "store" / "a")
    buffer = bytearray(SIZE)
    reader.read_into(0, memoryview(buffer), soon())
    assert bytes(buffer) == CONTENT
    reader.close()


def test_no_time_left(reader: ObjectReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", _only(lambda flags: flags == 0, errno.EAGAIN))
    with pytest.raises(DeadlineExceeded):
        reader.read_into(0, memoryview(bytearray(10)), Deadline.after(0))


def test_a_missing_file(store: FileStore) -> None:
    with pytest.raises(NotFound):
        store.reader("b", soon())


def test_closed_files(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reader, "_memory_free", lambda: 0)
    before = len(list(Path("/proc/self/fd").iterdir()))
    store.reader("a", soon()).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("past", [False, True])
def test_stretches_of_a_disk_are_closed(
    store: FileStore, past: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of threads that have ended, and those of threads that have not."""
    monkeypatch.setattr(disks.Disk, "past_the_cache", lambda _: past)
    monkeypatch.setattr(os, "preadv", _only(lambda flags: flags == 0, errno.EAGAIN))
    before = len(list(Path("/proc/self/fd").iterdir()))
    readers = [store.reader("a", soon()) for _ in range(3)]

    def read() -> None:
        with mmap.mmap(-1, SIZE) as buffer:
            for reader in readers:
                reader.read_into(0, memoryview(buffer), soon())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    read()
    # A thread has one stretch at a time, however many files it reads.
    assert len(list(Path("/proc/self/fd").iterdir())) == before + len(readers) + 1
    for reader in readers:
        reader.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_no_descriptor_left_for_a_stretch(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", _only(lambda flags: flags == 0, errno.EAGAIN))
    other, reader = store.reader("a", soon()), store.reader("a", soon())
    half = bytearray(SIZE // 2)
    other.read_into(0, memoryview(half), soon())
    opens = os.open

    def refuse(path: str, flags: int, *more: int, **options: int) -> int:
        if str(path).startswith("/proc/self/fd/"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opens(path, flags, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match="Too many open files"):
            reader.read_into(0, memoryview(bytearray(10)), soon())
    rest = bytearray(SIZE - len(half))
    other.read_into(len(half), memoryview(rest), soon())  # where that thread was before
    assert bytes(half + rest) == CONTENT
    buffer = bytearray(SIZE)
    reader.read_into(0, memoryview(buffer), soon())
    assert bytes(buffer) == CONTENT
    for opened in (other, reader):
        opened.close()
