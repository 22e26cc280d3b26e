"""LoRA adapters: deployed as they are, or merged into a base as PEFT computes it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.flows.checkpoints import opened, values
from warmcast.flows.convert.lora import merge_adapter
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.errors import InvalidCheckpoint, NoWeights
from warmcast.flows.run import deploy
from warmcast.manifests.errors import NotFound, UsageError

PREFIX = "base_model.model."
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def pair(module: str, a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {
        f"{PREFIX}{module}.lora_A.weight": rand(*a),
        f"{PREFIX}{module}.lora_B.weight": rand(*b),
    }


BASE = {
    "embed.weight": rand(10, 4),
    "layers.0.q.weight": rand(6, 4).bfloat16(),
    "layers.0.conv.weight": rand(5, 3, 2, 2),
    "layers.0.other.weight": rand(3, 3).half(),
    "head.weight": rand(10, 4),
}
Q = pair("layers.0.q", (2, 4), (6, 2))


def merged(tmp_path: Path, adapter: dict, config: dict, base: dict | None = None):
    """A base and an adapter, merged; without a process of their own."""
    save_file(base or BASE, tmp_path / "base.safetensors")
    save_file(adapter, tmp_path / "adapter.safetensors")
    state: dict = {}

    def change(checkpoint):
        def merge(found):
            state.update(values(merge_adapter(checkpoint, found, CONFIG | config)))
            return found

        opened("safetensors", [tmp_path / "adapter.safetensors"], change=merge)
        return checkpoint

    opened("safetensors", [tmp_path / "base.safetensors"], change=change)
    return state


def delta(scale: float = 3.0) -> torch.Tensor:
    a, b = Q.values()
    return scale * (b @ a)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_linear(tmp_path):
    found = merged(tmp_path, Q, {})
    base = BASE["layers.0.q.weight"]
    assert torch.equal(found["layers.0.q.weight"], (base.float() + delta()).bfloat16())
    for name in set(BASE) - {"layers.0.q.weight"}:
        assert torch.equal(found[name], BASE[name])


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"use_rslora": True}, 6 / math.sqrt(2)),
        ({"r": 64, "rank_pattern": {"q": 2}}, 3),
        ({"r": 64, "rank_pattern": {r"layers\.\d+\.q": 2}}, 3),
        ({"alpha_pattern": {"layers.0.q": 4, "q": 8}}, 2),
        ({"alpha_pattern": {"yers.0.q": 4}}, 3),
    ],
)
def test_scale(tmp_path, config, scale):
    base = {"layers.0.q.weight": BASE["layers.0.q.weight"].float()}
    found = merged(tmp_path, Q, config, base)
    assert same(found["layers.0.q.weight"], base["layers.0.q.weight"] + delta(scale))


def test_fan_in_fan_out(tmp_path):
    base = {"layers.0.q.weight": rand(4, 6)}
    found = merged(tmp_path, Q, {"fan_in_fan_out": True}, base)
    assert same(found["layers.0.q.weight"], base["layers.0.q.weight"] + delta().T)


def test_convolution(tmp_path):
    adapter = pair("layers.0.conv", (2, 3, 2, 2), (5, 2, 1, 1))
    a, b = adapter.values()
    expected = torch.nn.functional.conv2d(a.permute(1, 0, 2, 3), b).permute(1, 0, 2, 3)
    found = merged(tmp_path, adapter, {})["layers.0.conv.weight"]
    assert same(found, BASE["layers.0.conv.weight"] + 3 * expected)


def test_embedding(tmp_path):
    a, b = rand(2, 10), rand(4, 2)
    adapter = {f"{PREFIX}embed.lora_embedding_A": a, f"{PREFIX}embed.lora_embedding_B": b}
    found = merged(tmp_path, adapter, {})["embed.weight"]
    assert same(found, BASE["embed.weight"] + 3 * (b @ a).T)


def test_modules_to_save(tmp_path):
    adapter = Q | {f"{PREFIX}head.weight": rand(10, 4) + 1}
    adapter[f"{PREFIX}layers.0.other.base_layer.weight"] = rand(3, 3) + 1
    found = merged(tmp_path, adapter, {"modules_to_save": ["head"], "bias": "all"})
    assert torch.equal(found["head.weight"], rand(10, 4) + 1)
    assert torch.equal(found["layers.0.other.weight"], (rand(3, 3) + 1).half())


def test_pieces_that_cut_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("warmcast.flows.convert.tensors.PIECE", 24)
    monkeypatch.setattr("warmcast.flows.convert.tensors.Files.pieces.__defaults__", (24,))
    base = {"layers.0.q.weight": rand(6, 4)}
    found = merged(tmp_path, Q, {}, base)
    assert same(found["layers.0.q.weight"], base["layers.0.q.weight"] + delta())


@pytest.mark.parametrize(
    ("adapter", "config", "words"),
    [
        (Q, {"use_dora": True}, "use_dora"),
        (Q, {"peft_type": "IA3"}, "peft_type.*IA3"),
        (Q, {"layer_replication": [[0, 1]]}, "layer_replication"),
        (Q, {"target_parameters": ["experts"]}, "target_parameters"),
        (Q, {"lora_bias": True}, "lora_bias"),
        (Q, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights.*pissa_niter_4"),
        (Q, {"bias": "some"}, "bias"),
        (Q, {"r": 3}, "the rank of adapter_config.json, 3"),
        (Q, {"r": None}, "the rank"),
        (Q, {"lora_alpha": "6"}, "lora_alpha"),
        (Q, {"rank_pattern": {"(": 2}}, "rank_pattern"),
        (Q, {"rank_pattern": [1]}, "rank_pattern"),
        (pair("layers.9.q", (2, 4), (6, 2)), {}, r"layers\.9\.q\.weight.*no such tensor"),
        (pair("layers.0.q", (2, 5), (6, 2)), {}, "to fit"),
        (pair("layers.0.q", (2, 4), (6, 3)), {}, "to fit"),
        (dict(list(Q.items())[:1]), {}, r"lora_B\.weight beside it"),
        ({f"{PREFIX}x.lora_magnitude_vector": rand(3)}, {}, "lora_A and lora_B"),
        ({"x.weight": rand(3)}, {}, "lora_A and lora_B"),
        ({f"{PREFIX}head.weight": rand(11, 4)}, {}, r"found F32 \[11, 4\]"),
        ({f"{PREFIX}head.weight": torch.ones(10, 4).int()}, {}, "found I32"),
    ],
)
def test_what_cannot_be_merged(tmp_path, adapter, config, words):
    with pytest.raises(InvalidCheckpoint, match=words):
        merged(tmp_path, adapter, config)


def test_values_that_grow_infinite(tmp_path):
    base = {"layers.0.q.weight": torch.full((6, 4), 60000.0).half()}
    with pytest.raises(InvalidCheckpoint, match="float16 can hold"):
        merged(tmp_path, Q, {"lora_alpha": 1e6}, base)


@pytest.fixture
def base(tmp_path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 4}')
    (folder / "tokenizer.json").write_text("{}")
    save_file(BASE, folder / "model.safetensors")
    return folder


@pytest.fixture
def adapter(tmp_path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"more": 1}')
    (folder / "README.md").write_text("the adapter")
    save_file(Q, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_alone(adapter, file_url):
    manifest = deploy(adapter, file_url, "m@a").manifest
    assert set(manifest.tensor) == set(Q)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(manifest.file)


def test_an_adapter_alone_as_a_pickle(adapter, file_url, work):
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(Q, adapter / "adapter_model.bin")
    manifest = deploy(adapter, file_url, "m@a", work=work).manifest
    assert set(manifest.tensor) == set(Q)
    assert {t.file for t in manifest.tensors} == {"adapter_model.safetensors"}


def test_deploy(adapter, base, file_url, work, restore):
    options = ConvertOptions(base=str(base), dtype="float32")
    result = deploy(adapter, file_url, "m@a", work=work, convert=options)
    found = restore(result.manifest)
    expected = BASE["layers.0.q.weight"].float() + delta()
    assert same(found["layers.0.q.weight"], expected.bfloat16().float())
    assert result.manifest.config == {"hidden_size": 4}
    assert set(result.manifest.file) == {
        "README.md", "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    assert result.manifest.file["tokenizer.json"].size == len('{"more": 1}')
    assert result.manifest.upstream == "folder:adapter merged into folder:base"
    # Into what a ref names: the same weights come of it.
    deploy(base, file_url, "base@prod")
    options = ConvertOptions(base="base@prod", dtype="float32")
    again = deploy(adapter, file_url, "m@b", work=work, convert=options)
    assert again.manifest.tensors == result.manifest.tensors
    assert again.manifest.upstream == "folder:adapter merged into ref:base@prod"
    assert not list(work.iterdir())


def test_bases_that_are_none(adapter, base, file_url, work):
    with pytest.raises(UsageError, match="nowhere"):
        deploy(adapter, file_url, "m@a", convert=ConvertOptions(base="nowhere"))
    with pytest.raises(NotFound):
        deploy(adapter, file_url, "m@a", convert=ConvertOptions(base="nobody@prod"))
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(NoWeights, match=r"no adapter_config\.json"):
        deploy(adapter, file_url, "m@a", work=work, convert=ConvertOptions(base=str(base)))


def test_tied_targets_are_refused(tmp_path, base, file_url, work, adapter):
    tied = {"head.weight": "embed.weight"}
    state = {name: tensor for name, tensor in BASE.items() if name != "head.weight"}
    save_file(state, base / "model.safetensors", metadata=tied)
    save_file(pair("head", (2, 4), (10, 2)), adapter / "adapter_model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"head\.weight.*a tied one"):
        deploy(adapter, file_url, "m@a", work=work, convert=ConvertOptions(base=str(base)))
