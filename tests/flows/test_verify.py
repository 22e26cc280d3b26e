"""Verification finds what was done to the blobs, and repair mends it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from warmcast.flows.run import deploy
from warmcast.flows.steps.verify import verify
from warmcast.manifests import Origin
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, IntegrityError
from warmcast.manifests.origin import blob_key


@pytest.fixture
def manifest(source, file_url):
    state = {"a": torch.arange(100.0), "b": torch.arange(50, dtype=torch.int16)}
    save_file(state, source / "model.safetensors")
    return deploy(source, file_url, "m@a").manifest


@pytest.fixture
def blob(manifest, file_url):
    return Path(file_url.removeprefix("file://")) / blob_key(
        manifest.file["model.safetensors"].sha256
    )


def check(manifest, file_url, deadline):
    with Origin.open(file_url) as origin:
        return verify(origin, manifest, deadline)


def flip(blob, manifest, name):
    data = bytearray(blob.read_bytes())
    data[manifest.tensor[name].begin + 5] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)


def test_all_right(manifest, file_url, deadline):
    assert check(manifest, file_url, deadline) == []


def test_flipped_bit_names_the_tensor(manifest, blob, file_url, deadline):
    flip(blob, manifest, "b")
    (problem,) = check(manifest, file_url, deadline)
    assert problem.path == "model.safetensors"
    assert "1 of 1 chunks" in problem.what
    assert "wrong tensors: b;" in problem.what


@pytest.mark.parametrize(("size", "words"), [(100, "found 100: truncated"), (9999, "found 9999")])
def test_wrong_size(manifest, blob, file_url, deadline, size, words):
    blob.chmod(0o644)
    os.truncate(blob, size)
    (problem,) = check(manifest, file_url, deadline)
    assert words in problem.what


def test_missing(manifest, blob, file_url, deadline):
    blob.unlink()
    (problem,) = check(manifest, file_url, deadline)
    assert problem.what == "missing"


def test_several(manifest, blob, file_url, deadline):
    for file in manifest.files:
        (Path(file_url.removeprefix("file://")) / blob_key(file.sha256)).unlink()
    assert len(check(manifest, file_url, deadline)) == len(manifest.files)


def test_deadline(manifest, file_url):
    with pytest.raises(DeadlineExceeded):
        check(manifest, file_url, Deadline.after(0))


def test_a_truncated_blob_is_mended_by_deploying_again(manifest, blob, source, file_url, deadline):
    blob.chmod(0o644)
    os.truncate(blob, 10)
    assert deploy(source, file_url, "m@a").moved == ("model.safetensors",)
    assert check(manifest, file_url, deadline) == []


def test_a_flipped_bit_is_mended_by_repair(manifest, blob, source, file_url, deadline):
    flip(blob, manifest, "a")
    assert deploy(source, file_url, "m@a").moved == ()  # a file store knows no checksum
    assert deploy(source, file_url, "m@a", repair=True).moved == ("model.safetensors",)
    assert check(manifest, file_url, deadline) == []


def test_repair_of_a_conversion(source, file_url, work, deadline):
    torch.save({"w": torch.ones(9)}, source / "weights.pt")
    manifest = deploy(source, file_url, "m@p", work=work).manifest
    path = Path(file_url.removeprefix("file://")) / blob_key(
        manifest.file["model.safetensors"].sha256
    )
    flip(path, manifest, "w")
    again = deploy(source, file_url, "m@p", work=work, repair=True)
    assert (again.moved, again.changed) == (("model.safetensors",), False)
    assert check(manifest, file_url, deadline) == []


def test_a_damaged_manifest_is_replaced(manifest, source, file_url, deadline):
    path = Path(file_url.removeprefix("file://")) / f"manifests/sha256/{manifest.digest}.json"
    path.write_bytes(manifest.data.replace(b"folder:source", b"folder:sourcf"))
    with Origin.open(file_url) as origin, pytest.raises(IntegrityError):
        origin.resolve("m@a", deadline)
    later = deploy(source, file_url, "m@a", revision="2")
    assert later.changed
    with Origin.open(file_url) as origin:
        assert origin.resolve("m@a", deadline) == later.manifest
