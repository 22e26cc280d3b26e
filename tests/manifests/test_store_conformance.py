"""What every store has to do: against a folder, a real S3 server, and one that speaks GCS."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from warmcast.manifests.checksum import crc32c
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    DeadlineExceeded,
    IntegrityError,
    NotFound,
    PreconditionFailed,
    StoreError,
    UsageError,
)
from warmcast.manifests.stores import ObjectStore, Part, open_store, s3_parts
from warmcast.manifests.stores.file import FileStore
from warmcast.manifests.stores.gcs import GcsStore
from warmcast.manifests.stores.s3 import S3Store

PART = 5 << 20  # the smallest that S3 allows
LARGE = os.urandom(1 << 20) * 11 + b"and a last part that is shorter"
SMALL = LARGE[-2000:]
BAD_KEYS = [
    *("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/..", "a/./b"),
    *(".tmp", ".tmp/x", "a b", "a\0b", "a\nb", "ä", "a\\b", "a?b", "a" * 256, "a/" * 500 + "a"),
]


@pytest.fixture
def store(store_url: str) -> Iterator[ObjectStore]:
    """A store whose parts are small, so that the large object has three."""
    opened = open_store(store_url)
    if isinstance(opened, S3Store | GcsStore):
        opened.part_size = PART
    yield opened
    opened.close()


def unfinished(store: ObjectStore, deadline: Deadline) -> list[str]:
    """What uploads have begun and neither finished nor taken away."""
    if isinstance(store, FileStore):
        folder = Path(store.url.removeprefix("file://")) / ".tmp"
        return [p.name for p in folder.glob("*") if p.name != "lock"]
    if isinstance(store, GcsStore):  # only whoever began a session knows of it
        return [url for _, url in store.unfinished]
    assert isinstance(store, S3Store)
    prefix = store.name("x")[:-1]
    answer = store.call(store.client.list_multipart_uploads, "", deadline, Prefix=prefix)
    return [upload["UploadId"] for upload in answer.get("Uploads", ())]


def upload(store: ObjectStore, key: str, data: bytes, deadline: Deadline) -> bool:
    return store.upload(key, io.BytesIO(data), len(data), crc32c(data), deadline)


def read(store: ObjectStore, key: str, offset: int, length: int, deadline: Deadline) -> bytes:
    buffer = bytearray(length)
    store.read_into(key, offset, memoryview(buffer), deadline)
    return bytes(buffer)


class TestSmallObjects:
    def test_an_empty_store_has_nothing(self, store: ObjectStore, deadline: Deadline) -> None:
        assert store.head("a/b", deadline) is None
        assert list(store.list("", deadline)) == []
        with pytest.raises(NotFound, match="a/b"):
            store.read("a/b", deadline)
        with pytest.raises(NotFound, match="a/b"):
            read(store, "a/b", 0, 1, deadline)
        with pytest.raises(NotFound, match="a/b"):
            read(store, "a/b", 0, 0, deadline)
        store.delete("a/b", deadline)

    @pytest.mark.parametrize("data", [b"", b"x", SMALL])
    def test_what_is_created_is_read(
        self, store: ObjectStore, deadline: Deadline, data: bytes
    ) -> None:
        assert store.create("a/b", data, deadline)
        found, etag = store.read("a/b", deadline)
        info = store.head("a/b", deadline)
        assert info is not None
        assert (found, info.key, info.size, info.etag) == (data, "a/b", len(data), etag)
        assert info.crc32c in (None, crc32c(data))

    def test_the_first_to_create_wins(self, store: ObjectStore, deadline: Deadline) -> None:
        assert store.create("a", b"first", deadline)
        assert not store.create("a", b"second", deadline)
        assert store.read("a", deadline)[0] == b"first"

    def test_a_limit_is_kept(self, store: ObjectStore, deadline: Deadline) -> None:
        store.create("a", b"12345", deadline)
        assert store.read("a", deadline, limit=5)[0] == b"12345"
        with pytest.raises(StoreError, match="expected 4 bytes at most"):
            store.read("a", deadline, limit=4)

    def test_what_is_deleted_is_gone(self, store: ObjectStore, deadline: Deadline) -> None:
        store.create("a", b"1", deadline)
        store.delete("a", deadline)
        assert store.head("a", deadline) is None
        store.delete("a", deadline)
        assert store.create("a", b"2", deadline)

    def test_replace_compares_and_swaps(self, store: ObjectStore, deadline: Deadline) -> None:
        first = store.replace("ref", b"1", None, deadline)
        assert store.read("ref", deadline) == (b"1", first)
        second = store.replace("ref", b"2", first, deadline)
        assert store.read("ref", deadline) == (b"2", second)
        assert second != first
        for expected in (first, None):
            with pytest.raises(PreconditionFailed, match="ref"):
                store.replace("ref", b"3", expected, deadline)
        with pytest.raises(PreconditionFailed, match="other"):
            store.replace("other", b"3", second, deadline)
        assert store.read("ref", deadline) == (b"2", second)
        assert store.head("other", deadline) is None
        assert unfinished(store, deadline) == []


class TestRaces:
    WRITERS = 16

    def race(self, write: Callable[[int], object]) -> list[object]:
        barrier = threading.Barrier(self.WRITERS)

        def run(number: int) -> object:
            barrier.wait()
            try:
                return write(number)
            except PreconditionFailed:
                return False

        with ThreadPoolExecutor(self.WRITERS) as pool:
            return list(pool.map(run, range(self.WRITERS)))

    def test_one_creator_wins(self, store: ObjectStore, deadline: Deadline) -> None:
        results = self.race(lambda n: store.create("a", b"%d" % n, deadline))
        assert results.count(True) == 1
        assert store.read("a", deadline)[0] == b"%d" % results.index(True)

    def test_one_swapper_wins(self, store: ObjectStore, deadline: Deadline) -> None:
        etag = store.replace("a", b"before", None, deadline)
        results = self.race(lambda n: store.replace("a", b"%d" % n, etag, deadline))
        (winner,) = [n for n, result in enumerate(results) if result]
        assert store.read("a", deadline) == (b"%d" % winner, results[winner])

    def test_one_uploader_wins(self, store: ObjectStore, deadline: Deadline) -> None:
        contents = [SMALL + b"%d" % n for n in range(self.WRITERS)]
        results = self.race(lambda n: upload(store, "a", contents[n], deadline))
        assert results.count(True) == 1
        assert store.read("a", deadline)[0] == contents[results.index(True)]
        assert unfinished(store, deadline) == []


class TestUploads:
    @pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
    def test_what_is_uploaded_is_read(
        self, store: ObjectStore, deadline: Deadline, data: bytes
    ) -> None:
        told: list[int] = []
        source = io.BytesIO(b"before" + data)
        source.seek(6)
        assert store.upload("a", source, len(data), crc32c(data), deadline, progress=told.append)
        info = store.head("a", deadline)
        assert info is not None
        assert info.size == len(data) == sum(told)
        assert info.crc32c in (None, crc32c(data))
        assert read(store, "a", 0, len(data), deadline) == data
        assert unfinished(store, deadline) == []

    def test_a_source_may_give_less_than_asked(
        self, store: ObjectStore, deadline: Deadline
    ) -> None:
        class Trickle(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                return super().read(min(size or 0, 700_001))

        assert store.upload("a", Trickle(LARGE), len(LARGE), crc32c(LARGE), deadline)
        assert read(store, "a", 0, len(LARGE), deadline) == LARGE

    def test_what_is_there_is_not_sent_again(self, store: ObjectStore, deadline: Deadline) -> None:
        store.create("a", b"1", deadline)
        source = io.BytesIO(SMALL)
        assert not store.upload("a", source, len(SMALL), crc32c(SMALL), deadline)
        assert source.tell() == 0
        assert store.read("a", deadline)[0] == b"1"

    @pytest.mark.parametrize("data", [b"1", SMALL, LARGE], ids=["byte", "small", "large"])
    @pytest.mark.parametrize("wrong", ["checksum", "too short", "too long"])
    def test_a_broken_promise_leaves_nothing(
        self, store: ObjectStore, deadline: Deadline, data: bytes, wrong: str
    ) -> None:
        size = len(data) + {"checksum": 0, "too short": 1, "too long": -1}[wrong]
        promised = crc32c(data[:size]) ^ (wrong == "checksum")
        with pytest.raises(IntegrityError, match="/a"):
            store.upload("a", io.BytesIO(data), size, promised, deadline)
        assert store.head("a", deadline) is None
        assert list(store.list("", deadline)) == []
        assert unfinished(store, deadline) == []

    @pytest.mark.parametrize("failure", [ConnectionResetError, KeyboardInterrupt])
    def test_a_failing_source_leaves_nothing(
        self, store: ObjectStore, deadline: Deadline, failure: type[BaseException]
    ) -> None:
        class Failing(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if self.tell() > PART:
                    raise failure("the source")
                return super().read(size)

        with pytest.raises(failure, match="the source"):
            store.upload("a", Failing(LARGE), len(LARGE), crc32c(LARGE), deadline)
        assert store.head("a", deadline) is None
        assert unfinished(store, deadline) == []

    def test_it_ends_by_its_deadline(self, store: ObjectStore, deadline: Deadline) -> None:
        soon = Deadline.after(0.3)

        class Slow(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                threading.Event().wait(soon.remaining())
                return super().read(size)

        with pytest.raises(DeadlineExceeded):
            store.upload("a", Slow(LARGE), len(LARGE), crc32c(LARGE), soon)
        store.close()
        assert store.head("a", deadline) is None
        assert unfinished(store, deadline) == []

    def test_a_killed_writer_leaves_nothing_visible(
        self, store: ObjectStore, deadline: Deadline
    ) -> None:
        child = subprocess.Popen(
            [sys.executable, "-c", _WRITER, store.url, str(PART)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"in the middle\n"
            # What is being written is not taken for what was left behind.
            store.create("other", b"", deadline)
            if not isinstance(store, GcsStore):
                assert len(unfinished(store, deadline)) == 1
            child.kill()
        assert store.head("a", deadline) is None
        assert [info.key for info in store.list("", deadline)] == ["other"]
        later = open_store(store.url)
        if isinstance(later, S3Store | GcsStore):
            later.part_size = PART
        assert upload(later, "a", LARGE, deadline)
        later.close()
        assert unfinished(store, deadline) == []
        assert read(store, "a", 0, len(LARGE), deadline) == LARGE


_WRITER = """
import io, sys
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.stores import open_store

