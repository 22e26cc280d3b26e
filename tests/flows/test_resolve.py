"""Which files are the weights, and what a folder that has none, too many or half of them says."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from warmcast.flows.errors import (
    AmbiguousWeights,
    InvalidIndex,
    MissingShard,
    NoWeights,
    SourceError,
)
from warmcast.flows.run import deploy
from warmcast.flows.steps.resolve import resolve
from warmcast.flows.upstreams import open_upstream
from warmcast.manifests.errors import InvalidHeader, UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def plan(source, deadline):
    """Fills a folder with empty files and resolves it."""

    def run(*paths):
        for path in paths:
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).touch()
        return resolve(open_upstream(source), deadline)

    return run


def names(files):
    return [file.path for file in files]


def index(source, weight_map, name="model.safetensors.index.json"):
    (source / name).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("paths", "weights"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (["adapter_model.safetensors"], ["adapter_model.safetensors"]),
        (["x-00001-of-00002.safetensors", "x-00002-of-00002.safetensors"], None),
        (["pytorch_model.bin", "training_args.bin", "optimizer.pt"], ["pytorch_model.bin"]),
        (["weights.pth", "rng_state_0.pth"], ["weights.pth"]),
        (["a.bin", "1_Dense/pytorch_model.bin"], ["a.bin"]),
        (["a.pt", "openvino_model.bin"], ["a.pt"]),
        (["a.safetensors", "a.gguf", ".metadata", "__0_0.distcp"], ["a.safetensors"]),
        (
            [".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt"],
            [
                ".metadata",
                "__0_0.distcp",
                "__1_0.distcp",
            ],
        ),
        (["a.gguf", "imatrix.dat"], ["a.gguf"]),
        (["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"], None),
    ],
)
def test_choice(plan, paths, weights):
    assert names(plan(*paths).weights) == (weights or paths)


def test_others_and_left_out(plan, source):
    found = plan(
        "model.safetensors", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "extra.pt",
        "1_Pooling/config.json", "sub/model.safetensors", ".git/config", ".gitattributes",
    )  # fmt: skip
    assert names(found.others) == [
        "1_Pooling/config.json", "config.json", "sub/model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    told = [line.partition(":")[0] for line in found.left_out]
    assert told == ["extra.pt", "flax_model.msgpack", "onnx/model.onnx", "tf_model.h5"]


def test_an_index_of_pickles_is_not_mirrored(plan, source):
    index(source, {"a": "a.bin"}, "pytorch_model.bin.index.json")
    found = plan("a.bin")
    assert found.format == "pickle"
    assert names(found.others) == ["config.json", "tokenizer.json"]


def test_links_of_the_hub_cache_are_followed(tmp_path, deadline):
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_bytes(b"x")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    upstream = open_upstream(snapshot)
    assert (upstream.name, upstream.revision) == ("folder:org/name", COMMIT)
    (file,) = resolve(upstream, deadline).weights
    assert file.size == 1


@pytest.mark.parametrize(
    ("paths", "error", "words"),
    [
        ([], NoWeights, r"expected \.safetensors.*found config\.json, tokenizer\.json"),
        (["deep/model.safetensors"], NoWeights, "top folder"),
        (["model.onnx"], NoWeights, r"model\.onnx"),
        (["a.gguf", "b.gguf"], AmbiguousWeights, "a.gguf, b.gguf"),
        ([".metadata", "x/__0_0.distcp"], NoWeights, "top folder"),
        (
            ["x/.metadata", "x/__0_0.distcp", "y/.metadata", "y/__0_0.distcp"],
            AmbiguousWeights,
            "one distributed checkpoint",
        ),
        (["a.safetensors", "b.safetensors"], AmbiguousWeights, "a.safetensors, b.safetensors"),
        (["a.pt", "b.bin"], AmbiguousWeights, "a.pt, b.bin|b.bin, a.pt"),
        (["x-00001-of-00003.bin", "x-00003-of-00003.bin"], MissingShard, "x-00002-of-00003.bin"),
    ],
)
def test_folders_that_cannot_be_deployed(plan, paths, error, words):
    with pytest.raises(error, match=words):
        plan(*paths)


def test_two_indices(plan, source):
    index(source, {"a": "a.safetensors"})
    index(source, {"a": "a.safetensors"}, "other.safetensors.index.json")
    with pytest.raises(AmbiguousWeights, match="one index"):
        plan("a.safetensors")


def test_index_that_names_a_missing_shard(plan, source):
    index(source, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(MissingShard, match=r"index\.json: expected all of 2.*no 2\.safetensors"):
        plan("1.safetensors")


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../b", "a\\b", "", "a\nb", "./a"])
def test_index_that_leaves_the_folder(plan, source, path):
    index(source, {"a": path})
    with pytest.raises(InvalidIndex, match=r"weight_map: 'a'"):
        plan()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "\xff", "[" * 10**5]
)
def test_index_that_is_none(plan, source, text):
    (source / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidIndex, match=r"index\.json"):
        plan()


def test_index_that_contradicts_its_shards(source, file_url):
    save_file({"a": torch.ones(1)}, source / "1.safetensors")
    save_file({"b": torch.ones(1)}, source / "2.safetensors")
    index(source, {"a": "1.safetensors", "b": "1.safetensors"})
    with pytest.raises(InvalidIndex, match=r"'b': expected to be in '1.*found it in no shard"):
        deploy(source, file_url, "m@a")
    index(source, {"a": "2.safetensors", "b": "2.safetensors"})
    with pytest.raises(InvalidIndex, match="'a'"):
        deploy(source, file_url, "m@a")


def test_tensor_that_the_index_does_not_name_is_told_and_deployed(source, file_url):
    save_file({"a": torch.ones(1), "more": torch.ones(2)}, source / "1.safetensors")
    index(source, {"a": "1.safetensors"})
    result = deploy(source, file_url, "m@a")
    assert set(result.manifest.tensor) == {"a", "more"}
    assert "more" in result.left_out[0]


def test_one_name_in_two_shards(source, file_url):
    for number in (1, 2):
        save_file({"a": torch.ones(1)}, source / f"x-0000{number}-of-00002.safetensors")
    with pytest.raises(InvalidIndex, match="expected each tensor in one shard"):
        deploy(source, file_url, "m@a")


def test_truncated_safetensors(source, file_url):
    save_file({"a": torch.ones(100)}, source / "model.safetensors")
    os.truncate(source / "model.safetensors", 300)
    with pytest.raises(InvalidHeader, match=r"model\.safetensors: .*cut off"):
        deploy(source, file_url, "m@a")


def test_safetensors_without_tensors(source, file_url):
    save_file({}, source / "model.safetensors")
    with pytest.raises(NoWeights, match="empty"):
        deploy(source, file_url, "m@a")


def test_dangling_link(plan, source):
    (source / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(MissingShard, match="behind the link"):
        plan()


def test_folders_that_link_to_themselves(plan, source):
    (source / "loop").symlink_to(".")
    with pytest.raises(SourceError, match="a link to a folder above it"):
        plan("model.safetensors")


def test_pipe(plan, source):
    os.mkfifo(source / "pipe")
    with pytest.raises(SourceError, match="a device or a pipe"):
        plan("model.safetensors")


@pytest.mark.parametrize("name", ["nowhere", "config.json"])
def test_source_that_is_no_folder(source, name):
    with pytest.raises(UsageError, match="expected a folder"):
        open_upstream(source / name)


def test_source_of_an_unknown_kind():
    with pytest.raises(UsageError, match="found ftp://"):
        open_upstream("ftp://x")
