"""The file store's own: what the file system can do to it, and what is in its folder."""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmcast.manifests.checksum import crc32c
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    CredentialsRefused,
    DeadlineExceeded,
    NotFound,
    StoreError,
    StoreFull,
    UsageError,
)
from warmcast.manifests.stores.checks import check_key
from warmcast.manifests.stores.file import FileStore

BIG = bytes(range(256)) * 4096 * 5  # 5 MiB: more than one piece, and more than an etag reads


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a folder with spaces"


@pytest.fixture
def store(root: Path) -> FileStore:
    return FileStore(root.as_uri())


def left_behind(root: Path) -> list[str]:
    return [path.name for path in (root / ".tmp").glob("*") if path.name != "lock"]


def upload(store: FileStore, key: str, data: bytes, deadline: Deadline) -> bool:
    return store.upload(key, io.BytesIO(data), len(data), crc32c(data), deadline)


class TestWhere:
    def test_a_url_and_a_path_are_the_same_store(self, root: Path, deadline: Deadline) -> None:
        by_url, by_path = FileStore(root.as_uri()), FileStore(str(root))
        assert by_url.url == by_path.url == root.as_uri()
        by_url.create("a/b", b"1", deadline)
        assert by_path.read("a/b", deadline)[0] == b"1"
        assert (root / "a" / "b").read_bytes() == b"1"

    def test_reading_creates_nothing(
        self, store: FileStore, root: Path, deadline: Deadline
    ) -> None:
        assert store.head("a", deadline) is None
        assert list(store.list("", deadline)) == []
        store.delete("a", deadline)
        with pytest.raises(NotFound):
            store.read("a", deadline)
        assert not root.exists()

    @given(st.text("ab./\\~-_@+% \0\n", max_size=12))
    @settings(deadline=None, max_examples=300)
    def test_a_key_stays_inside(self, key: str) -> None:
        inside = Path("/store/root")
        try:
            check_key(key)
        except UsageError:
            return
        path = Path(os.path.normpath(inside / key))
        assert path.is_relative_to(inside)
        assert str(path) == f"{inside}/{key}"

    def test_links_are_not_followed(
        self, store: FileStore, root: Path, tmp_path: Path, deadline: Deadline
    ) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_bytes(b"secret")
        store.create("a", b"1", deadline)
        (root / "folder").symlink_to(outside)
        (root / "object").symlink_to(outside / "secret")
        for key in ("folder/secret", "object"):
            for call in (store.read, store.head, lambda k, d: store.create(k, b"", d)):
                with pytest.raises(StoreError, match=r"symbolic link|plain file"):
                    call(key, deadline)
        with pytest.raises(StoreError, match="symbolic link"):
            store.create("folder/new", b"", deadline)
        assert [info.key for info in store.list("", deadline)] == ["a"]
        assert [path.name for path in outside.iterdir()] == ["secret"]

    def test_what_is_no_object(self, store: FileStore, root: Path, deadline: Deadline) -> None:
        store.create("folder/a", b"1", deadline)
        os.mkfifo(root / "pipe")
        for key in ("folder", "pipe"):
            with pytest.raises(NotFound, match="plain file"):
                store.read(key, deadline)
            with pytest.raises(StoreError, match="plain file"):
                store.create(key, b"", deadline)
        with pytest.raises(NotFound):
            store.read("folder/a/b", deadline)
        with pytest.raises(StoreError):
            store.create("folder/a/b", b"", deadline)
        assert [info.key for info in store.list("", deadline)] == ["folder/a"]
        assert left_behind(root) == []


class TestVersions:
    @pytest.mark.parametrize("size", [1, 1 << 16, (1 << 16) + 1, len(BIG)])
    def test_every_writing_is_another(
        self, store: FileStore, deadline: Deadline, size: int
    ) -> None:
        """Of the same size, and as fast after each other as can be."""
        etag = store.replace("a", bytes(size), None, deadline)
        seen = {etag}
        for number in range(1, 6):
            etag = store.replace("a", bytes([number]) * size, etag, deadline)
            info = store.head("a", deadline)
            assert info is not None
            assert info.etag == etag
            seen.add(etag)
        assert len(seen) == 6

    @given(st.integers(0, len(BIG) + 10), st.integers(0, 1000))
    @settings(deadline=None, max_examples=100)
    def test_any_range(
        self, tmp_path_factory: pytest.TempPathFactory, offset: int, length: int
    ) -> None:
        root = tmp_path_factory.getbasetemp() / "ranges"
        store, deadline = FileStore(str(root)), Deadline.after(10)
        if not root.exists():
            upload(store, "a", BIG, deadline)
        buffer = bytearray(length)
        if offset + length <= len(BIG):
            store.read_into("a", offset, memoryview(buffer), deadline)
            assert buffer == BIG[offset : offset + length]
        else:
            with pytest.raises(StoreError, match=r"/a: .*offset"):
                store.read_into("a", offset, memoryview(buffer), deadline)


