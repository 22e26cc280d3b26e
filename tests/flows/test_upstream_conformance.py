"""What every upstream has to do: a folder, a Hub, S3, GCS, and a web server."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from safetensors.torch import save

from tests.flows.hub import Hub, Storage, Web, no_login, sha256
from warmcast.flows.errors import SourceChanged, SourceError, SourceNotFound
from warmcast.flows.run import deploy
from warmcast.flows.steps.resolve import resolve
from warmcast.flows.upstreams import Upstream, open_upstream, read_small
from warmcast.manifests.checksum import crc32c, to_base64
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded
from warmcast.manifests.stores import open_store

RANDOM = bytearray(os.urandom((2 << 20) + 12_345))
LARGE = save({"layers.0.weight": torch.frombuffer(RANDOM, dtype=torch.uint8)})
FILES = {
    "README.md": b"",
    "config.json": b'{"hidden_size": 8}',
    "model.safetensors": LARGE,
    "sub folder/ü+1 (2).txt": b"names of all kinds",
    "sub/a.json": b"[]",
}
HIDDEN = {".gitattributes": b"x", "sub/.cache/x": b"y"}


@dataclass
class Place:
    """Somewhere files can be put, and the URL that an upstream is opened with."""

    put: Callable[[dict[str, bytes]], None]
    url: str | Path

    def fill(self, files: dict[str, bytes]) -> Place:
        self.put(files)
        return self


def folder_place(request):
    folder = request.getfixturevalue("tmp_path") / "model"
    folder.mkdir()

    def put(files):
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    return Place(put, folder)


def hf_place(request):
    monkeypatch = request.getfixturevalue("monkeypatch")
    no_login(monkeypatch, request.getfixturevalue("tmp_path"))
    storage = Storage()
    hub = Hub(storage)
    request.addfinalizer(storage.close)
    request.addfinalizer(hub.close)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    return Place(lambda files: hub.commit("org/model", files) and None, "hf://org/model")


def bucket_place(scheme):
    def place(request):
        url = request.getfixturevalue(f"{scheme}_url")
        store = open_store(url)
        request.addfinalizer(store.close)

        def put(files):
            for path, data in files.items():
                if scheme == "s3":
                    store.call(
                        store.client.put_object,
                        "x",
                        Deadline.after(30),
                        Key=f"{store.prefix}{path}",
                        Body=data,
                        ChecksumCRC32C=to_base64(crc32c(data)),
                    )
                else:
                    blob = store._bucket.blob(f"{store._prefix}{path}")
                    store.call("x", Deadline.after(30), lambda b=blob, d=data: _send(b, d))

        def _send(blob, data):
            blob.upload_from_string(data, "application/octet-stream", retry=None, checksum=None)

        return Place(put, url)

    return place


def https_place(request):
    web = Web()
    request.addfinalizer(web.close)
    request.getfixturevalue("monkeypatch").setenv("NO_PROXY", "127.0.0.1")

    def put(files):
        for path, data in files.items():
            web.put(f"/a model/{path}", data)

    names = ",".join(quote(path) for path in (*FILES, *HIDDEN))
    return Place(put, f"{web.url}/a%20model/#files={names}")


PLACES = {
    "folder": folder_place,
    "hf": hf_place,
    "s3": bucket_place("s3"),
    "gcs": bucket_place("gcs"),
    "https": https_place,
}


@pytest.fixture(params=PLACES)
def place(request) -> Place:
    return PLACES[request.param](request).fill({**FILES, **HIDDEN})


@pytest.fixture
def upstream(place, deadline):
    opened = open_upstream(place.url, deadline)
    yield opened
    opened.close()


def named(upstream: Upstream, path: str, deadline: Deadline):
    return next(file for file in upstream.files(deadline) if file.path == path)


def read(upstream: Upstream, path: str, deadline: Deadline) -> bytes:
    return read_small(upstream, named(upstream, path, deadline), 1 << 30, deadline)


class TestListing:
    def test_files_in_order_and_no_hidden_ones(self, upstream, deadline):
        found = upstream.files(deadline)
        assert [(file.path, file.size) for file in found] == [
            (path, len(data)) for path, data in sorted(FILES.items())
        ]

    def test_what_is_published_is_right(self, upstream, deadline):
        for file in upstream.files(deadline):
            assert file.sha256 in (None, sha256(FILES[file.path]))
            assert file.crc32c in (None, crc32c(FILES[file.path]))

    def test_what_each_publishes(self, request, upstream, deadline):
        weights = named(upstream, "model.safetensors", deadline)
        kind = request.node.callspec.params["place"]
        assert (weights.sha256 is not None) == (kind == "hf")
        assert (weights.crc32c is not None) == (kind in ("s3", "gcs"))
        assert bool(weights.version) == (kind != "folder")

    def test_a_version_names_a_state(self, place, upstream, deadline):
        before = {file.path: file.version for file in upstream.files(deadline)}
        place.put({**FILES, "config.json": b'{"hidden_size": 9}'})
        later = open_upstream(place.url, deadline)
        try:
            after = {file.path: file.version for file in later.files(deadline)}
        finally:
            later.close()
        if any(before.values()):
            assert before["config.json"] != after["config.json"]

    def test_it_says_where_it_is_from(self, upstream):
        assert upstream.name
        assert "127.0.0.1" not in upstream.name or upstream.name.startswith("http")
        assert "?" not in upstream.name
        assert "#" not in upstream.name

    def test_it_can_be_deployed(self, upstream, deadline):
        plan = resolve(upstream, deadline)
        assert [file.path for file in plan.weights] == ["model.safetensors"]


class TestReading:
    def test_whole_files(self, upstream, deadline):
        for path, data in FILES.items():
            assert read(upstream, path, deadline) == data

    def test_ranges(self, upstream, deadline):
        reader = upstream.reader(named(upstream, "model.safetensors", deadline), deadline)
        try:
            assert reader.size == len(LARGE)
            for offset, length in [(0, 1), (7, 100_001), (len(LARGE) - 5, 5), (len(LARGE), 0)]:
                buffer = bytearray(length + 2)
                reader.read_into(offset, memoryview(buffer)[1:-1], deadline)
                assert bytes(buffer[1:-1]) == LARGE[offset : offset + length]
                assert (buffer[0], buffer[-1]) == (0, 0)
        finally:
            reader.close()

    @pytest.mark.parametrize("offset", [len(LARGE) - 1, len(LARGE)])
    def test_beyond_the_end(self, upstream, deadline, offset):
        reader = upstream.reader(named(upstream, "model.safetensors", deadline), deadline)
        try:
            with pytest.raises(SourceError):
                reader.read_into(offset, memoryview(bytearray(2)), deadline)
        finally:
            reader.close()

    def test_several_at_once(self, upstream, deadline):
        file = named(upstream, "model.safetensors", deadline)
        reader = upstream.reader(file, deadline)
        data = bytearray(file.size)
        view = memoryview(data)
        size = 100_000
        try:
            with ThreadPoolExecutor(8) as pool:
                for _ in pool.map(
                    lambda o: reader.read_into(o, view[o : o + size], deadline),
                    range(0, file.size, size),
                ):
                    pass
        finally:
            reader.close()
        assert data == LARGE

    @pytest.mark.parametrize("path", ["config.json", "model.safetensors"])
    def test_a_file_that_changes_is_noticed_or_read_as_it_was(
        self, place, upstream, deadline, path
    ):
        before = FILES[path]
        reader = upstream.reader(named(upstream, path, deadline), deadline)
        buffer = bytearray(len(before))
        try:
            reader.read_into(0, memoryview(buffer)[:4], deadline)
            place.put({**FILES, path: before[::-1]})
            try:
                reader.read_into(0, memoryview(buffer), deadline)
            except SourceChanged as error:
                assert path in str(error)
            else:
                assert buffer == before
            reader.close()
        except SourceChanged:
            pass

    def test_no_time(self, upstream, deadline):
        reader = upstream.reader(named(upstream, "model.safetensors", deadline), deadline)
        try:
            with pytest.raises(DeadlineExceeded):
                reader.read_into(0, memoryview(bytearray(9)), Deadline.after(0))
        finally:
            reader.close()
        with pytest.raises(DeadlineExceeded):
            upstream.files(Deadline.after(0))


def test_it_is_deployed_and_then_known(place, file_url, deadline):
    def run():
        return deploy(place.url, file_url, "model@prod", deadline=deadline)

    first = run()
    kept = {file.path: file.sha256 for file in first.manifest.files}
    assert kept == {path: sha256(data) for path, data in FILES.items()}
    assert first.changed
    again = run()
    assert (again.changed, again.moved) == (False, ())
    assert again.manifest.digest == first.manifest.digest


def test_nothing_there(request, deadline):
    for kind in ("hf", "s3", "gcs", "https"):
        place = PLACES[kind](request)
        with pytest.raises(SourceNotFound):
            upstream = open_upstream(place.url, deadline)
            try:
                upstream.files(deadline)
            finally:
                upstream.close()


def sockets() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:  # that of this listing
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def test_closing_gives_all_back(place, deadline):
    threads, before = set(threading.enumerate()), sockets()
    upstream = open_upstream(place.url, deadline)
    for file in upstream.files(deadline):
        read_small(upstream, file, 1 << 30, deadline)
    upstream.close()
    while sockets() - before:  # the servers of this process see it a moment later
        deadline.check("waiting for sockets to be closed")
    servers = {t for t in threading.enumerate() if "_accept" in t.name or "_serve" in t.name}
    assert set(threading.enumerate()) <= threads | servers
