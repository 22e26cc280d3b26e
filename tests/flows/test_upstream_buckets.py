"""Buckets as upstreams: servers and credentials of their own, and what goes wrong in them."""

from __future__ import annotations

import json
import os
from urllib.parse import urlsplit
from uuid import uuid4
from xml.sax.saxutils import escape

import pytest

from tests.conftest import BUCKET
from tests.manifests import s3_proxy as fault
from tests.manifests.gcs_proxy import GcsProxy
from tests.manifests.s3_proxy import Proxy
from warmcast.flows.errors import (
    SourceChanged,
    SourceError,
    SourceNotFound,
    SourceRefused,
    SourceUnreachable,
)
from warmcast.flows.upstreams import open_upstream, read_small
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, UsageError
from warmcast.manifests.stores import http, open_store

DATA = os.urandom(1_500_000)
NOWHERE = "http://127.0.0.1:9"


def address(url):
    parts = urlsplit(url)
    return parts.hostname, parts.port


@pytest.fixture
def opened(deadline):
    held = []

    def run(url):
        held.append(open_upstream(url, deadline))
        return held[-1]

    yield run
    for upstream in held:
        upstream.close()


@pytest.fixture(params=["s3", "gcs"])
def store_url(request):
    """The URL of an empty prefix; a folder is no bucket."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def filled(store, deadline):
    """A bucket with a model, and a store to change it by."""
    store.create("config.json", b"{}", deadline)
    store.create("sub/model.safetensors", DATA, deadline)
    return store


@pytest.fixture
def proxied(filled, seaweed_server, gcs_server, monkeypatch):
    """A proxy before the bucket's server, and a URL that leads through it; nothing else does."""
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
    s3 = filled.url.startswith("s3")
    server = Proxy(address(seaweed_server.url)) if s3 else GcsProxy(address(gcs_server.url))
    monkeypatch.setenv("AWS_ENDPOINT_URL" if s3 else "STORAGE_EMULATOR_HOST", NOWHERE)
    yield server, f"{filled.url}?endpoint={server.url}"
    server.close()


def read(upstream, path, deadline):
    file = next(file for file in upstream.files(deadline) if file.path == path)
    return read_small(upstream, file, 1 << 30, deadline)


class TestBoth:
    def test_a_server_of_its_own(self, proxied, opened, deadline):
        server, url = proxied
        upstream = opened(url)
        assert [file.path for file in upstream.files(deadline)] == [
            "config.json",
            "sub/model.safetensors",
        ]
        assert read(upstream, "sub/model.safetensors", deadline) == DATA
        assert server.requests
        assert "?" not in upstream.name

    def test_an_object_that_changes_in_the_middle(self, proxied, filled, opened, deadline):
        server, url = proxied
        upstream = opened(url)
        file = upstream.files(deadline)[1]
        reader = upstream.reader(file, deadline)
        buffer = memoryview(bytearray(len(DATA)))
        reader.read_into(0, buffer[:10], deadline)
        etag = filled.head(file.path, deadline).etag

        def changed(exchange):
            fault.cut(500_000, by_reset=True)(exchange)
            filled.replace(file.path, DATA[::-1], etag, deadline)

        server.fail(b"GET", changed)
        with pytest.raises(SourceChanged, match=r"sub/model\.safetensors.*deploy it again"):
            reader.read_into(0, buffer, deadline)

    def test_one_that_goes(self, proxied, filled, opened, deadline):
        upstream = opened(proxied[1])
        file = upstream.files(deadline)[0]
        filled.delete("config.json", deadline)
        with pytest.raises(SourceChanged, match=r"config\.json"):
            read_small(upstream, file, 10, deadline)

    def test_what_passes_is_tried_again(self, proxied, opened, deadline):
        server, url = proxied
        server.fail(b"GET", fault.refused, fault.answer("429 Slow", "Retry-After: 0"))
        upstream = opened(url)
        file = upstream.files(deadline)[1]
        server.fail(
            b"GET",
            fault.answer("503 Slow Down"),
            fault.cut(500_000, by_reset=True),
            fault.cut(400_000, by_reset=False),
        )
        assert read_small(upstream, file, 1 << 30, deadline) == DATA

    def test_not_for_ever(self, proxied, opened, deadline):
        server, url = proxied
        server.fail(b"GET", *[fault.answer("500 Oops")] * 5)
        with pytest.raises(SourceUnreachable, match="5 times"):
            opened(url).files(deadline)
        server.fail(b"GET", fault.answer("503 Slow Down", "Retry-After: 60"))
        with pytest.raises(DeadlineExceeded):
            opened(url).files(Deadline.after(1))

    def test_a_stall_at_the_deadline(self, proxied, opened, deadline):
        server, url = proxied
        upstream = opened(url)
        file = upstream.files(deadline)[1]
        server.fail(b"GET", *[fault.stall(1000)] * 5)
        with pytest.raises(DeadlineExceeded):
            read_small(upstream, file, 1 << 30, Deadline.after(0.3))

    def test_names_with_a_question_mark(self, opened, store_url, filled, deadline):
        """What follows it are options, and those that are none are not passed over."""
        with pytest.raises(UsageError, match="expected options endpoint"):
            opened(f"{store_url}/what?x")