class TestLocks:
    def test_a_lock_that_is_not_given_up(
        self, store: FileStore, root: Path, deadline: Deadline
    ) -> None:
        etag = store.replace("a", b"1", None, deadline)
        store.replace("a", b"1", etag, deadline)  # makes the lock
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(root / ".tmp" / "lock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(DeadlineExceeded, match="lock"):
                store.replace("a", b"2", etag, Deadline.after(0.05))
            with pytest.raises(DeadlineExceeded, match="lock"):
                store.delete("a", Deadline.after(0.05))
            holder.kill()
        assert store.read("a", deadline) == (b"1", etag)
        assert left_behind(root) == []
        store.replace("a", b"2", etag, deadline)

    def test_processes_swap_one_after_the_other(
        self, store: FileStore, root: Path, deadline: Deadline
    ) -> None:
        store.replace("counter", b"0", None, deadline)
        context = multiprocessing.get_context("spawn")
        with context.Pool(3) as pool:
            pool.starmap(_count, [(str(root), 20)] * 3)
            pool.close()
            pool.join()
        assert store.read("counter", deadline)[0] == b"60"


def _count(root: str, times: int) -> None:
    from warmcast.manifests.errors import PreconditionFailed

    store, deadline = FileStore(root), Deadline.after(60)
    while times:
        data, etag = store.read("counter", deadline)
        try:
            store.replace("counter", b"%d" % (int(data) + 1), etag, deadline)
            times -= 1
        except PreconditionFailed:
            continue


_HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


class TestFaults:
    @contextmanager
    def no_file_above(self, nbytes: int) -> Iterator[None]:
        """A quota of the process: what goes beyond fails as a full disk does, for root as well."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def test_no_space(self, store: FileStore, root: Path, deadline: Deadline) -> None:
        etag = store.replace("ref", b"1", None, deadline)
        with self.no_file_above(100_000):
            with pytest.raises(StoreFull, match="big"):
                upload(store, "big", BIG, deadline)
            with pytest.raises(StoreFull, match="big"):
                store.create("big", BIG, deadline)
            with pytest.raises(StoreFull, match="ref"):
                store.replace("ref", BIG, etag, deadline)
        assert left_behind(root) == []
        assert [info.key for info in store.list("", deadline)] == ["ref"]
        assert store.read("ref", deadline) == (b"1", etag)
        assert upload(store, "big", BIG, deadline)

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
    def test_a_full_disk(self, root: Path, deadline: Deadline) -> None:
        root.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(root)]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("mounting is not allowed here")
        try:
            store = FileStore(str(root))
            with pytest.raises(StoreFull, match=r"big.*No space left"):
                upload(store, "big", BIG, deadline)
            assert left_behind(root) == []
            assert store.create("small", b"1", deadline)
        finally:
            subprocess.run(["umount", str(root)], check=True)  # noqa: S607

    def test_no_permission(self, store: FileStore, root: Path, deadline: Deadline) -> None:
        store.create("a/b", b"1", deadline)
        with as_another_user(root):
            for call in (store.read, store.head, lambda k, d: store.create("a/c", b"", d)):
                with pytest.raises(CredentialsRefused, match="Permission denied"):
                    call("a/b", deadline)
        assert store.read("a/b", deadline)[0] == b"1"

    def test_only_dead_writers_are_swept(
        self, store: FileStore, root: Path, deadline: Deadline
    ) -> None:
        class Watched(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if not self.tell():
                    (root / ".tmp" / "0123456789abcdef").write_bytes(b"of a writer that was killed")
                    other = FileStore(str(root))
                    assert other.create("other", b"", deadline)
                    assert len(left_behind(root)) == 1
                return super().read(size)

        assert store.upload("a", Watched(BIG), len(BIG), crc32c(BIG), deadline)
        assert left_behind(root) == []


@contextmanager
def as_another_user(root: Path) -> Iterator[None]:
    """No right to the folder, whoever runs the tests."""
    if os.geteuid() == 0:
        root.chmod(0o700)
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        mode = root.stat().st_mode
        root.chmod(0)
        try:
            yield
        finally:
            root.chmod(mode)
