"""The store of Google Cloud Storage on its own: tokens, what a network and a server can do to it,
and what fake-gcs-server is no judge of: a proxy before it answers there as Google does.
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth.compute_engine import _metadata

from tests.manifests.gcs_proxy import GcsProxy, error, flipped_media, without_condition
from tests.manifests.s3_proxy import (
    Exchange,
    Fault,
    Proxy,
    answer,
    cut,
    drip,
    flipped_answer,
    lost,
    passed,
    refused,
    reset,
    silence,
    stall,
    with_answer,
    without,
)
from warmcast.infra.servers import FakeGcs
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
    UsageError,
    WarmcastError,
)
from warmcast.manifests.stores import http, open_store
from warmcast.manifests.stores.gcs import GcsStore

PART = 1 << 20
DATA = os.urandom(1 << 20)
LARGE = DATA * 3 + b"and a last part that is shorter"
WAYS = ["whole", "parts"]
MEDIA = b"GET /download"
METADATA = b"GET /storage"

Calls = list[Callable[[GcsStore], object]]


# Fixtures


@pytest.fixture
def proxy(gcs_server: FakeGcs, gcs_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsProxy]:
    """A proxy before the server, through which this test's requests go."""
    opened = GcsProxy(address(gcs_server))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", opened.url)
    # Backoff stays; that it takes its time is not what is tested.
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
    yield opened
    opened.close()


@pytest.fixture
def store(proxy: GcsProxy, gcs_url: str) -> Iterator[GcsStore]:
    opened = GcsStore(gcs_url, part_size=PART)
    yield opened
    opened.close()


def address(server: FakeGcs) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


