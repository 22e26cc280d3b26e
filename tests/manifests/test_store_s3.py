"""The S3 store's own: credentials, and what a network and a server can do to it.

Faults are made by a proxy before the real server, one for each request that is to suffer; what
passes through it is what the server said.
"""

from __future__ import annotations

import io
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.manifests.s3_proxy import (
    Exchange,
    Fault,
    Proxy,
    answer,
    cut,
    drip,
    error,
    flipped_answer,
    flipped_request,
    lost,
    refused,
    reset,
    silence,
    stall,
    with_answer,
    without,
)
from warmcast.infra.servers import Seaweed
from warmcast.manifests.checksum import crc32c, to_base64
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    CredentialsMissing,
    CredentialsRefused,
    DeadlineExceeded,
    IntegrityError,
    NotFound,
    PreconditionFailed,
    StoreError,
    StoreFull,
    StoreUnreachable,
    WarmcastError,
)
from warmcast.manifests.stores import http
from warmcast.manifests.stores.s3 import S3Store

PART = 5 << 20
DATA = os.urandom(1 << 20)
LARGE = DATA * 11


# Fixtures


@pytest.fixture
def store(proxy: Proxy, s3_url: str) -> Iterator[S3Store]:
    opened = S3Store(s3_url, part_size=PART)
    yield opened
    opened.close()


def upload(store: S3Store, key: str, data: bytes, deadline: Deadline) -> bool:
    return store.upload(key, io.BytesIO(data), len(data), crc32c(data), deadline)


def read(store: S3Store, key: str, offset: int, length: int, deadline: Deadline) -> bytes:
    buffer = bytearray(length)
    store.read_into(key, offset, memoryview(buffer), deadline)
    return bytes(buffer)


def uploads(store: S3Store, deadline: Deadline) -> list[str]:
    found = store.call(
        store.client.list_multipart_uploads, "", deadline, Prefix=store.name("x")[:-1]
    )
    return [upload["UploadId"] for upload in found.get("Uploads", ())]


# Tests


