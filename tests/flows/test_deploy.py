"""What a deploy does when it is run, and when it is run again."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from warmcast.flows.convert import process
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.run import deploy
from warmcast.flows.steps.convert import ConversionRecord
from warmcast.manifests import Origin, Ref
from warmcast.manifests.canonical import canonical_json
from warmcast.manifests.errors import InvalidData, UsageError


@pytest.fixture
def safetensors(source):
    save_file(
        {"layers.0.w": torch.randn(8, 8), "norm": torch.ones(3)}, source / "model.safetensors"
    )
    return source


@pytest.fixture
def pickles(source):
    torch.save({"layers.0.w": torch.randn(8, 8), "norm": torch.ones(3)}, source / "weights.pt")
    return source


def ref_of(url, ref, deadline):
    with Origin.open(url) as origin:
        return origin.ref(Ref.parse(ref), deadline)


def test_first_and_second_time(safetensors, store_url, deadline):
    first = deploy(safetensors, store_url, "org/m@prod", deadline=deadline)
    assert first.changed
    assert set(first.moved) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert first.moved_nbytes == first.manifest.nbytes
    assert first.manifest.model == "org/m"
    before = ref_of(store_url, "org/m@prod", deadline)
    second = deploy(safetensors, store_url, "org/m@prod", deadline=deadline)
    assert (second.changed, second.moved, second.moved_nbytes) == (False, (), 0)
    assert second.kept_nbytes == first.manifest.nbytes
    assert second.manifest == first.manifest
    assert "nothing changed" in second.summary()
    assert ref_of(store_url, "org/m@prod", deadline) == before


def test_pickles_a_second_time_are_not_converted(pickles, store_url, work, deadline, monkeypatch):
    first = deploy(pickles, store_url, "m@a", work=work, deadline=deadline)

    def convert(*_, **__):
        raise AssertionError("converted again")

    monkeypatch.setattr(process, "convert", convert)
    second = deploy(pickles, store_url, "m@a", work=work, deadline=deadline)
    assert (second.changed, second.moved) == (False, ())
    assert second.manifest == first.manifest
    other = deploy(pickles, store_url, "other@b", work=work, deadline=deadline)
    assert (other.changed, other.moved) == (True, ())
    assert other.manifest.tensors == first.manifest.tensors


def test_conversion_depends_on_its_options(pickles, file_url, work):
    deploy(pickles, file_url, "m@a", work=work)
    result = deploy(
        pickles, file_url, "m@a", work=work, convert=ConvertOptions(max_shard_nbytes=16)
    )
    assert len([f for f in result.manifest.files if f.path.endswith(".safetensors")]) == 2
    assert result.changed


@pytest.mark.parametrize("damage", ["blob", "record"])
def test_a_conversion_that_is_not_all_there_is_done_again(
    pickles, file_url, work, deadline, damage
):
    first = deploy(pickles, file_url, "m@a", work=work)
    with Origin.open(file_url) as origin:
        (record,) = [info.key for info in origin.store.list("upstreams/", deadline)]
        if damage == "blob":
            blob = first.manifest.file["model.safetensors"].sha256
            origin.store.delete(f"blobs/sha256/{blob[:2]}/{blob}", deadline)
        else:
            origin.store.delete(record, deadline)
            origin.store.create(record, canonical_json({"no": "record"}), deadline)
    second = deploy(pickles, file_url, "m@a", work=work)
    assert second.manifest == first.manifest
    assert second.moved == (("model.safetensors",) if damage == "blob" else ())
    with Origin.open(file_url) as origin:
        data, _ = origin.store.read(record, deadline)
    assert ConversionRecord.model_validate_json(data).files


def test_same_bytes_cross_once(source, file_url):
    save_file({"w": torch.ones(3)}, source / "model.safetensors")
    (source / "copy").mkdir()
    (source / "copy" / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    result = deploy(source, file_url, "m@a")
    assert result.manifest.file["copy/tokenizer.json"].sha256 in {
        f.sha256 for f in result.manifest.files if f.path == "tokenizer.json"
    }


def test_empty_files_are_mirrored(safetensors, store_url, deadline):
    (safetensors / "empty.txt").touch()
    entry = deploy(safetensors, store_url, "m@a", deadline=deadline).manifest.file["empty.txt"]
    assert (entry.size, entry.chunks) == (0, ())


def test_new_content_moves_only_what_is_new(safetensors, file_url):
    first = deploy(safetensors, file_url, "m@a")
    (safetensors / "config.json").write_text('{"hidden_size": 9}')
    second = deploy(safetensors, file_url, "m@a")
    assert second.moved == ("config.json",)
    assert second.changed
    assert second.manifest.model_key != first.manifest.model_key


def test_config_that_json_does_not_know(safetensors, file_url):
    (safetensors / "config.json").write_text('{"a": [NaN, {"b": -Infinity}], "c": 1e999, "d": 0.5}')
    manifest = deploy(safetensors, file_url, "m@a").manifest
    assert manifest.config == {"a": ["NaN", {"b": "-Infinity"}], "c": "1e999", "d": 0.5}


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", '{"a": ' * 10**5])
def test_config_that_is_none(safetensors, file_url, text):
    (safetensors / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidData, match=r"config\.json"):
        deploy(safetensors, file_url, "m@a")


def test_no_config(safetensors, file_url):
    (safetensors / "config.json").unlink()
    assert deploy(safetensors, file_url, "m@a").manifest.config == {}


def test_no_path_of_this_machine_is_published(safetensors, file_url, tmp_path):
    manifest = deploy(safetensors, file_url, "m@a", revision="v7").manifest
    assert str(tmp_path) not in manifest.data.decode()
    assert (manifest.upstream, manifest.revision) == ("folder:source", "v7")


def test_record_is_json(safetensors, file_url):
    record = deploy(safetensors, file_url, "m@a").record()
    assert json.loads(json.dumps(record)) == record
    assert record["moved_files"] == 3


def test_a_work_folder_that_is_not_there(safetensors, file_url, tmp_path):
    with pytest.raises(UsageError):
        deploy(safetensors, file_url, "m@a", work=tmp_path / "nowhere")


@pytest.mark.parametrize("ref", ["", "m", "m@", "@a", "m@a@b", "../m@a", "m@a/b"])
def test_wrong_ref(safetensors, file_url, ref):
    with pytest.raises(UsageError, match="ref"):
        deploy(safetensors, file_url, ref)