store = open_store(sys.argv[1])
store.part_size = part = int(sys.argv[2])

class Source(io.RawIOBase):
    given = 0
    def read(self, size=-1):
        if self.given > part:
            print("in the middle", flush=True)
            sys.stdin.read()
        self.given += size
        return bytes(size)

store.upload("a", Source(), 3 * part, 0, Deadline.after(60))
"""


def begun(store: ObjectStore, deadline: Deadline) -> list[str]:
    return [item.token for item in store.begun_parts(deadline)]


def cut(data: bytes) -> list[tuple[int, memoryview]]:
    return [(i, memoryview(data)[i : i + PART]) for i in range(0, len(data), PART)]


def send(
    store: ObjectStore, token: str, data: bytes, deadline: Deadline, only: Sequence[int] = (0, 1, 2)
) -> list[Part]:
    pieces = cut(data)
    return [
        store.put_part(token, i, *pieces[i], crc32c(pieces[i][1]), deadline)
        for i in only
        if i < len(pieces)
    ]


class TestParts:
    """Objects that are sent in parts by whoever has the token."""

    @pytest.mark.parametrize("known", [True, False], ids=["to its key", "to no key yet"])
    @pytest.mark.parametrize("data", [SMALL, LARGE], ids=["one part", "three"])
    def test_several_processes_send_one_object(
        self, store: ObjectStore, deadline: Deadline, data: bytes, known: bool
    ) -> None:
        token = store.begin_parts("a/b" if known else None, deadline)
        parts = send(store, token, data, deadline, (2, 0))
        assert store.head("a/b", deadline) is None
        assert list(store.list("a", deadline)) == []
        assert begun(store, deadline) == [token]
        later = open_store(store.url)  # knows of the other what the token says
        parts += send(later, token, data, deadline, (1, 0))[: 1 if len(data) > PART else 0]
        parts.sort(key=lambda part: part.index)
        assert later.complete_parts(token, parts, "a/b", crc32c(data), deadline)
        assert read(store, "a/b", 0, len(data), deadline) == data
        info = store.head("a/b", deadline)
        assert info is not None
        assert info.crc32c in (None, crc32c(data))
        # Whoever did not learn that it was done may ask again.
        assert not later.complete_parts(token, parts, "a/b", crc32c(data), deadline)
        later.close()
        assert begun(store, deadline) == []
        assert [info.key for info in store.list("", deadline)] == ["a/b"]
        assert unfinished(store, deadline) == []

    @pytest.mark.parametrize("known", [True, False], ids=["to its key", "to no key yet"])
    def test_an_object_that_is_there_stays(
        self, store: ObjectStore, deadline: Deadline, known: bool
    ) -> None:
        token = store.begin_parts("a" if known else None, deadline)
        parts = send(store, token, LARGE, deadline)
        store.create("a", b"before", deadline)
        assert not store.complete_parts(token, parts, "a", crc32c(LARGE), deadline)
        assert store.read("a", deadline)[0] == b"before"
        assert begun(store, deadline) == []
        assert unfinished(store, deadline) == []

    def test_a_part_or_the_whole_is_checked(self, store: ObjectStore, deadline: Deadline) -> None:
        token = store.begin_parts(None, deadline)
        if isinstance(store, S3Store):
            with pytest.raises(IntegrityError):
                store.put_part(token, 0, 0, memoryview(SMALL), 1, deadline)
        parts = send(store, token, LARGE, deadline)
        for wrong, promised in ((parts[:2], crc32c(LARGE)), (parts, crc32c(LARGE) ^ 1)):
            with pytest.raises(IntegrityError, match="a"):
                store.complete_parts(token, wrong, "a", promised, deadline)
            assert store.head("a", deadline) is None
        assert store.complete_parts(token, parts, "a", crc32c(LARGE), deadline)

    def test_what_is_aborted_is_gone(self, store: ObjectStore, deadline: Deadline) -> None:
        for key in ("a", None):
            token = store.begin_parts(key, deadline)
            parts = send(store, token, LARGE, deadline)
            (item,) = store.begun_parts(deadline)
            assert 0 <= item.age < 60
            store.abort_parts(token, deadline)
            store.abort_parts(token, deadline)
            assert begun(store, deadline) == []
            with pytest.raises(NotFound):
                store.complete_parts(token, parts, "a", crc32c(LARGE), deadline)
            assert list(store.list("", deadline)) == []

    def test_a_copy_in_parts(
        self, store: ObjectStore, deadline: Deadline, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3_parts, "_COPY_WHOLE", 0)
        monkeypatch.setattr(s3_parts, "_COPY_PART", PART)
        token = store.begin_parts(None, deadline)
        parts = send(store, token, LARGE, deadline)
        assert store.complete_parts(token, parts, "a", crc32c(LARGE), deadline)
        assert read(store, "a", 0, len(LARGE), deadline) == LARGE
        info = store.head("a", deadline)
        assert info is not None
        assert info.crc32c in (None, crc32c(LARGE))
        assert [info.key for info in store.list("", deadline)] == ["a"]
        assert begun(store, deadline) == []

    def test_many_parts(self, store: ObjectStore, deadline: Deadline) -> None:
        if isinstance(store, S3Store):
            pytest.skip("the conformance of S3 is to parts of 5 MiB")
        data = LARGE[: 70 * 1000 + 1]
        token = store.begin_parts(None, deadline)
        pieces = [memoryview(data)[i : i + 1000] for i in range(0, len(data), 1000)]

        def one(index: int) -> Part:
            piece = pieces[index]
            return store.put_part(token, index, index * 1000, piece, crc32c(piece), deadline)

        with ThreadPoolExecutor(8) as pool:
            parts = list(pool.map(one, range(len(pieces))))
        assert store.complete_parts(token, parts, "a", crc32c(data), deadline)
        assert read(store, "a", 0, len(data), deadline) == data
        assert begun(store, deadline) == []


class TestRanges:
    EDGES = (
        *((0, 1), (0, len(LARGE)), (1, PART), (PART - 1, 2), (PART, PART)),
        *((len(LARGE) - 1, 1), (len(LARGE), 0), (7, 0)),
    )
    OUTSIDE = ((len(LARGE) - 1, 2), (len(LARGE), 1), (len(LARGE) + 1, 0), (1 << 40, 5), (-1, 1))

    def test_edges(self, store: ObjectStore, deadline: Deadline) -> None:
        upload(store, "large", LARGE, deadline)
        for offset, length in self.EDGES:
            found = read(store, "large", offset, length, deadline)
            assert found == LARGE[offset : offset + length], (offset, length)
        for offset, length in self.OUTSIDE:
            with pytest.raises(StoreError, match=rf"large.*offset.*{abs(offset)}"):
                read(store, "large", offset, length, deadline)

    def test_an_etag_is_held_to(self, store: ObjectStore, deadline: Deadline) -> None:
        first = store.replace("a", b"12345", None, deadline)
        buffer = bytearray(2)
        store.read_into("a", 3, memoryview(buffer), deadline, etag=first)
        assert buffer == b"45"
        store.replace("a", b"67890", first, deadline)
        for length in (2, 0):
            with pytest.raises(PreconditionFailed, match="a"):
                store.read_into("a", 3, memoryview(bytearray(length)), deadline, etag=first)

    def test_a_buffer_of_other_elements(self, store: ObjectStore, deadline: Deadline) -> None:
        store.create("a", bytes(range(64)), deadline)
        buffer = memoryview(bytearray(48)).cast("Q")
        store.read_into("a", 16, buffer, deadline)
        assert buffer.tobytes() == bytes(range(16, 64))


class TestKeys:
    def test_order_and_prefixes(self, store: ObjectStore, deadline: Deadline) -> None:
        keys = ["a+b", "a-b/c", "a.b", "a/b", "a/c/d", "a/c.d", "a0", "b/refs@1", "A"]
        for key in keys:
            store.create(key, key.encode(), deadline)
        listed = list(store.list("", deadline))
        assert [info.key for info in listed] == sorted(keys)
        for info in listed:
            same = store.head(info.key, deadline)
            assert same is not None
            assert (same.size, same.etag) == (info.size, info.etag)
        for prefix in ("a", "a/", "a/c", "a/c/", "a-", "b/refs@1", "nothing", "a/nothing/", "."):
            assert [info.key for info in store.list(prefix, deadline)] == sorted(
                key for key in keys if key.startswith(prefix)
            )

    def test_no_key_leads_out(self, store: ObjectStore, deadline: Deadline) -> None:
        calls: list[Callable[[str], object]] = [
            lambda key: store.head(key, deadline),
            lambda key: store.read(key, deadline),
            lambda key: read(store, key, 0, 1, deadline),
            lambda key: store.create(key, b"", deadline),
            lambda key: store.replace(key, b"", None, deadline),
            lambda key: upload(store, key, b"", deadline),
            lambda key: store.delete(key, deadline),
        ]
        for call, key in product(calls, BAD_KEYS):
            with pytest.raises(UsageError, match="object key"):
                call(key)
        assert unfinished(store, deadline) == []

    def test_no_prefix_leads_out(self, store: ObjectStore, deadline: Deadline) -> None:
        for prefix in ("/", "../", "a//", ".tmp/", "a b"):
            with pytest.raises(UsageError, match="object key"):
                list(store.list(prefix, deadline))


def test_a_deadline_that_is_over(store: ObjectStore, deadline: Deadline) -> None:
    store.create("a", b"1", deadline)
    over = Deadline.after(0)
    calls: list[Callable[[], object]] = [
        lambda: store.head("a", over),
        lambda: store.read("a", over),
        lambda: read(store, "a", 0, 1, over),
        lambda: store.create("b", b"", over),
        lambda: store.replace("b", b"", None, over),
        lambda: upload(store, "b", b"", over),
        lambda: list(store.list("", over)),
        lambda: store.delete("a", over),
    ]
    for call in calls:
        with pytest.raises(DeadlineExceeded):
            call()
    assert [info.key for info in store.list("", deadline)] == ["a"]


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///prefix", "s3://b/../c", "file://host/path", "gs:///p", "az://b"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(UsageError, match=r"origin|object key"):
        open_store(url)