class TestCredentials:
    @pytest.fixture
    def calls(self, deadline: Deadline) -> list[Callable[[S3Store], object]]:
        return [
            lambda store: store.head("a", deadline),
            lambda store: store.read("a", deadline),
            lambda store: read(store, "a", 0, 1, deadline),
            lambda store: store.create("a", b"1", deadline),
            lambda store: store.replace("a", b"1", None, deadline),
            lambda store: upload(store, "a", b"1", deadline),
            lambda store: list(store.list("", deadline)),
            lambda store: store.delete("a", deadline),
        ]

    @pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
    def test_wrong(
        self,
        s3_url: str,
        calls: list[Callable[[S3Store], object]],
        monkeypatch: pytest.MonkeyPatch,
        name: str,
    ) -> None:
        monkeypatch.setenv(name, "wrong")
        store = S3Store(s3_url)
        for call in calls:
            with pytest.raises(CredentialsRefused, match=rf"{s3_url}.*403.*check AWS_"):
                call(store)
        store.close()

    def test_missing(
        self,
        s3_url: str,
        calls: list[Callable[[S3Store], object]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        store = S3Store(s3_url)
        for call in calls:
            with pytest.raises(CredentialsMissing, match=rf"{s3_url}.*set AWS_ACCESS_KEY_ID"):
                call(store)
        store.close()

    def test_no_message_holds_a_signature(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        proxy.fail(b"GET", *[refused] * 5)
        with pytest.raises(StoreUnreachable) as caught:
            store.read("a", deadline)
        chain: BaseException | None = caught.value
        while isinstance(chain, WarmcastError):
            assert "X-Amz" not in str(chain)
            chain = chain.__cause__


class TestBucket:
    def test_one_that_is_missing(self, s3_url: str, deadline: Deadline) -> None:
        store = S3Store("s3://no-such-bucket/prefix")
        assert store.head("a", deadline) is None
        calls: list[Callable[[], object]] = [
            lambda: store.read("a", deadline),
            lambda: store.create("a", b"1", deadline),
            lambda: store.replace("a", b"1", None, deadline),
            lambda: upload(store, "a", b"1", deadline),
            lambda: list(store.list("", deadline)),
        ]
        for call in calls:
            with pytest.raises(NotFound, match=r"no-such-bucket.*no such bucket"):
                call()
        store.close()

    def test_prefixes_do_not_meet(self, s3_url: str, deadline: Deadline) -> None:
        outer, inner = S3Store(s3_url), S3Store(f"{s3_url}/inner")
        inner.create("a", b"1", deadline)
        assert [info.key for info in outer.list("", deadline)] == ["inner/a"]
        assert [info.key for info in inner.list("", deadline)] == ["a"]
        outer.create("inner-not", b"1", deadline)
        assert [info.key for info in inner.list("", deadline)] == ["a"]
        outer.close()
        inner.close()

    def test_a_listing_of_several_pages(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        keys = [f"k{number}" for number in range(5)]
        for key in keys:
            store.create(key, b"", deadline)
        few = store.client.list_objects_v2
        store.client.list_objects_v2 = lambda **named: few(**named, MaxKeys=2)  # type: ignore[method-assign]
        assert [info.key for info in store.list("k", deadline)] == keys
        assert sum(b"list-type=2" in request for request in proxy.requests) == 3

    def test_checksums_over_parts_are_not_taken_for_the_whole(
        self, store: S3Store, deadline: Deadline
    ) -> None:
        name = store.name("a")
        made = store.call(
            store.client.create_multipart_upload,
            "a",
            deadline,
            Key=name,
            ChecksumAlgorithm="CRC32C",
        )
        part = {"PartNumber": 1, "ChecksumCRC32C": to_base64(crc32c(DATA))}
        sent = store.call(
            store.client.upload_part,
            "a",
            deadline,
            Key=name,
            UploadId=made["UploadId"],
            Body=DATA,
            **part,
        )
        store.call(
            store.client.complete_multipart_upload,
            "a",
            deadline,
            Key=name,
            UploadId=made["UploadId"],
            MultipartUpload={"Parts": [{**part, "ETag": sent["ETag"]}]},
        )
        info = store.head("a", deadline)
        assert info is not None
        assert info.crc32c is None
        assert store.read("a", deadline)[0] == DATA


class TestBrokenReads:
    @pytest.mark.parametrize("by_reset", [True, False], ids=["reset", "truncated"])
    def test_they_go_on_where_they_broke(
        self, proxy: Proxy, store: S3Store, deadline: Deadline, by_reset: bool
    ) -> None:
        store.create("a", DATA, deadline)
        proxy.fail(b"GET", cut(300_000, by_reset=by_reset), cut(0, by_reset=by_reset))
        assert read(store, "a", 5, len(DATA) - 10, deadline) == DATA[5:-5]
        proxy.fail(b"GET", cut(300_000, by_reset=by_reset))
        assert store.read("a", deadline)[0] == DATA

    def test_of_one_version(self, proxy: Proxy, store: S3Store, deadline: Deadline) -> None:
        etag = store.replace("a", DATA, None, deadline)

        def changed(exchange: Exchange) -> None:
            cut(300_000, by_reset=False)(exchange)
            store.replace("a", DATA[::-1], etag, deadline)

        proxy.fail(b"GET", changed)
        with pytest.raises(PreconditionFailed):
            read(store, "a", 0, len(DATA), deadline)

    def test_a_server_that_ignores_if_match(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        first = store.replace("a", b"1", None, deadline)
        store.replace("a", b"2", first, deadline)
        proxy.fail(b"GET", without(b"If-Match"))
        with pytest.raises(PreconditionFailed):
            store.read_into("a", 0, memoryview(bytearray(1)), deadline, etag=first)

    @pytest.mark.parametrize(
        "fault",
        [
            error("503 Slow Down", "SlowDown", "Retry-After: 0"),
            error("500 Internal Server Error", "InternalError"),
            error("429 Too Many Requests", ""),
            error("400 Bad Request", "RequestTimeout"),
            refused,
            lost,
        ],
        ids=["503", "500", "429", "timeout", "refused", "lost"],
    )
    @pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
    def test_what_is_worth_another_try(
        self, proxy: Proxy, store: S3Store, deadline: Deadline, method: str, fault: Fault
    ) -> None:
        store.create("a", DATA, deadline)
        if method == "HEAD" and fault not in (refused, lost):
            fault = answer("503 Slow Down", "Retry-After: 0")
        proxy.fail(method.encode(), fault)
        if method == "GET":
            assert read(store, "a", 1, 9, deadline) == DATA[1:10]
            proxy.fail(method.encode(), fault)
            assert store.read("a", deadline)[0] == DATA
        elif method == "HEAD":
            info = store.head("a", deadline)
            assert info is not None
            assert info.size == len(DATA)
        else:
            assert store.create("b", DATA, deadline)
            assert store.read("b", deadline)[0] == DATA
        assert not proxy.faults

    def test_tries_are_bounded(self, proxy: Proxy, store: S3Store, deadline: Deadline) -> None:
        proxy.fail(b"GET", *[error("503 Slow Down", "SlowDown")] * 6)
        with pytest.raises(StoreUnreachable, match="503 SlowDown, 5 times"):
            store.read("a", deadline)
        assert len(proxy.faults) == 1

    def test_a_wait_that_the_deadline_forbids(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        proxy.fail(b"GET", error("503 Slow Down", "SlowDown", "Retry-After: 3600"))
        with pytest.raises(DeadlineExceeded, match="503 SlowDown"):
            store.read("a", deadline)
        assert not deadline.expired

    def test_an_answer_that_ignores_the_range(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        store.create("a", DATA, deadline)
        proxy.fail(b"GET", *[without(b"Range")] * 3)
        assert read(store, "a", 0, 1000, deadline) == DATA[:1000]
        with pytest.raises(StoreError, match="ignores the range"):
            read(store, "a", 1000, 1000, deadline)
        with pytest.raises(StoreError, match=f"found {len(DATA)} bytes"):
            read(store, "a", 0, len(DATA) + 1, deadline)
        assert read(store, "a", 1000, 1000, deadline) == DATA[1000:2000]

    @pytest.mark.parametrize("found", [b"bytes 0-999/5000", b"bytes 1000-1998/5000", b"pages 1-2"])
    def test_an_answer_of_another_range(
        self, proxy: Proxy, store: S3Store, deadline: Deadline, found: bytes
    ) -> None:
        store.create("a", DATA, deadline)
        proxy.fail(b"GET", with_answer(rb"content-range: [^\r]*", b"Content-Range: " + found))
        with pytest.raises(StoreError, match=f"1000 bytes at offset 1000, found {found.decode()}"):
            read(store, "a", 1000, 1000, deadline)

    def test_a_small_object_that_was_damaged(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        store.create("a", b"12345", deadline)
        proxy.fail(b"GET", flipped_answer)
        with pytest.raises(IntegrityError, match="/a"):
            store.read("a", deadline)


class TestDeadlines:
    @pytest.mark.parametrize(
        "fault", [silence, stall(0), stall(1000), drip], ids=["silence", "head", "body", "drip"]
    )
    def test_a_read_ends_by_it(
        self, proxy: Proxy, store: S3Store, deadline: Deadline, fault: Fault
    ) -> None:
        store.create("a", DATA, deadline)
        for call in (
            lambda soon: read(store, "a", 0, len(DATA), soon),
            lambda soon: store.read("a", soon),
        ):
            proxy.fail(b"GET", fault)
            with pytest.raises(DeadlineExceeded, match="no answer in time"):
                call(Deadline.after(0.2))

    def test_a_stopped_server(
        self, seaweed_server: Seaweed, s3_url: str, deadline: Deadline
    ) -> None:
        store = S3Store(s3_url, part_size=PART)
        store.create("a", DATA, deadline)
        calls: list[Callable[[Deadline], object]] = [
            lambda soon: store.head("a", soon),
            lambda soon: store.read("a", soon),
            lambda soon: read(store, "a", 0, len(DATA), soon),
            lambda soon: store.create("b", DATA, soon),
            lambda soon: upload(store, "c", LARGE, soon),
            lambda soon: list(store.list("", soon)),
        ]
        seaweed_server.pause()
        try:
            for call in calls:
                with pytest.raises(DeadlineExceeded):
                    call(Deadline.after(0.2))
        finally:
            seaweed_server.resume()
        assert read(store, "a", 0, len(DATA), deadline) == DATA
        store.close()

    def test_silence_in_the_middle_of_an_upload(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        proxy.fail(b"PUT", *[silence] * 3)
        with pytest.raises(DeadlineExceeded):
            upload(store, "a", LARGE, Deadline.after(1))
        store.close()
        assert uploads(store, deadline) == []
        assert store.head("a", deadline) is None

    def test_nobody_listens(self, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
        store = S3Store(s3_url)
        for call in (store.head, store.read):
            with pytest.raises(StoreUnreachable, match=r"refused, 5 times"):
                call("a", Deadline.after(30))
        store.close()


class TestBrokenWrites:
    def test_a_lost_answer_is_not_taken_for_a_lost_race(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        proxy.fail(b"PUT", lost)
        assert store.create("a", b"1", deadline)
        proxy.fail(b"PUT", lost)
        etag = store.replace("b", b"1", None, deadline)
        proxy.fail(b"PUT", lost)
        etag = store.replace("b", b"2", etag, deadline)
        assert store.read("b", deadline) == (b"2", etag)
        assert not proxy.faults

    def test_nor_a_lost_race_for_a_lost_answer(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        etag = store.replace("a", b"1", None, deadline)

        def faster(exchange: Exchange) -> None:
            store.replace("a", b"theirs", etag, deadline)
            reset(exchange.client)

        proxy.fail(b"PUT", faster)
        with pytest.raises(PreconditionFailed):
            store.replace("a", b"ours, ", etag, deadline)
        assert store.read("a", deadline)[0] == b"theirs"

    @pytest.mark.parametrize("data", [DATA, LARGE], ids=["whole", "parts"])
    def test_bytes_damaged_on_their_way(
        self, proxy: Proxy, store: S3Store, deadline: Deadline, data: bytes
    ) -> None:
        proxy.fail(b"PUT", flipped_request)
        with pytest.raises(IntegrityError, match="/a"):
            upload(store, "a", data, deadline)
        assert store.head("a", deadline) is None
        assert uploads(store, deadline) == []

    @pytest.mark.parametrize("data", [DATA, LARGE], ids=["whole", "parts"])
    @pytest.mark.parametrize(
        ("fault", "raised"),
        [
            (error("507 Insufficient Storage", "InsufficientStorage"), StoreFull),
            (error("403 Forbidden", "QuotaExceeded"), StoreFull),
            (error("403 Forbidden", "AccessDenied"), CredentialsRefused),
            (error("400 Bad Request", "InvalidRequest"), StoreError),
        ],
        ids=["full", "quota", "denied", "refused"],
    )
    def test_a_refusal_leaves_nothing(
        self,
        proxy: Proxy,
        store: S3Store,
        deadline: Deadline,
        data: bytes,
        fault: Fault,
        raised: type[StoreError],
    ) -> None:
        proxy.fail(b"PUT", fault)
        with pytest.raises(raised) as caught:
            upload(store, "a", data, deadline)
        assert type(caught.value) is raised
        assert store.head("a", deadline) is None
        assert uploads(store, deadline) == []

    def test_each_part_may_break(self, proxy: Proxy, store: S3Store, deadline: Deadline) -> None:
        proxy.fail(b"PUT", refused, error("500 Internal Server Error", "InternalError"), lost)
        proxy.fail(b"POST", refused)
        told: list[int] = []
        assert store.upload(
            "a", io.BytesIO(LARGE), len(LARGE), crc32c(LARGE), deadline, progress=told.append
        )
        assert sum(told) == len(LARGE)
        info = store.head("a", deadline)
        assert info is not None
        assert info.crc32c == crc32c(LARGE)
        assert uploads(store, deadline) == []
        assert not proxy.faults

    def test_an_abort_that_failed_is_made_good_on_closing(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        proxy.fail(b"PUT", error("400 Bad Request", "InvalidRequest"))
        proxy.fail(b"DELETE", *[refused] * 5)
        with pytest.raises(StoreError):
            upload(store, "a", LARGE, deadline)
        assert len(uploads(store, deadline)) == 1
        store.close()
        assert uploads(store, deadline) == []

    def test_somebody_else_was_faster(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        """Their completion aborts ours; we find the object there, and have nothing to complain."""

        class Slow(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if self.tell() == PART:
                    assert upload(store, "a", LARGE, deadline)
                return super().read(size)

        assert not store.upload("a", Slow(LARGE), len(LARGE), crc32c(LARGE), deadline)
        assert uploads(store, deadline) == []
        assert read(store, "a", 0, len(LARGE), deadline) == LARGE

    def test_somebody_else_was_faster_in_one_request(
        self, store: S3Store, deadline: Deadline
    ) -> None:
        class Slow(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if self.tell() == PART:
                    assert store.create("a", b"theirs", deadline)
                return super().read(size)

        assert not store.upload("a", Slow(LARGE), len(LARGE), crc32c(LARGE), deadline)
        assert uploads(store, deadline) == []
        assert store.read("a", deadline)[0] == b"theirs"

    def test_all_that_is_sent_carries_its_checksum(
        self, proxy: Proxy, store: S3Store, deadline: Deadline
    ) -> None:
        upload(store, "large", LARGE, deadline)
        upload(store, "small", DATA, deadline)
        sent = [request for request in proxy.requests if request.startswith(b"PUT")]
        assert len(sent) == 4
        assert all(b"\r\nx-amz-checksum-crc32c: " in request for request in sent)

    def test_no_thread_stays(self, store: S3Store, deadline: Deadline) -> None:
        upload(store, "a", LARGE, deadline)
        assert not [t for t in threading.enumerate() if t.name.startswith("warmcast-upload")]