class TestS3:
    @pytest.fixture
    def server(self, seaweed_server, s3_url, monkeypatch):
        opened = Proxy(address(seaweed_server.url))
        monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
        yield opened
        opened.close()

    def test_two_servers_and_two_accounts_in_one_process(
        self, server, seaweed_server, s3_url, opened, monkeypatch, tmp_path, deadline
    ):
        (tmp_path / "credentials").write_text(
            f"[theirs]\naws_access_key_id = {seaweed_server.access_key}\n"
            f"aws_secret_access_key = {seaweed_server.secret_key}\n"
            "[wrong]\naws_access_key_id = AKWRONG\naws_secret_access_key = secret\n"
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        origin = open_store(s3_url)
        origin.create("config.json", b"{}", deadline)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not that of this bucket")
        monkeypatch.delenv("AWS_REGION")
        monkeypatch.delenv("AWS_DEFAULT_REGION")
        options = f"endpoint={server.url}&region=us-east-1"
        theirs = opened(f"{s3_url}?{options}&profile=theirs")
        assert read(theirs, "config.json", deadline) == b"{}"
        assert origin.read("config.json", deadline)[0] == b"{}"
        origin.close()
        asked = len(server.requests)
        with pytest.raises(SourceRefused) as caught:
            opened(f"{s3_url}?{options}&profile=wrong").files(deadline)
        assert "secret" not in str(caught.value).replace("AWS_SECRET_ACCESS_KEY", "")
        assert len(server.requests) == asked + 1
        with pytest.raises(UsageError, match="nobody"):
            opened(f"{s3_url}?{options}&profile=nobody")

    def test_anonymous(self, server, s3_url, opened, deadline):
        with pytest.raises(SourceRefused):
            opened(f"{s3_url}?endpoint={server.url}&anonymous").files(deadline)
        assert server.requests
        assert not any(b"authorization" in request.lower() for request in server.requests)

    def test_no_such_bucket(self, s3_url, opened, deadline):
        with pytest.raises(SourceNotFound, match="no such bucket"):
            opened(f"s3://{uuid4().hex}/model").files(deadline)

    def test_a_long_listing_comes_in_pages(self, server, s3_url, opened, deadline):
        prefix = s3_url.removeprefix(f"s3://{BUCKET}/")
        pages = [[f"{p}-{n:03}.json" for n in range(1000)] for p in range(3)]
        server.fail(
            b"GET",
            *[listed(prefix, names, more=place < 2) for place, names in enumerate(pages)],
        )
        files = opened(f"{s3_url}?endpoint={server.url}").files(deadline)
        assert [file.path for file in files] == [name for page in pages for name in page]

    @pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", "a\\b", "a/../../b"])
    def test_a_hostile_name(self, server, s3_url, opened, deadline, name):
        prefix = s3_url.removeprefix(f"s3://{BUCKET}/")
        server.fail(b"GET", listed(prefix, ["config.json", name], more=False))
        with pytest.raises(SourceError, match="plain path"):
            opened(f"{s3_url}?endpoint={server.url}").files(deadline)

    def test_markers_of_folders_are_no_files(self, s3_url, opened, deadline):
        with_marker = open_store(s3_url)
        with_marker.create("config.json", b"{}", deadline)
        with_marker.call(
            with_marker.client.put_object, "x", deadline, Key=f"{with_marker.prefix}sub/", Body=b""
        )
        with_marker.close()
        assert [file.path for file in opened(s3_url).files(deadline)] == ["config.json"]

    @pytest.mark.parametrize("url", ["s3://", "s3:///x", "s3://user@bucket/x", "s3://b?endpoint=x"])
    def test_what_is_no_bucket(self, url, deadline):
        with pytest.raises(UsageError):
            open_upstream(url, deadline)


def listed(prefix, names, *, more):
    """A page of a listing."""
    entries = "".join(
        f"<Contents><Key>{escape(prefix)}/{escape(name)}</Key><Size>1</Size>"
        "<ETag>&quot;e&quot;</ETag></Contents>"
        for name in names
    )
    token = "<NextContinuationToken>t</NextContinuationToken>" if more else ""
    return fault.answer(
        "200 OK",
        "Content-Type: application/xml",
        body=f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}"
        "</ListBucketResult>",
    )


class TestGcs:
    @pytest.fixture
    def server(self, gcs_server, gcs_url, monkeypatch, deadline):
        store = open_store(gcs_url)
        store.create("config.json", b"{}", deadline)
        store.close()
        opened = GcsProxy(address(gcs_server.url))
        monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
        yield opened
        opened.close()

    def test_a_server_on_this_machine_gets_no_token(
        self, server, gcs_url, opened, monkeypatch, deadline
    ):
        monkeypatch.delenv("STORAGE_EMULATOR_HOST")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere")
        upstream = opened(f"{gcs_url}?endpoint={server.url}")
        assert read(upstream, "config.json", deadline) == b"{}"
        assert not any(b"authorization" in request.lower() for request in server.requests)

    def test_credentials_of_its_own(self, gcs_url, opened, monkeypatch, tmp_path, deadline):
        """They are looked for where the option says, even if the origin is emulated."""
        (tmp_path / "key.json").write_text(json.dumps({"type": "nonsense"}))
        url = f"{gcs_url}?endpoint=https://127.0.0.1:9&credentials={tmp_path}/key.json"
        with pytest.raises(SourceRefused, match="nonsense"):
            opened(url).files(deadline)
        with pytest.raises(SourceRefused, match=r"/nowhere"):
            opened(url.replace("key.json", "nowhere")).files(deadline)

    def test_anonymous(self, gcs_url, opened, monkeypatch, deadline):
        monkeypatch.delenv("STORAGE_EMULATOR_HOST")
        monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
        with pytest.raises(SourceUnreachable, match="refused"):  # and not: no credentials
            opened(f"{gcs_url}?endpoint=https://127.0.0.1:9&anonymous").files(deadline)

    def test_no_such_bucket(self, gcs_url, opened, deadline):
        with pytest.raises(SourceNotFound):
            opened(f"gs://{uuid4().hex}/model").files(deadline)
