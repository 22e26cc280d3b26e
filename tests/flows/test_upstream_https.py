"""A web server as an upstream: what is found there, what holds a file to its state, no ranges."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
import ssl
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import formatdate
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.flows.hub import Web, content
from tests.manifests import s3_proxy as fault
from warmcast.flows.errors import (
    MissingShard,
    SourceChanged,
    SourceError,
    SourceNotFound,
    SourceRefused,
    SourceUnreachable,
    WorkFolderFull,
)
from warmcast.flows.steps.resolve import resolve
from warmcast.flows.upstreams import open_upstream
from warmcast.flows.upstreams.https import HttpsUpstream
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, UsageError
from warmcast.manifests.stores import http
from warmcast.manifests.stores.http import Http

DATA = os.urandom(3_000_000)
NOW = 1_700_000_000


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
    opened = Web()
    yield opened
    opened.close()


@pytest.fixture
def opened(web, deadline):
    held = []

    def run(rest="/m/", **options):
        url = rest if "://" in rest else f"{web.url}{rest}"
        held.append(HttpsUpstream(url, deadline, **options))
        return held[-1]

    yield run
    for upstream in held:
        upstream.close()


def paths(upstream, deadline):
    return [file.path for file in upstream.files(deadline)]


def reader_of(upstream, path, deadline):
    file = next(file for file in upstream.files(deadline) if file.path == path)
    return upstream.reader(file, deadline)


def read(reader, deadline, offset=0, length=None):
    data = bytearray(reader.size - offset if length is None else length)
    reader.read_into(offset, memoryview(data), deadline)
    return bytes(data)


class TestWhatIsFound:
    def test_the_usual_files(self, web, opened, deadline):
        for path in ("config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"):
            web.put(f"/m/{path}", path.encode())
        web.put("/m/unusual.txt", b"x")
        assert paths(opened(), deadline) == [
            "1_Pooling/config.json",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        assert opened("/m").name == opened("/m/").name == f"{web.url}/m/"

    def test_what_an_index_names(self, web, opened, deadline):
        shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
        index = {"weight_map": {f"t{n}": shard for n, shard in enumerate(shards)}}
        web.put("/m/model.safetensors.index.json", json.dumps(index).encode())
        for shard in shards:
            web.put(f"/m/{shard}", b"x")
        upstream = opened()
        assert paths(upstream, deadline) == [*shards, "model.safetensors.index.json"]
        del web.files[f"/m/{shards[1]}"]
        with pytest.raises(MissingShard, match=shards[1]):
            resolve(upstream, deadline)

    @pytest.mark.parametrize("shard", ["../../etc/passwd", "/etc/passwd", "a//b"])
    def test_a_hostile_index(self, web, opened, deadline, shard):
        index = {"weight_map": {"t": shard}}
        web.put("/m/model.safetensors.index.json", json.dumps(index).encode())
        with pytest.raises(SourceError):
            opened().files(deadline)

    def test_what_the_url_names(self, web, opened, deadline):
        for path in ("a.json", "sub/b c.bin"):
            web.put(f"/m/{path}", b"x")
        assert paths(opened("/m/#files=sub/b%20c.bin,a.json"), deadline) == [
            "a.json",
            "sub/b c.bin",
        ]
        with pytest.raises(SourceNotFound, match="other"):
            opened("/m/#files=a.json,other").files(deadline)

    def test_one_file(self, web, opened, deadline):
        web.put("/m/some model.safetensors", b"x")
        upstream = opened("/m/some%20model.safetensors")
        assert paths(upstream, deadline) == ["some model.safetensors"]
        assert upstream.name == f"{web.url}/m/"

    def test_nothing(self, web, opened, deadline):
        with pytest.raises(SourceNotFound, match="#files="):
            opened().files(deadline)

    def test_a_page_is_no_file(self, web, opened, deadline):
        web.put("/m/config.json", b"<html>", content_type="text/html; charset=utf-8")
        with pytest.raises(SourceNotFound):
            opened().files(deadline)
        with pytest.raises(SourceNotFound, match="a page of HTML"):
            opened("/m/#files=config.json").files(deadline)

    @pytest.mark.parametrize("status", ["403 Forbidden", "401 Unauthorized"])
    def test_what_may_not_be_read(self, web, opened, deadline, monkeypatch, status):
        monkeypatch.setattr(
            web, "answer", lambda r: f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()
        )
        with pytest.raises(SourceRefused):
            opened().files(deadline)

    def test_no_heads_and_empty_files(self, web, opened, deadline):
        web.head = False
        web.put("/m/config.json", b"{}")
        web.put("/m/vocab.txt", b"")
        files = {file.path: file.size for file in opened().files(deadline)}
        assert files == {"config.json": 2, "vocab.txt": 0}

    def test_a_query_goes_with_every_request(self, web, opened, deadline):
        web.put("/m/config.json", b"{}")
        upstream = opened("/m/?sig=secret")
        assert read(reader_of(upstream, "config.json", deadline), deadline) == b"{}"
        assert all(request.query == {"sig": "secret"} for request in web.asked)
        assert "secret" not in upstream.name

    def test_connections_are_used_again(self, web, opened, deadline):
        web.put("/m/config.json", b"{}")
        opened().files(deadline)
        assert len(web.requests) > 20
        assert len(web._threads) - 1 <= 8

    @pytest.mark.parametrize(
        "url",
        [
            "https://", "https:///x", "https://host:99999/", "https://u:secret@host:x/",
            "http://10.0.0.1/m/", "http://localhost.evil.example/m/", "https://host/#file=x",
            "https://host/#files=", "https://host/#files=a,,b", "https://host/m.bin#files=a",
        ],
    )  # fmt: skip
    def test_what_is_no_place(self, url, deadline):
        with pytest.raises(UsageError) as caught:
            open_upstream(url, deadline)
        assert "secret" not in str(caught.value)

    def test_plain_http_if_it_is_said(self, deadline):
        open_upstream("http://10.0.0.1/m/#plain", deadline).close()


class TestStates:
    def version(self, web, opened, deadline, **headers):
        web.put("/m/config.json", b"{}", **headers)
        (file,) = opened().files(deadline)
        return file.version

    def test_what_names_them(self, web, opened, deadline):
        def date(seconds):
            return formatdate(NOW + seconds, usegmt=True)

        strong = self.version(web, opened, deadline, etag='"a"')
        assert strong == 'etag:"a"'
        settled = self.version(
            web, opened, deadline, etag='W/"a"', last_modified=date(0), date=date(60)
        )
        assert settled == f"modified:{date(0)}"
        for headers in ({}, {"last_modified": date(0)}, {"last_modified": "x", "date": date(0)}):
            assert self.version(web, opened, deadline, etag="", **headers) == ""
        assert (
            self.version(web, opened, deadline, etag="", last_modified=date(0), date=date(59)) == ""
        )

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ({"etag": '"a"'}, {"etag": '"b"'}),
            (
                {"etag": "", "last_modified": formatdate(NOW, usegmt=True)},
                {"etag": "", "last_modified": formatdate(NOW + 1, usegmt=True)},
            ),
            ({"etag": ""}, {"etag": "", "longer": "x"}),
        ],
    )
    @pytest.mark.parametrize("ranges", [True, False])
    @pytest.mark.parametrize("heeded", [True, False])
    def test_a_file_that_changes(self, web, opened, deadline, before, after, ranges, heeded):
        web.ranges = ranges
        web.put("/m/config.json", DATA, **before)
        reader = reader_of(opened(), "config.json", deadline)
        web.put("/m/config.json", DATA[::-1] + b"x" * ("longer" in after), **after)
        if not heeded:  # the server ignores conditions, but tells what it has
            file = web.files["/m/config.json"]
            web.answer = lambda request: content(request, file.data, file.headers, ranges=ranges)
        with pytest.raises(SourceChanged, match=r"config\.json"):
            read(reader, deadline, 0, 10)
        reader.close()

    def test_a_version_is_enough(self, web, opened, deadline):
        web.put("/m/config.json", b"{}")
        (file,) = opened().files(deadline)
        other = opened()
        assert read(other.reader(file, deadline), deadline) == b"{}"
        web.put("/m/config.json", b"[]")
        with pytest.raises(SourceChanged):
            read(opened().reader(file, deadline), deadline)


class TestWithoutRanges:
    @pytest.fixture
    def reader(self, web, opened, deadline):
        web.ranges = False
        web.put("/m/model.safetensors", DATA)
        found = reader_of(opened(http=Http(None, idle=0.3)), "model.safetensors", deadline)
        yield found
        found.close()

    def test_in_any_order_it_is_read_once(self, web, reader, deadline):
        asked = len(web.requests)
        offsets = list(range(0, len(DATA), 300_000))[::-1]
        with ThreadPoolExecutor(4) as pool:
            pieces = list(pool.map(lambda o: read(reader, deadline, o, 300_000), offsets))
        assert b"".join(pieces[::-1]) == DATA
        assert len(web.requests) - asked == 2  # whether it knows ranges, and the file

    def test_no_more_is_read_than_is_asked_for(self, web, reader, deadline):
        web.fail(b"GET", fault.passed, fault.stall(2_000_000))
        assert read(reader, deadline, 0, 1_000_000) == DATA[:1_000_000]

    def test_it_goes_on_where_it_broke(self, web, reader, deadline):
        web.fail(
            b"GET",
            fault.passed,
            fault.cut(1_500_000, by_reset=True),
            fault.cut(700_000, by_reset=False),
            fault.stall(10),
        )
        assert read(reader, deadline) == DATA

    def test_other_bytes_the_second_time_are_noticed(self, web, reader, deadline):
        def other(exchange):
            head, _, _ = exchange.forward(exchange.request).partition(b"\r\n\r\n")
            exchange.client.sendall(head + b"\r\n\r\n" + DATA[::-1])

        web.fail(b"GET", fault.passed, fault.cut(1_500_000, by_reset=False), other)
        with pytest.raises(SourceChanged, match="other bytes"):
            read(reader, deadline)

    def test_the_deadline_ends_it(self, web, reader, deadline):
        web.fail(b"GET", fault.passed, fault.stall(100))
        with pytest.raises(DeadlineExceeded):
            read(reader, Deadline.after(0.2))
        assert read(reader, deadline) == DATA

    def test_nothing_is_left(self, web, reader, deadline, monkeypatch, tmp_path):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        read(reader, deadline)
        assert list(tmp_path.iterdir()) == []
        reader.close()

    def test_no_space(self, web, reader, deadline, monkeypatch):
        import resource
        import signal

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(WorkFolderFull, match="TMPDIR"):
                read(reader, deadline)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)

    def test_a_body_of_wrong_length(self, web, reader, deadline):
        wrong = fault.with_answer(b"content-length: 3000000", b"Content-Length: 2999999")
        web.fail(b"GET", fault.passed, wrong)
        with pytest.raises(SourceChanged, match="found 2999999"):
            read(reader, deadline)


class TestRedirectsAndAccess:
    @pytest.fixture
    def other(self):
        opened = Web()
        yield opened
        opened.close()

    def test_user_and_password_are_for_one_server(self, web, other, opened, deadline):
        pair = base64.b64encode(b"me:p@ss").decode()
        web.authorization = f"Basic {pair}"
        web.moved["/m/config.json"] = f"{other.url}/there"
        other.put("/there", b"{}")
        host = urlsplit(web.url).netloc
        upstream = opened(f"http://me:p%40ss@{host}/m/#files=config.json")
        assert read(reader_of(upstream, "config.json", deadline), deadline) == b"{}"
        assert all("authorization" not in request.headers for request in other.asked)
        assert "p@ss" not in upstream.name
        web.authorization = "Basic of another"
        with pytest.raises(SourceRefused) as caught:
            upstream.files(deadline)
        assert "p@ss" not in str(caught.value)
        assert pair not in str(caught.value)

    def test_what_moves_in_the_middle_is_looked_for_again(self, web, other, opened, deadline):
        web.moved["/m/model.safetensors"] = f"{other.url}/first"
        other.put("/first", DATA)
        reader = reader_of(opened("/m/model.safetensors"), "model.safetensors", deadline)
        assert read(reader, deadline, 0, 10) == DATA[:10]
        other.files["/second"] = other.files.pop("/first")
        web.moved["/m/model.safetensors"] = f"{other.url}/second"
        assert read(reader, deadline) == DATA
        other.files.clear()
        with pytest.raises(SourceChanged, match="found 404"):
            read(reader, deadline)

    def test_a_file_is_no_redirect_away_from_where_it_is_secret(self, web, opened, deadline):
        web.moved["/m/config.json"] = "/m/config.json"
        with pytest.raises(SourceError, match="redirects at most"):
            opened("/m/#files=config.json").files(deadline)

    def test_bytes_that_are_packed_are_refused(self, web, opened, deadline):
        web.put("/m/config.json", b"{}", content_encoding="gzip")
        with pytest.raises(SourceError, match="Content-Encoding: gzip"):
            opened("/m/#files=config.json").files(deadline)

    def test_also_where_only_reading_tells(self, web, opened, deadline):
        web.put("/m/config.json", b"{}")
        reader = reader_of(opened(), "config.json", deadline)
        web.files["/m/config.json"].headers["Content-Encoding"] = "br"
        with pytest.raises(SourceError, match="Content-Encoding: br"):
            read(reader, deadline)


class SecureWeb(Web):
    """The same behind TLS, with a certificate of its own making."""

    def __init__(self, folder):
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "warmcast tests")])
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(datetime.datetime(2020, 1, 1))
            .not_valid_after(datetime.datetime(2100, 1, 1))
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(key, hashes.SHA256())
        )
        self.certificate = folder / "tls.crt"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (folder / "tls.key").write_bytes(private)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, folder / "tls.key")
        super().__init__()

    @property
    def url(self):
        return super().url.replace("http:", "https:")

    def _serve(self, client):
        with suppress(OSError), self._context.wrap_socket(client, server_side=True) as secure:
            super()._serve(secure)


class TestSecure:
    @pytest.fixture
    def secure(self, tmp_path, monkeypatch):
        opened = SecureWeb(tmp_path)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield opened
        opened.close()

    def test_it_is_read(self, secure, opened, monkeypatch, deadline):
        monkeypatch.setenv("SSL_CERT_FILE", str(secure.certificate))
        secure.put("/m/model.safetensors", DATA)
        upstream = opened(f"{secure.url}/m/model.safetensors")
        assert read(reader_of(upstream, "model.safetensors", deadline), deadline) == DATA

    def test_it_leads_to_no_plain_http(self, secure, web, opened, monkeypatch, deadline):
        monkeypatch.setenv("SSL_CERT_FILE", str(secure.certificate))
        secure.moved["/m/config.json"] = f"{web.url}/config.json"
        web.put("/config.json", b"{}")
        with pytest.raises(SourceError, match="HTTPS all the way"):
            opened(f"{secure.url}/m/#files=config.json").files(deadline)
        assert web.requests == []

    def test_a_certificate_that_nobody_vouches_for(self, secure, opened, deadline):
        with pytest.raises(SourceUnreachable, match="SSL_CERT_FILE"):
            opened(f"{secure.url}/m/#files=config.json").files(deadline)


class TestFaults:
    def test_what_passes_is_tried_again(self, web, opened, deadline):
        web.put("/m/model.safetensors", DATA)
        web.fail(b"HEAD", fault.refused, fault.answer("503 Busy", "Retry-After: 0"))
        web.fail(
            b"GET", fault.passed, fault.cut(1_000_000, by_reset=True), fault.answer("429 Slow")
        )
        reader = reader_of(opened("/m/model.safetensors"), "model.safetensors", deadline)
        assert read(reader, deadline) == DATA

    def test_a_stall(self, web, opened, deadline):
        web.put("/m/model.safetensors", DATA)
        upstream = opened("/m/model.safetensors", http=Http(None, idle=0.3))
        web.fail(b"HEAD", fault.silence)
        web.fail(b"GET", fault.passed, fault.stall(500_000))
        assert read(reader_of(upstream, "model.safetensors", deadline), deadline) == DATA

    def test_a_server_that_stays_broken(self, web, opened, deadline):
        web.fail(b"HEAD", *[fault.answer("500 Oops")] * 5)
        with pytest.raises(SourceUnreachable, match="500, 5 times"):
            opened("/m/model.safetensors").files(deadline)

    def test_many_files(self, web, opened, deadline):
        names = [f"{n:04}.json" for n in range(300)]
        for name in names:
            web.put(f"/m/{name}", b"x")
        assert paths(opened(f"/m/#files={','.join(names)}"), deadline) == names
        assert threading.active_count() < 100