@pytest.fixture
def bare(gcs_server: FakeGcs, gcs_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that answers as fake-gcs-server does."""
    opened = Proxy(address(gcs_server))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", opened.url)
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
    yield opened
    opened.close()


@dataclass
class Tokens:
    """A server that gives tokens: of an account's own, and of a machine."""

    url: str
    given: list[str] = field(default_factory=list)
    refusals: list[tuple[int, str]] = field(default_factory=list)
    silent: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    def token(self) -> tuple[int, str]:
        if self.silent:
            self.over.wait()
        if self.refusals:
            return self.refusals.pop(0)
        self.given.append(f"token-{uuid4().hex}")
        found = {"access_token": self.given[-1], "expires_in": 3600, "token_type": "Bearer"}
        return 200, json.dumps(found)


@pytest.fixture
def tokens() -> Iterator[Tokens]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(*tokens.token())

        def do_GET(self) -> None:
            if self.path.startswith("/computeMetadata/v1/instance/service-accounts/default/token"):
                self.answer(*tokens.token())
            elif "service-accounts" in self.path:
                self.answer(200, json.dumps({"email": "default", "scopes": [], "aliases": []}))
            else:
                self.answer(200, "computeMetadata/")

        def answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Metadata-Flavor", "Google")
            with suppress(ConnectionError):  # whoever asked may have gone by its deadline
                self.end_headers()
                self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    tokens = Tokens(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield tokens
    tokens.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="session")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


@pytest.fixture
def with_tokens(proxy: GcsProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is none for tests: whoever asks it needs a token."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setenv("API_ENDPOINT_OVERRIDE", proxy.url)
    proxy.tokens = set()


@pytest.fixture
def account(
    with_tokens: None,
    tokens: Tokens,
    private_key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The file of an account, which the environment names."""
    path = tmp_path / "account.json"
    found = {
        "type": "service_account",
        "client_email": "worker@example.iam.gserviceaccount.com",
        "private_key": private_key,
        "private_key_id": "1",
        "project_id": "example",
        "token_uri": f"{tokens.url}/token",
    }
    path.write_text(json.dumps(found))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    return path


@pytest.fixture
def good(proxy: GcsProxy, tokens: Tokens) -> None:
    """Every token that was given is good."""
    proxy.tokens = _Given(tokens)


class _Given(set[str]):
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __contains__(self, token: object) -> bool:
        return token in self._tokens.given


@pytest.fixture
def calls(deadline: Deadline) -> Calls:
    return [
        lambda store: store.head("a", deadline),
        lambda store: store.read("a", deadline),
        lambda store: read(store, "a", 0, 1, deadline),
        lambda store: store.create("a", b"1", deadline),
        lambda store: store.replace("b", b"1", None, deadline),
        lambda store: upload(store, "c", b"1", deadline),
        lambda store: upload(store, "d", LARGE, deadline),
        lambda store: list(store.list("", deadline)),
        lambda store: store.delete("a", deadline),
    ]


def upload(store: GcsStore, key: str, data: bytes, deadline: Deadline) -> bool:
    return store.upload(key, io.BytesIO(data), len(data), crc32c(data), deadline)


def read(store: GcsStore, key: str, offset: int, length: int, deadline: Deadline) -> bytes:
    buffer = bytearray(length)
    store.read_into(key, offset, memoryview(buffer), deadline)
    return bytes(buffer)


# Tests


class TestCredentials:
    def test_an_account(
        self, account: Path, good: None, gcs_url: str, tokens: Tokens, calls: Calls
    ) -> None:
        store = GcsStore(gcs_url, part_size=PART)
        for call in calls[3:] + calls[:1]:
            call(store)
        assert len(tokens.given) == 1
        store.close()

    def test_the_machine(
        self,
        with_tokens: None,
        good: None,
        gcs_url: str,
        tokens: Tokens,
        deadline: Deadline,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        place = tokens.url.removeprefix("http://")
        monkeypatch.delenv("NO_GCE_CHECK")
        monkeypatch.setenv("GCE_METADATA_IP", place)
        monkeypatch.setattr(_metadata, "_GCE_METADATA_HOST", place)
        store = GcsStore(gcs_url)
        assert store.create("a", b"1", deadline)
        assert store.read("a", deadline)[0] == b"1"
        assert len(tokens.given) == 1
        store.close()

    def test_no_machine_of_google(
        self, with_tokens: None, gcs_url: str, deadline: Deadline, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        monkeypatch.delenv("NO_GCE_CHECK")
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{port}")
        store = GcsStore(gcs_url)
        with pytest.raises(CredentialsMissing):
            store.head("a", deadline)
        store.close()

    def test_none(self, with_tokens: None, gcs_url: str, calls: Calls) -> None:
        store = GcsStore(gcs_url, part_size=PART)
        for call in calls:
            with pytest.raises(
                CredentialsMissing, match=rf"{gcs_url}.*set GOOGLE_APPLICATION_CREDENTIALS"
            ):
                call(store)
        store.close()

    @pytest.mark.parametrize("content", [None, "", "{}", '{"type": "service_account"}'])
    def test_a_file_that_is_none(
        self, account: Path, gcs_url: str, deadline: Deadline, content: str | None
    ) -> None:
        account.unlink() if content is None else account.write_text(content)
        store = GcsStore(gcs_url)
        with pytest.raises(CredentialsMissing, match=r"found .*; set GOOGLE_APPLICATION_CRED"):
            store.head("a", deadline)
        store.close()

    def test_none_is_sent_where_none_is_wanted(
        self,
        with_tokens: None,
        proxy: GcsProxy,
        gcs_url: str,
        calls: Calls,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("CLOUDSDK_AUTH_DISABLE_CREDENTIALS", "true")
        store = GcsStore(gcs_url, part_size=PART)
        for call in calls:
            with pytest.raises(CredentialsRefused, match=rf"{gcs_url}.*401 Invalid Credentials"):
                call(store)
        proxy.tokens = None
        for call in calls[3:] + calls[:1]:
            call(store)
        assert not [r for r in proxy.requests if b"\r\nauthorization" in r.lower()]
        store.close()

    def test_a_token_that_expired_is_renewed(
        self, account: Path, proxy: GcsProxy, gcs_url: str, tokens: Tokens, deadline: Deadline
    ) -> None:
        store = GcsStore(gcs_url, part_size=PART)
        with pytest.raises(CredentialsRefused, match=r"401 Invalid Credentials; check GOOGLE_"):
            store.head("a", deadline)
        assert len(tokens.given) == 2  # a new one was got, once, and was as bad
        proxy.tokens = {tokens.given[-1]}
        assert upload(store, "a", LARGE, deadline)
        calls: list[tuple[object, Callable[[], object]]] = [
            (LARGE[5:15], lambda: read(store, "a", 5, 10, deadline)),
            (LARGE, lambda: store.read("a", deadline)[0]),
            (True, lambda: store.create("b", b"1", deadline)),
            (True, lambda: upload(store, "c", LARGE, deadline)),
            (["a", "b", "c"], lambda: [info.key for info in store.list("", deadline)]),
        ]
        for expected, call in calls:
            before = len(tokens.given)
            proxy.tokens = _After(tokens, before)
            assert call() == expected
            assert len(tokens.given) == before + 1
        store.close()

    def test_one_renews_for_all(
        self, account: Path, proxy: GcsProxy, gcs_url: str, tokens: Tokens, deadline: Deadline
    ) -> None:
        proxy.tokens = _Given(tokens)
        store = GcsStore(gcs_url)
        store.create("a", DATA, deadline)
        proxy.tokens = _After(tokens, 1)
        barrier = threading.Barrier(8)

        def run(number: int) -> bytes:
            barrier.wait()
            return read(store, "a", number, 1, deadline)

        with ThreadPoolExecutor(8) as pool:
            assert b"".join(pool.map(run, range(8))) == DATA[:8]
        assert len(tokens.given) == 2
        store.close()

    def test_an_account_that_is_no_more(
        self, account: Path, gcs_url: str, tokens: Tokens, deadline: Deadline
    ) -> None:
        gone = json.dumps({"error": "invalid_grant", "error_description": "account not found"})
        tokens.refusals = [(400, gone)]
        store = GcsStore(gcs_url)
        with pytest.raises(CredentialsRefused, match=rf"{gcs_url}/a.*account not found.*check"):
            store.head("a", deadline)
        store.close()

    def test_tokens_that_come_late(
        self, account: Path, good: None, gcs_url: str, tokens: Tokens, deadline: Deadline
    ) -> None:
        tokens.refusals = [(503, "busy"), (500, "{}"), (429, "")]
        store = GcsStore(gcs_url)
        assert store.create("a", b"1", deadline)
        assert store.read("a", deadline)[0] == b"1"
        store.close()

    def test_tokens_that_do_not_come(
        self, account: Path, gcs_url: str, tokens: Tokens, deadline: Deadline
    ) -> None:
        tokens.refusals = [(503, "busy")] * 5
        store = GcsStore(gcs_url)
        with pytest.raises(StoreUnreachable, match=r"503 where a token was asked for, 5 times"):
            store.head("a", deadline)
        tokens.silent = True
        with pytest.raises(DeadlineExceeded):
            store.head("a", Deadline.after(0.2))
        with pytest.raises(DeadlineExceeded):
            read(store, "a", 0, 1, Deadline.after(0.2))
        store.close()

    def test_no_message_holds_a_token(
        self, account: Path, good: None, proxy: GcsProxy, gcs_url: str, tokens: Tokens,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        store = GcsStore(gcs_url, part_size=PART)
        failures: list[WarmcastError] = []
        for call in (
            lambda: store.read("a", deadline),
            lambda: store.create("a", b"1", deadline),
            lambda: upload(store, "a", LARGE, deadline),
        ):
            proxy.fail(MEDIA, *[refused] * 5)
            proxy.fail(b"POST /upload/storage/v1/b/warmcast-tests/o?uploadType=m", *[refused] * 5)
            proxy.fail(b"PUT", *[refused] * 5)
            with pytest.raises(StoreUnreachable) as caught:
                call()
            failures.append(caught.value)
            proxy.faults.clear()
        for failed in failures:
            chain: BaseException | None = failed
            while isinstance(chain, WarmcastError):
                assert not re.search(r"token-|session-|Bearer", str(chain))
                chain = chain.__cause__
        store.close()


class _After(_Given):
    """The tokens that are given from now on."""

    def __init__(self, tokens: Tokens, before: int) -> None:
        super().__init__(tokens)
        self._before = before

    def __contains__(self, token: object) -> bool:
        return token in self._tokens.given[self._before :]


class TestBucket:
    def test_one_that_is_missing(self, proxy: GcsProxy, deadline: Deadline, calls: Calls) -> None:
        store = GcsStore("gs://no-such-bucket/prefix", part_size=PART)
        assert store.head("a", deadline) is None
        message = "The specified bucket does not exist."
        for call in calls[1:-1]:
            # The server says no more than 404; this is what Google says.
            for method in (MEDIA, b"POST", b"GET /storage/v1/b/no-such-bucket/o?"):
                proxy.fail(method, error("404 Not Found", "notFound", message))
            with pytest.raises(NotFound, match=r"no-such-bucket.*no such bucket"):
                call(store)
            proxy.faults.clear()
        store.close()

    def test_prefixes_do_not_meet(self, gcs_url: str, deadline: Deadline) -> None:
        outer, inner = GcsStore(gcs_url), GcsStore(f"{gcs_url}/inner")
        inner.create("a", b"1", deadline)
        assert [info.key for info in outer.list("", deadline)] == ["inner/a"]
        assert [info.key for info in inner.list("", deadline)] == ["a"]
        outer.create("inner-not", b"1", deadline)
        assert [info.key for info in inner.list("", deadline)] == ["a"]
        outer.close()
        inner.close()

    def test_a_listing_of_several_pages(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        keys = [f"k{number}" for number in range(5)]
        for key in keys:
            store.create(key, b"", deadline)
        store.page_size = 2
        proxy.requests.clear()
        assert [info.key for info in store.list("k", deadline)] == keys
        assert len(proxy.requests) == 3
        proxy.fail(b"GET /storage", refused, refused)
        assert [info.key for info in store.list("k", deadline)] == keys

    @pytest.mark.parametrize("url", ["127.0.0.1:1", "localhost"])
    def test_an_emulator_without_a_scheme(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        with pytest.raises(UsageError, match=r"STORAGE_EMULATOR_HOST: expected http://host:port"):
            GcsStore("gs://b/p")

    def test_nothing_is_unpacked(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        store.create("a", DATA, deadline)
        proxy.requests.clear()
        store.read("a", deadline)
        read(store, "a", 0, 1, deadline)
        asked = [request.lower() for request in proxy.requests if request.startswith(MEDIA)]
        assert len(asked) == 2
        assert all(b"\r\naccept-encoding: gzip" in request for request in asked)


class TestBrokenReads:
    @pytest.mark.parametrize("by_reset", [True, False], ids=["reset", "truncated"])
    def test_they_go_on_where_they_broke(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline, by_reset: bool
    ) -> None:
        store.create("a", DATA, deadline)
        proxy.fail(MEDIA, cut(300_000, by_reset=by_reset), cut(0, by_reset=by_reset))
        proxy.requests.clear()
        assert read(store, "a", 5, len(DATA) - 10, deadline) == DATA[5:-5]
        conditions = [b"ifGenerationMatch" in request for request in proxy.requests]
        assert conditions == [False, True, True]  # of the version that it began with
        proxy.fail(MEDIA, cut(300_000, by_reset=by_reset))
        assert store.read("a", deadline)[0] == DATA

    def test_of_one_version(self, proxy: GcsProxy, store: GcsStore, deadline: Deadline) -> None:
        etag = store.replace("a", DATA, None, deadline)

        def changed(exchange: Exchange) -> None:
            cut(300_000, by_reset=False)(exchange)
            store.replace("a", DATA[::-1], etag, deadline)

        proxy.fail(MEDIA, changed)
        with pytest.raises(PreconditionFailed):
            read(store, "a", 0, len(DATA), deadline)

    def test_a_reader_is_of_one_version(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        etag = store.replace("a", DATA, None, deadline)
        reader = store.reader("a", deadline)
        buffer = bytearray(10)
        proxy.requests.clear()
        reader.read_into(0, memoryview(buffer), deadline)
        assert bytes(buffer) == DATA[:10]
        assert all(b"ifGenerationMatch=%b" % etag.encode() in r for r in proxy.requests)
        etag = store.replace("a", DATA[::-1], etag, deadline)
        with pytest.raises(PreconditionFailed, match="/a"):
            reader.read_into(10, memoryview(buffer), deadline)
        store.delete("a", deadline)
        with pytest.raises(NotFound, match="/a"):
            reader.read_into(10, memoryview(buffer), deadline)

    def test_a_server_that_ignores_the_condition(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        first = store.replace("a", b"1", None, deadline)
        store.replace("a", b"2", first, deadline)
        proxy.fail(MEDIA, without_condition)
        with pytest.raises(PreconditionFailed):
            store.read_into("a", 0, memoryview(bytearray(1)), deadline, etag=first)

    @pytest.mark.parametrize("etag", ["", "0", "-1", "1.5", '"abc"', "١", "1&alt=json"])
    def test_an_etag_that_no_object_has(
        self, store: GcsStore, deadline: Deadline, etag: str
    ) -> None:
        store.create("a", b"1", deadline)
        with pytest.raises(PreconditionFailed):
            store.read_into("a", 0, memoryview(bytearray(1)), deadline, etag=etag)
        with pytest.raises(PreconditionFailed):
            store.replace("a", b"2", etag, deadline)
        assert store.read("a", deadline)[0] == b"1"

    @pytest.mark.parametrize(
        "fault",
        [
            error("503 Service Unavailable", "backendError", "", "Retry-After: 0"),
            error("500 Internal Server Error", "internalError"),
            error("429 Too Many Requests", "rateLimitExceeded"),
            error("403 Forbidden", "userRateLimitExceeded"),
            answer("408 Request Timeout"),
            refused,
            lost,
        ],
        ids=["503", "500", "429", "rate", "408", "refused", "lost"],
    )
    @pytest.mark.parametrize("method", [MEDIA, METADATA, b"POST"])
    def test_what_is_worth_another_try(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline, method: bytes, fault: Fault
    ) -> None:
        store.create("a", DATA, deadline)
        proxy.fail(method, fault)
        if method == MEDIA:
            assert read(store, "a", 1, 9, deadline) == DATA[1:10]
            proxy.fail(method, fault)
            assert store.read("a", deadline)[0] == DATA
        elif method == METADATA:
            info = store.head("a", deadline)
            assert info is not None
            assert (info.size, info.crc32c) == (len(DATA), crc32c(DATA))
        else:
            assert store.create("b", DATA, deadline)
            assert store.read("b", deadline)[0] == DATA
        assert not proxy.faults

    def test_tries_are_bounded(self, proxy: GcsProxy, store: GcsStore, deadline: Deadline) -> None:
        proxy.fail(MEDIA, *[error("503 Service Unavailable", "backendError", "busy")] * 6)
        with pytest.raises(StoreUnreachable, match="503 busy, 5 times"):
            store.read("a", deadline)
        assert len(proxy.faults) == 1

    def test_a_wait_that_the_deadline_forbids(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        later = error("503 Service Unavailable", "backendError", "busy", "Retry-After: 3600")
        for method, call in (
            (MEDIA, lambda: store.read("a", deadline)),
            (METADATA, lambda: store.head("a", deadline)),
            (b"PUT", lambda: upload(store, "a", LARGE, deadline)),
        ):
            proxy.fail(method, later)
            with pytest.raises(DeadlineExceeded, match="503 busy"):
                call()
        assert not deadline.expired

    def test_an_answer_that_ignores_the_range(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        store.create("a", DATA, deadline)
        proxy.fail(MEDIA, *[without(b"Range")] * 3)
        assert read(store, "a", 0, 1000, deadline) == DATA[:1000]
        with pytest.raises(StoreError, match="ignores the range"):
            read(store, "a", 1000, 1000, deadline)
        with pytest.raises(StoreError, match=f"found {len(DATA)} bytes"):
            read(store, "a", 0, len(DATA) + 1, deadline)
        assert read(store, "a", 1000, 1000, deadline) == DATA[1000:2000]

    @pytest.mark.parametrize("found", [b"bytes 0-999/5000", b"bytes 1000-1998/5000", b"pages 1-2"])
    def test_an_answer_of_another_range(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline, found: bytes
    ) -> None:
        store.create("a", DATA, deadline)
        proxy.fail(MEDIA, with_answer(rb"content-range: [^\r]*", b"Content-Range: " + found))
        with pytest.raises(StoreError, match=f"1000 bytes at offset 1000, found {found.decode()}"):
            read(store, "a", 1000, 1000, deadline)

    def test_a_small_object_that_was_damaged(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        store.create("a", b"12345", deadline)
        proxy.fail(MEDIA, flipped_answer)
        with pytest.raises(IntegrityError, match="/a"):
            store.read("a", deadline)

    @pytest.mark.parametrize(
        ("body", "raised"),
        [("[]", StoreError), ('{"error": []}', StoreError), ("\x00\x1b[31m" * 99, StoreError)],
    )
    def test_answers_that_say_nothing(
        self,
        proxy: GcsProxy,
        store: GcsStore,
        deadline: Deadline,
        body: str,
        raised: type[StoreError],
    ) -> None:
        proxy.fail(MEDIA, answer("418 I'm a teapot", body=body))
        with pytest.raises(raised, match=r"expected success, found 418") as caught:
            store.read("a", deadline)
        assert str(caught.value).isprintable()


class TestDeadlines:
    @pytest.mark.parametrize(
        "fault", [silence, stall(0), stall(1000), drip], ids=["silence", "head", "body", "drip"]
    )
    def test_a_read_ends_by_it(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline, fault: Fault
    ) -> None:
        store.create("a", DATA, deadline)
        for call in (
            lambda soon: read(store, "a", 0, len(DATA), soon),
            lambda soon: store.read("a", soon),
        ):
            proxy.fail(MEDIA, fault)
            with pytest.raises(DeadlineExceeded, match="no answer in time"):
                call(Deadline.after(0.2))

    @pytest.mark.parametrize("fault", [silence, stall(5), drip], ids=["silence", "body", "drip"])
    def test_so_does_everything_that_the_library_asks(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline, fault: Fault
    ) -> None:
        store.create("a", DATA, deadline)
        for call in (
            lambda soon: store.head("a", soon),
            lambda soon: store.create("b", DATA, soon),
            lambda soon: list(store.list("", soon)),
        ):
            proxy.fail(METADATA, fault)
            proxy.fail(b"POST", fault)
            with pytest.raises(DeadlineExceeded, match="no answer in time"):
                call(Deadline.after(0.2))
            proxy.faults.clear()

    def test_a_stopped_server(
        self, gcs_server: FakeGcs, gcs_url: str, deadline: Deadline, calls: Calls
    ) -> None:
        store = GcsStore(gcs_url, part_size=PART)
        store.create("a", DATA, deadline)
        stopped: list[Callable[[Deadline], object]] = [
            lambda soon: store.head("a", soon),
            lambda soon: store.read("a", soon),
            lambda soon: read(store, "a", 0, len(DATA), soon),
            lambda soon: store.create("b", DATA, soon),
            lambda soon: upload(store, "c", LARGE, soon),
            lambda soon: list(store.list("", soon)),
            lambda soon: store.delete("b", soon),
        ]
        gcs_server.pause()
        try:
            for call in stopped:
                with pytest.raises(DeadlineExceeded):
                    call(Deadline.after(0.2))
        finally:
            gcs_server.resume()
        assert read(store, "a", 0, len(DATA), deadline) == DATA
        store.close()

    def test_silence_in_the_middle_of_an_upload(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        proxy.fail(b"PUT", silence)
        with pytest.raises(DeadlineExceeded):
            upload(store, "a", LARGE, Deadline.after(0.5))
        store.close()
        assert proxy.unfinished == []
        assert store.head("a", deadline) is None

    def test_nobody_listens(self, gcs_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
        store = GcsStore(gcs_url)
        for call in (store.head, store.read):
            with pytest.raises(StoreUnreachable, match=r"refused, 5 times"):
                call("a", Deadline.after(30))
        store.close()


class TestBrokenWrites:
    def test_a_lost_answer_is_not_taken_for_a_lost_race(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        proxy.fail(b"POST", lost)
        assert store.create("a", b"1", deadline)
        proxy.fail(b"POST", lost)
        etag = store.replace("b", b"1", None, deadline)
        proxy.fail(b"POST", lost)
        etag = store.replace("b", b"2", etag, deadline)
        assert store.read("b", deadline) == (b"2", etag)
        assert not proxy.faults

    def test_nor_a_lost_race_for_a_lost_answer(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        etag = store.replace("a", b"1", None, deadline)

        def faster(exchange: Exchange) -> None:
            store.replace("a", b"theirs", etag, deadline)
            reset(exchange.client)

        proxy.fail(b"POST", faster)
        with pytest.raises(PreconditionFailed):
            store.replace("a", b"ours, ", etag, deadline)
        assert store.read("a", deadline)[0] == b"theirs"

    @pytest.mark.parametrize(("data", "method"), [(DATA, b"POST"), (LARGE, b"PUT")], ids=WAYS)
    def test_bytes_damaged_on_their_way(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline, data: bytes, method: bytes
    ) -> None:
        proxy.fail(method, flipped_media)
        with pytest.raises(IntegrityError, match=r"/a.*CRC32C.*send them again"):
            upload(store, "a", data, deadline)
        assert store.head("a", deadline) is None
        assert proxy.unfinished == []
        assert store.unfinished == set()

    @pytest.mark.parametrize(("data", "method"), [(DATA, b"POST"), (LARGE, b"PUT")], ids=WAYS)
    def test_a_server_that_takes_them_nevertheless(
        self, bare: Proxy, gcs_url: str, deadline: Deadline, data: bytes, method: bytes
    ) -> None:
        store = GcsStore(gcs_url, part_size=PART)
        bare.fail(method, flipped_media)
        with pytest.raises(IntegrityError, match=r"/a.*send them again"):
            upload(store, "a", data, deadline)
        assert store.head("a", deadline) is None
        assert upload(store, "a", data, deadline)
        store.close()

    def test_a_server_that_ends_an_upload_when_it_is_asked(
        self, bare: Proxy, gcs_url: str, deadline: Deadline
    ) -> None:
        store = GcsStore(gcs_url, part_size=PART)
        bare.fail(b"PUT", passed, refused)
        with pytest.raises(IntegrityError, match=rf"/a: expected {len(LARGE)} .*found {PART} "):
            upload(store, "a", LARGE, deadline)
        assert store.head("a", deadline) is None
        store.close()

    @pytest.mark.parametrize(
        ("data", "method"),
        [(DATA, b"POST"), (LARGE, b"POST"), (LARGE, b"PUT")],
        ids=["whole", "session", "parts"],
    )
    @pytest.mark.parametrize(
        ("fault", "raised"),
        [
            (error("507 Insufficient Storage", ""), StoreFull),
            (error("403 Forbidden", "quotaExceeded", "over quota"), StoreFull),
            (error("403 Forbidden", "forbidden", "no storage.objects.create"), CredentialsRefused),
            (error("400 Bad Request", "invalid", "no"), StoreError),
        ],
        ids=["full", "quota", "denied", "invalid"],
    )
    def test_a_refusal_leaves_nothing(
        self,
        proxy: GcsProxy,
        store: GcsStore,
        deadline: Deadline,
        data: bytes,
        method: bytes,
        fault: Fault,
        raised: type[StoreError],
    ) -> None:
        proxy.fail(method, fault)
        with pytest.raises(raised, match="/a") as caught:
            upload(store, "a", data, deadline)
        assert type(caught.value) is raised
        assert store.head("a", deadline) is None
        assert proxy.unfinished == []
        assert store.unfinished == set()

    def test_each_part_may_break(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        busy = error("503 Service Unavailable", "backendError")
        proxy.fail(b"POST", refused)
        # A part does not arrive, then the question how far it came; the part's answer is lost.
        proxy.fail(b"PUT", refused, busy, refused, passed, lost, passed)
        proxy.fail(b"PUT", busy, lost, passed, passed, answer("500 Oops"))
        told: list[int] = []
        assert store.upload(
            "a", io.BytesIO(LARGE), len(LARGE), crc32c(LARGE), deadline, progress=told.append
        )
        assert sum(told) == len(LARGE)
        assert store.read("a", deadline)[0] == LARGE
        assert proxy.unfinished == []
        assert not proxy.faults

    def test_the_last_answer_is_lost(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        proxy.fail(b"PUT", *[passed] * 3, lost)
        assert upload(store, "a", LARGE, deadline)
        assert not proxy.faults
        assert store.read("a", deadline)[0] == LARGE

    def test_the_last_answer_is_lost_and_the_session_with_it(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        gone = error("410 Gone", "uploadGone")
        proxy.fail(b"PUT", *[passed] * 3, lost, gone)
        assert upload(store, "a", LARGE, deadline)
        assert store.read("a", deadline)[0] == LARGE
        proxy.fail(b"PUT", gone)
        with pytest.raises(StoreError, match=r"/b: .*found 410; start it again"):
            upload(store, "b", LARGE, deadline)
        assert store.head("b", deadline) is None
        assert store.unfinished == set()

    @pytest.mark.parametrize("kept", [0, 256 << 10, 512 << 10])
    def test_a_server_that_keeps_a_part_of_a_part(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline, kept: int
    ) -> None:
        proxy.keep = kept
        assert upload(store, "a", LARGE, deadline)
        assert store.read("a", deadline)[0] == LARGE
        assert len([r for r in proxy.requests if r.startswith(b"PUT")]) > 4

    def test_a_server_that_keeps_nothing(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        proxy.fail(b"PUT", *[answer("308 Resume Incomplete")] * 20)
        with pytest.raises(StoreUnreachable, match=r"stays at 0 bytes, 5 times"):
            upload(store, "a", LARGE, deadline)
        proxy.faults.clear()
        proxy.fail(b"PUT", passed, answer("308 Resume Incomplete", "Range: bytes=0-9"))
        with pytest.raises(StoreError, match=f"expected {PART} to {2 * PART} bytes kept, found 10"):
            upload(store, "a", LARGE, deadline)
        assert store.head("a", deadline) is None
        assert proxy.unfinished == []

    def test_a_cancellation_that_failed_is_made_good_on_closing(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        proxy.fail(b"PUT", error("400 Bad Request", "invalid"))
        proxy.fail(b"DELETE", *[refused] * 5)
        with pytest.raises(StoreError):
            upload(store, "a", LARGE, deadline)
        assert len(proxy.unfinished) == len(store.unfinished) == 1
        store.close()
        assert proxy.unfinished == []
        assert store.unfinished == set()

    def test_somebody_else_was_faster(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        class Slow(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if self.tell() == PART:
                    assert upload(store, "a", LARGE, deadline)
                return super().read(size)

        assert not store.upload("a", Slow(LARGE), len(LARGE), crc32c(LARGE), deadline)
        assert proxy.unfinished == []
        assert store.read("a", deadline)[0] == LARGE

    def test_a_large_object_is_swapped(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        large = bytes(9 << 20)
        assert store.create("a", large, deadline)
        assert not store.create("a", large, deadline)
        etag = store.read("a", deadline)[1]
        second = store.replace("a", large + b"2", etag, deadline)
        with pytest.raises(PreconditionFailed):
            store.replace("a", large + b"3", etag, deadline)
        found, etag = store.read("a", deadline)
        assert (len(found), etag) == (len(large) + 1, second)
        assert proxy.unfinished == []

    def test_all_that_is_sent_carries_its_checksum(
        self, proxy: GcsProxy, store: GcsStore, deadline: Deadline
    ) -> None:
        seen: list[bytes] = []

        def watched(exchange: Exchange) -> None:
            seen.append(exchange.request)
            exchange.client.sendall(exchange.forward(exchange.request))

        for data in (LARGE, DATA):
            proxy.fail(b"POST", watched)
            upload(store, uuid4().hex, data, deadline)
            assert to_base64(crc32c(data)).encode() in seen[-1].replace(b"\\/", b"/")
        assert len(seen) == 2


def test_the_client_is_imported_when_it_is_first_used() -> None:
    code = """
import sys
from warmcast.manifests.origin import Origin
from warmcast.manifests.stores import open_store
open_store("/nowhere").close()
print([name for name in sys.modules if name.split(".")[0] in ("google", "urllib3", "requests")])
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "[]\n"


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    monkeypatch.delitem(sys.modules, "warmcast.manifests.stores.gcs", raising=False)
    with pytest.raises(UsageError, match=r"google.*pip install 'warmcast\[gcs\]'"):
        open_store("gs://b/p")
