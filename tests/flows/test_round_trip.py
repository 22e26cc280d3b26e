"""What comes back from the origin is what ``torch.load`` and ``load_file`` give, to the bit."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from tests.flows.checkpoints import bits, opened
from warmcast.flows.convert import pickle
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.convert.plain import NotPlain
from warmcast.flows.convert.state_dict import dense, state_dict
from warmcast.flows.errors import InvalidCheckpoint
from warmcast.flows.run import deploy
from warmcast.manifests import Manifest, Origin
from warmcast.manifests.errors import InvalidManifest
from warmcast.manifests.origin import blob_key

OLD = {torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32}


def pickled(
    state: object, source: Path, name: str = "pytorch_model.bin", **options: object
) -> Path:
    torch.save(state, source / name, **options)
    return source


@pytest.fixture
def deployed(source, file_url, work, deadline):
    """Deploys a state dict as a pickle; its manifest."""

    def run(state: object, name: str = "pytorch_model.bin", legacy: bool = False) -> Manifest:
        pickled(state, source, name, _use_new_zipfile_serialization=not legacy)
        result = deploy(source, file_url, "m@a", work=work, deadline=deadline)
        assert not list(work.iterdir())
        return result.manifest

    return run


@pytest.mark.parametrize(
    ("name", "legacy"),
    [("pytorch_model.bin", False), ("weights.pt", True), ("weights.pth", False)],
)
def test_pickles(deployed, restore, same_bits, dtypes_state, name, legacy, file_url, tmp_path):
    if legacy:  # torch cannot load what it saved of the newer dtypes in its old format
        dtypes_state = {n: t for n, t in dtypes_state.items() if t.dtype in OLD}
    state = dtypes_state | {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}
    manifest = deployed(state, name, legacy)
    same_bits(restore(manifest), state)
    assert not manifest.tied
    assert [f.path for f in manifest.files] == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert manifest.config == {"hidden_size": 8, "name": "böse"}
    # The file is what the library reads, too.
    converted = blob_key(manifest.file["model.safetensors"].sha256)
    shutil.copy(Path(file_url.removeprefix("file://")) / converted, tmp_path / "x.safetensors")
    same_bits(load_file(tmp_path / "x.safetensors"), state)


def cases() -> dict[str, dict[str, torch.Tensor]]:
    """Ways for tensors to lie in memory, each a group of tensors that share with nobody else."""
    embed, fused, line = torch.randn(16, 4), torch.randn(12, 4), torch.arange(10.0)
    turned, columns = torch.randn(4, 6).t(), torch.randn(4, 6)
    pairs = torch.randint(0, 256, (4, 6), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    return {
        "strides": {
            "transposed": torch.randn(6, 8, dtype=torch.bfloat16).t(),
            "strided": torch.randn(6, 8, dtype=torch.float16)[::2, 1::3],
            "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
            "fp8": torch.randn(4, 6).to(torch.float8_e4m3fn).t(),
            "complex": torch.randn(3, 4, dtype=torch.complex64).t(),
            "parameter": torch.nn.Parameter(torch.randn(2)),
            "scalar": torch.tensor(2, dtype=torch.int8),
            "empty": torch.empty(2, 0, dtype=torch.float64),
        },
        "conjugate": {"conjugate": torch.randn(3, 4, dtype=torch.complex64).conj()},
        "whole": {"lm_head.weight": embed, "model.embed_tokens.weight": embed},
        "inside": {
            "qkv": fused, "q": fused[:4], "k": fused[4:8], "column": fused[:, 0], "t": fused.t(),
        },
        "partial": {"a": line[:6], "b": line[4:]},
        "turned": {"c": turned, "d": turned, "e": turned[1:3]},
        "columns": {"left": columns[:, :3], "right": columns[:, 3:]},
        "pairs": {"f4": pairs, "f4.too": pairs},
    }  # fmt: skip


@pytest.fixture
def everything(deployed):
    """One deployment of all cases, because each conversion costs a process that imports torch."""
    groups = cases()
    return groups, deployed({n: t for group in groups.values() for n, t in group.items()})


def test_every_way_to_lie_in_memory(everything, restore, same_bits):
    groups, manifest = everything
    state = {n: t.resolve_conj() for group in groups.values() for n, t in group.items()}
    same_bits(restore(manifest), state)
    bases = {tie.name: tie.of for tie in manifest.tied}
    stored = set(manifest.tensor)
    assert not set(groups["strides"] | groups["conjugate"] | groups["columns"]) - stored
    assert bases["lm_head.weight"] == "model.embed_tokens.weight"
    assert {bases[name] for name in ("q", "k", "column", "t")} == {"qkv"}
    assert bases["a"] == bases["b"] != bases["c"] == bases["d"] == bases["e"]
    assert {n for n in stored if n.startswith("warmcast.")} == {bases["a"], bases["c"]}
    assert [t.stride for t in manifest.tied if t.name.startswith("f4")] == [(12, 1)]
    # A write to one name is a write to the others, and to nobody else.
    for tied in ("whole", "inside", "partial", "turned"):
        found = restore(manifest)
        first = next(iter(groups[tied]))
        before = {name: tensor.clone() for name, tensor in found.items()}
        found[first].fill_(-7)
        changed = {n for n in found if bits(found[n]) != bits(before[n])}
        assert changed == set(groups[tied])


def test_plain_state_dicts_are_read_as_torch_reads_them(tmp_path, monkeypatch, dtypes_state):
    fused, line = torch.randn(12, 4), torch.arange(10.0)
    plain_dtypes = {n: t for n, t in dtypes_state.items() if t.dtype != torch.float4_e2m1fn_x2}
    state = plain_dtypes | {
        "qkv": fused, "q": fused[:4], "a": line[:6], "b": line[4:], "lone": line.clone()[2:5],
        "parameter": torch.nn.Parameter(torch.randn(2)), "empty": torch.empty(2, 0),
        "scalar": torch.tensor(2, dtype=torch.int8), "number": 3,
    }  # fmt: skip
    for name, saved in (("x.bin", state), ("y.bin", {"model": OrderedDict(state), "epoch": 3})):
        torch.save(saved, tmp_path / name)
        found, plain = opened("pickle", [tmp_path / name])
        assert all(tensor.extents is not None for tensor in plain.tensors)
        with monkeypatch.context() as patch:
            patch.setattr(pickle, "load_plain", not_plain)
            expected, torchs = opened("pickle", [tmp_path / name])
        assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in expected.items()}
        assert (plain.tied, plain.left_out) == (torchs.tied, torchs.left_out)
        assert [(t.name, t.extents) for t in plain.tensors] == [
            (t.name, t.extents) for t in torchs.tensors
        ]


def test_strided_tensors_a_block_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("warmcast.flows.convert.tensors.PIECE", 20)
    line = torch.arange(120.0)
    state = {
        "turned": line.reshape(4, 30).t(),
        "deep": line.clone().reshape(2, 3, 20).permute(2, 0, 1)[:, :, :2],
        "conj": torch.randn(5, 6, dtype=torch.complex64).t().conj(),
        "neg": torch.randn(5, 6, dtype=torch.complex64).conj().imag,
    }
    torch.save(state, tmp_path / "x.bin")
    found, _ = opened("pickle", [tmp_path / "x.bin"])
    for name, tensor in state.items():
        assert bits(found[name]) == bits(tensor.resolve_conj().resolve_neg()), name


def not_plain(*_):
    raise NotPlain


def test_expanded_tensor_stays_small(deployed, restore):
    state = {"big": torch.ones(1).expand(1 << 20, 1 << 20), "other": torch.ones(3)}
    manifest = deployed(state)
    assert manifest.file["model.safetensors"].size < 4096
    big = restore(manifest)["big"]
    assert (tuple(big.shape), big.stride(), big[5, 7].item()) == ((1 << 20, 1 << 20), (0, 0), 1.0)


def test_wrappers():
    weight = torch.nn.Parameter(torch.randn(3, 3))
    step = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
    loaded = {"epoch": 3, "optimizer": step, "state_dict": {"w": weight, "n": 5}}
    tensors, ignored = state_dict(loaded, "x.pt", torch.Tensor)
    assert tensors == {"w": weight}
    assert ignored == [
        "x.pt: state_dict: 'n' (int)", "x.pt: 'epoch' (int)", "x.pt: 'optimizer' (dict)",
    ]  # fmt: skip


def test_left_out_is_told(source, file_url, work):
    pickled({"epoch": 3, "model": {"w": torch.ones(1), "n": 5}}, source)
    (source / "model.onnx").write_bytes(b"x")
    (source / "optimizer.pt").write_bytes(b"x")
    (source / ".cache").mkdir()
    (source / ".cache" / "x").write_bytes(b"x")
    result = deploy(source, file_url, "m@a", work=work)
    told = "\n".join(result.left_out)
    for part in ("model.onnx", "optimizer.pt", "'epoch' (int)", "'n' (int)"):
        assert part in told
    assert "model.onnx" not in result.manifest.file
    assert ".cache/x" not in result.manifest.file


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([torch.ones(1)], "a dict of tensors"),
        ({"a": 1}, "keys a"),
        ({"model": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}}, "ema, model"),
        ({"weights": {"w": torch.ones(1)}}, "weights"),
        ({"w": torch.ones(1), "deep": {"x": [torch.ones(1)]}}, "deep"),
        ({"w": torch.ones(2, 2).to_sparse()}, "sparse"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, "complex128"),
        ({3: torch.ones(2)}, "names of tensors"),
        ({"warmcast.storage.0": torch.ones(2)}, "which is taken"),
    ],
)
def test_what_cannot_be_stored_is_refused(state, words):
    with pytest.raises(InvalidCheckpoint, match=words):
        tensors, _ = state_dict(state, "x.bin", torch.Tensor)
        for name, tensor in tensors.items():
            dense("x.bin", name, tensor)


def test_sharded_pickles(source, file_url, work, restore, same_bits):
    embed = torch.randn(8, 4)
    shards = [
        {
            "embed.weight": embed,
            "lm_head.weight": embed,
            "a": torch.ones(3),
            "b": torch.ones(4)[1:3],
        },
        {"layers.0.w": torch.randn(5, 5).t(), "layers.1.w": torch.randn(2), "x": torch.arange(4)},
    ]
    line = torch.arange(9.0)
    shards[0] |= {"over.1": line[:5], "over.2": line[3:]}
    shards[1] |= {"over.3": line[:5].clone()}
    shards[1]["over.4"] = shards[1]["over.3"].expand(2, 5)
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name, state in zip(names, shards, strict=True):
        torch.save(state, source / name)
    weight_map = {key: n for n, state in zip(names, shards, strict=True) for key in state}
    index = source / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    result = deploy(
        source, file_url, "m@a", work=work, convert=ConvertOptions(max_shard_nbytes=100)
    )
    same_bits(restore(result.manifest), shards[0] | shards[1])
    assert result.manifest.tensor["warmcast.storage.0"]
    assert "pytorch_model.bin.index.json" not in result.manifest.file
    written = json.loads(
        (Path(file_url.removeprefix("file://"))
         / blob_key(result.manifest.file["model.safetensors.index.json"].sha256)).read_text()
    )  # fmt: skip
    stored = {t.name: t.file for t in result.manifest.tensors}
    assert written["weight_map"] == stored
    assert written["metadata"]["total_size"] == sum(t.nbytes for t in result.manifest.tensors)
    assert len(set(stored.values())) > 2


def test_safetensors_are_kept_byte_for_byte(source, file_url, restore, same_bits, dtypes_state):
    save_file(dtypes_state, source / "model.safetensors", metadata={"format": "pt"})
    (source / "1_Dense").mkdir()
    save_file({"linear.weight": torch.ones(2)}, source / "1_Dense" / "model.safetensors")
    torch.save({"other": torch.ones(1)}, source / "pytorch_model.bin")
    manifest = deploy(source, file_url, "m@a").manifest
    same_bits(restore(manifest), load_file(source / "model.safetensors"))
    assert "1_Dense/model.safetensors" in manifest.file
    assert "pytorch_model.bin" not in manifest.file
    with Origin.open(file_url) as origin:
        path = Path(origin.url.removeprefix("file://"))
    for file in manifest.files:
        assert (path / blob_key(file.sha256)).read_bytes() == (source / file.path).read_bytes()


def test_ties_in_safetensors_metadata(source, file_url, restore):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Model()
    save_model(model, str(source / "model.safetensors"))
    manifest = deploy(source, file_url, "m@a").manifest
    assert len(manifest.tensors) == len(manifest.tied) == 1
    found = restore(manifest)
    assert set(found) == {"embed.weight", "head.weight"}
    assert torch.equal(found["head.weight"], model.head.weight)


def test_a_converted_checkpoint_keeps_its_ties(deployed, source, file_url, restore, same_bits):
    line = torch.arange(10.0)
    state = {"a": line[:6], "b": line[4:], "a2": line[:6], "w": torch.ones(3), "v": torch.ones(4)}
    state |= {"w2": state["w"], "v2": state["v"][1:]}
    first = deployed(state)
    converted = Path(file_url.removeprefix("file://")) / blob_key(
        first.file["model.safetensors"].sha256
    )
    (source / "pytorch_model.bin").unlink()
    shutil.copy(converted, source / "model.safetensors")
    second = deploy(source, file_url, "m@b").manifest
    assert (second.tensors, second.tied) == (first.tensors, first.tied)
    same_bits(restore(second), state)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"name": "a"}]'])
def test_ties_in_metadata_that_are_none(source, file_url, text):
    save_file({"w": torch.ones(2)}, source / "model.safetensors", {"warmcast.tied": text})
    with pytest.raises(InvalidManifest, match=r"warmcast\.tied"):
        deploy(source, file_url, "m@a")


def test_ties_in_metadata_that_reach_out(source, file_url):
    tie = {"name": "v", "of": "w", "shape": [3], "stride": [1], "offset": 0}
    save_file(
        {"w": torch.ones(2)}, source / "model.safetensors", {"warmcast.tied": json.dumps([tie])}
    )
    with pytest.raises(InvalidManifest, match=r"tied\.0\.offset"):
        deploy(source, file_url, "m@a")
