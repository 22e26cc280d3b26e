"""What the origin knows of a file is not read again; what it does not, or not any more, is."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model

from tests.flows import elsewhere as module
from tests.flows.elsewhere import Elsewhere
from warmcast.flows import upstreams
from warmcast.flows.errors import SourceChanged
from warmcast.flows.run import deploy
from warmcast.flows.steps.journal import Pace, read_journal
from warmcast.flows.steps.verify import verify
from warmcast.manifests.canonical import canonical_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError
from warmcast.manifests.origin import Origin, blob_key

PACE = Pace(chunk_nbytes=64 << 10, connections=2, lanes=4)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(8, 8, bias=False)
        self.two = torch.nn.Linear(8, 8, bias=False)
        self.two.weight = self.one.weight


@pytest.fixture
def elsewhere(source: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """A repository elsewhere: two shards, one of several chunks, one with a tie, and an index."""
    save_file({"a": torch.randn(300, 300)}, source / "model-00001-of-00002.safetensors")
    save_model(Tied(), str(source / "model-00002-of-00002.safetensors"))
    weight_map = {"a": "model-00001-of-00002.safetensors"}
    weight_map["one.weight"] = "model-00002-of-00002.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return opened(source, monkeypatch)


def opened(source: Path, monkeypatch: pytest.MonkeyPatch, tells: str = "version") -> Elsewhere:
    upstream = Elsewhere(source, tells)
    monkeypatch.setitem(upstreams._UPSTREAMS, "elsewhere", "tests.flows.elsewhere:reopen")
    monkeypatch.setattr(module, "CURRENT", upstream)
    return upstream


def again(url: str, ref: str = "m@a", **options):
    return deploy("elsewhere://", url, ref, pace=PACE, **options)


def is_at(upstream: Elsewhere, path: str, chunk: int) -> bool:
    """Whether this is the read of a chunk of a file."""
    return (upstream.at.path, upstream.at.offset) == (path, chunk * PACE.chunk_nbytes)


@pytest.mark.parametrize("tells", ["version", "sha256", "crc32c"])
def test_unchanged_files_are_not_read(elsewhere, file_url, deadline, tells):
    elsewhere.tells = tells
    first = again(file_url)
    assert first.changed
    assert len(first.moved) == 5
    whole(file_url, first.manifest, deadline)
    read = elsewhere.reads
    second = again(file_url)
    assert (second.manifest, second.changed, second.moved) == (first.manifest, False, ())
    assert elsewhere.reads == read
    assert {tie.name for tie in second.manifest.tied} == {"two.weight"}


def test_it_is_as_from_a_folder(elsewhere, source, file_url):
    streamed = again(file_url).manifest
    plain = deploy(source, file_url, "m@b").manifest
    assert (
        streamed.model_copy(update={"upstream": plain.upstream, "created_at": plain.created_at})
        == plain
    )


def test_bytes_are_known_under_another_name(elsewhere, source, tmp_path, file_url, monkeypatch):
    elsewhere.tells = "sha256"
    first = again(file_url)
    other = tmp_path / "other"
    source.rename(other)
    (other / "tokenizer.json").rename(other / "other.json")
    upstream = opened(other, monkeypatch, "sha256")
    second = again(file_url, "n@a")
    assert second.moved == ()
    assert upstream.reads == []
    assert "other.json" in second.manifest.file
    assert [t.file for t in second.manifest.tensors] == [t.file for t in first.manifest.tensors]


def test_weights_that_came_from_a_folder_are_known(elsewhere, source, file_url):
    elsewhere.tells = "sha256"
    plain = deploy(source, file_url, "m@a").manifest
    result = again(file_url)
    assert result.moved == ()
    assert not any(path.endswith(".safetensors") for path, _, _ in elsewhere.reads)
    assert result.manifest.files == plain.files


def test_what_changed_is_read_and_nothing_else(elsewhere, source, file_url, deadline):
    again(file_url)
    (source / "tokenizer.json").write_bytes(b'{"new": 1}')
    before = len(elsewhere.reads)
    second = again(file_url)
    assert second.moved == ("tokenizer.json",)
    assert {path for path, _, _ in elsewhere.reads[before:]} == {"tokenizer.json"}
    whole(file_url, second.manifest, deadline)


@pytest.mark.parametrize("damage", ["blob gone", "record damaged", "blob cut"])
def test_what_the_origin_lost_is_read_again(elsewhere, file_url, deadline, damage):
    first = again(file_url)
    path = "model-00001-of-00002.safetensors"
    key = blob_key(first.manifest.file[path].sha256)
    with Origin.open(file_url) as origin:
        if damage == "blob gone":
            origin.store.delete(key, deadline)
        elif damage == "blob cut":
            location = Path(file_url.removeprefix("file://")) / key
            os.truncate(location, 10)
        else:
            for info in list(origin.store.list("upstreams/", deadline)):
                _, etag = origin.store.read(info.key, deadline)
                origin.store.replace(info.key, canonical_json({"file": 3}), etag, deadline)
    second = again(file_url)
    assert second.manifest == first.manifest
    assert damage == "record damaged" or second.moved == (path,)
    whole(file_url, second.manifest, deadline)
    read = elsewhere.reads
    assert again(file_url).moved == ()
    assert elsewhere.reads == read


def test_repair_reads_blobs_and_not_the_upstream(elsewhere, file_url, deadline):
    first = again(file_url)
    path = "model-00001-of-00002.safetensors"
    location = Path(file_url.removeprefix("file://")) / blob_key(first.manifest.file[path].sha256)
    data = bytearray(location.read_bytes())
    data[-1] ^= 1
    location.write_bytes(data)
    assert again(file_url).moved == ()
    assert again(file_url, repair=True).moved == (path,)
    whole(file_url, first.manifest, deadline)


def test_a_source_that_changes_is_deployed_as_it_is_then(elsewhere, source, file_url, deadline):
    path = source / "model-00001-of-00002.safetensors"

    def change(number: int) -> None:
        if is_at(elsewhere, path.name, 2) and not changed:
            changed.append(number)
            save_file({"a": torch.zeros(300, 301)}, path)

    changed: list[int] = []
    elsewhere.on_read = change
    result = again(file_url)
    assert changed
    (entry,) = [t for t in result.manifest.tensors if t.name == "a"]
    assert entry.shape == (300, 301)
    whole(file_url, result.manifest, deadline)


def test_a_source_that_keeps_changing_is_an_error(elsewhere, source, file_url, deadline):
    path = source / "model-00001-of-00002.safetensors"

    def change(number: int) -> None:
        if is_at(elsewhere, path.name, 2):
            save_file({"a": torch.randn(300, 300)}, path)

    elsewhere.on_read = change
    with pytest.raises(SourceChanged, match=path.name):
        again(file_url)
    with Origin.open(file_url) as origin:
        assert list(origin.refs(deadline)) == []


def test_a_failure_ends_the_other_transfers_and_leaves_them(elsewhere, file_url, deadline):
    """The next deploy goes on where they were, at once."""
    begun, failed = threading.Event(), threading.Event()

    def on_read(number: int) -> None:
        if elsewhere.at.path == "tokenizer.json":
            begun.wait(30)
            failed.set()
            raise ConnectionResetError
        if elsewhere.at.offset:
            begun.set()
            failed.wait(30)

    elsewhere.on_read = on_read
    with pytest.raises(ConnectionResetError):
        again(file_url)
    with Origin.open(file_url) as origin:
        (info,) = origin.store.list("transfers/", deadline)
        journal, _ = read_journal(origin.store, info.key, deadline)
        assert journal.owner == ""
    elsewhere.on_read = lambda number: None
    result = deploy("elsewhere://", file_url, "m@a", pace=replace(PACE, silent=3600))
    whole(file_url, result.manifest, deadline)


@pytest.mark.parametrize("tells", ["version", "sha256"])
def test_what_is_converted_is_fetched_once(source, file_url, work, monkeypatch, deadline, tells):
    torch.save({"w": torch.randn(200, 200)}, source / "pytorch_model.bin")
    upstream = opened(source, monkeypatch, tells)
    first = again(file_url, work=work)
    assert upstream.read_of("pytorch_model.bin") == (source / "pytorch_model.bin").stat().st_size
    whole(file_url, first.manifest, deadline)
    read = upstream.read_of("pytorch_model.bin")
    second = again(file_url, work=work)
    assert (second.manifest, second.moved) == (first.manifest, ())
    assert upstream.read_of("pytorch_model.bin") == read
    assert not list(work.iterdir())


def test_a_fetched_file_is_held_to_what_is_published(source, file_url, work, monkeypatch):
    torch.save({"w": torch.randn(200, 200)}, source / "pytorch_model.bin")
    upstream = opened(source, monkeypatch, "sha256")
    files = upstream.files

    def lie(deadline):
        return tuple(
            replace(file, sha256="ab" * 32) if file.path.endswith(".bin") else file
            for file in files(deadline)
        )

    monkeypatch.setattr(upstream, "files", lie)
    with pytest.raises(IntegrityError, match=r"pytorch_model\.bin: .* as the upstream publishes"):
        again(file_url, work=work)
    assert not list(work.iterdir())


def whole(url: str, manifest, deadline: Deadline) -> None:
    with Origin.open(url) as origin:
        assert verify(origin, manifest, deadline) == []
