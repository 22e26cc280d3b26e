"""What can be asked of a conversion: dtypes, files by layers, ties of embeddings."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file, save_model

from tests.flows.checkpoints import bits, every_dtype, opened
from warmcast.flows.convert.cast import cast
from warmcast.flows.convert.embeddings import tie_embeddings
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.errors import InvalidCheckpoint
from warmcast.flows.run import deploy
from warmcast.manifests.errors import UsageError


def model(layers: int = 5, rows: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    state = {"model.embed_tokens.weight": rand(rows, 4)}
    for layer in range(layers):
        state |= {
            f"model.layers.{layer}.mlp.weight": rand(4, 4),
            f"model.layers.{layer}.norm.weight": rand(4),
        }
    return state | {"model.norm.weight": rand(4), "lm_head.weight": rand(rows, 4)}


def casted(state, tmp_path, dtype: str, keep=()):
    save_file(state, tmp_path / "x.safetensors")
    return opened(
        "safetensors", [tmp_path / "x.safetensors"], change=lambda found: cast(found, dtype, keep)
    )[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype(tmp_path, dtype):
    state = {
        name: tensor.nan_to_num(posinf=1, neginf=-1, nan=0).clamp(-1e4, 1e4)
        if tensor.dtype in (torch.float64, torch.float32, torch.bfloat16)
        else tensor
        for name, tensor in every_dtype().items()
        if tensor.dtype != torch.float4_e2m1fn_x2
    }
    found = casted(state, tmp_path, dtype)
    wide = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for name, tensor in state.items():
        expected = tensor.to(getattr(torch, dtype)) if tensor.dtype in wide else tensor
        assert bits(found[name]) == bits(expected), name


def test_infinities_stay_and_none_comes(tmp_path):
    state = {"w": torch.tensor([1.0, float("inf"), -float("inf"), float("nan")])}
    assert bits(casted(state, tmp_path, "float16")["w"]) == bits(state["w"].half())
    with pytest.raises(InvalidCheckpoint, match=r"'w': .*float16 can hold, found -70000"):
        casted({"w": torch.tensor([1.0, -70000.0])}, tmp_path, "float16")


def test_names_that_keep_their_dtype(tmp_path):
    found = casted(model(), tmp_path, "bfloat16", ("*norm*", "lm_head.*"))
    kept = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    assert kept == {name for name in model() if "norm" in name or "lm_head" in name}
    with pytest.raises(UsageError, match=r"'\*nrom\*': .*no match"):
        casted(model(), tmp_path, "bfloat16", ("*nrom*",))


def test_a_tied_name_keeps_the_dtype_of_both(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    save_model(Model(), str(tmp_path / "x.safetensors"))
    paths = [tmp_path / "x.safetensors"]
    found, _ = opened("safetensors", paths, change=lambda c: cast(c, "float16", ("head.*",)))
    assert [tensor.dtype for tensor in found.values()] == [torch.float32]


def test_safetensors_are_written_anew_on_request(source, file_url, work, restore):
    state = model()
    names = list(state)
    for number, part in enumerate((names[:6], names[6:]), 1):
        save_file(
            {name: state[name] for name in part},
            source / f"model-0000{number}-of-00002.safetensors",
            metadata={"lm_head.weight": "model.embed_tokens.weight"} if number == 3 else None,
        )
    weight_map = {n: f"model-0000{1 + (i > 5)}-of-00002.safetensors" for i, n in enumerate(names)}
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    options = ConvertOptions(dtype="bfloat16", keep_dtype=("*norm*",), shard_by="layer")
    result = deploy(source, file_url, "m@a", work=work, convert=options)
    found = restore(result.manifest)
    for name, tensor in state.items():
        dtype = torch.float32 if "norm" in name else torch.bfloat16
        assert bits(found[name]) == bits(tensor.to(dtype))
    layers = {t.file for t in result.manifest.tensors if ".layers." in t.name}
    assert len(layers) == 5
    again = deploy(source, file_url, "m@a", work=work, convert=options)
    assert (again.changed, again.moved) == (False, ())
    assert not list(work.iterdir())


def test_heads_are_tied_where_config_and_bytes_say_so(source, file_url, work, restore, same_bits):
    (source / "config.json").write_text('{"tie_word_embeddings": true}')
    embed = torch.randn(6, 4)
    shards = [{"model.embed_tokens.weight": embed}, {"lm_head.weight": embed.clone()}]
    for number, state in enumerate(shards, 1):
        torch.save(state, source / f"pytorch_model-0000{number}-of-00002.bin")
    manifest = deploy(source, file_url, "m@a", work=work).manifest
    assert set(manifest.tensor) == {"model.embed_tokens.weight"}
    same_bits(restore(manifest), shards[0] | shards[1])
    (source / "config.json").write_text('{"tie_word_embeddings": false}')
    manifest = deploy(source, file_url, "m@a", work=work).manifest
    assert set(manifest.tensor) == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    "head", [torch.ones(6, 4) * 2, torch.ones(6, 4).half(), torch.ones(4, 6), torch.ones(7, 4)]
)
def test_heads_that_differ_are_not_tied(tmp_path, head):
    save_file({"embed.weight": torch.ones(6, 4), "lm_head.weight": head}, tmp_path / "x.st")
    _, found = opened("safetensors", [tmp_path / "x.st"], change=tie_embeddings)
    assert not found.tied


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"shard_by": "tensor"},
        {"max_shard_nbytes": 0},
        {"keep_dtype": ("*",)},
    ],
)
def test_wrong_options(options):
    with pytest.raises(UsageError):
        ConvertOptions(**options)


def test_a_pattern_that_matches_nothing_is_told_by_the_child(source, file_url, work):
    save_file(model(), source / "model.safetensors")
    options = ConvertOptions(dtype="bfloat16", keep_dtype=("*nrom*",))
    with pytest.raises(UsageError, match="nrom"):
        deploy(source, file_url, "m@a", work=work, convert=options)
    assert not list(work.iterdir())


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "\x7f", "\ud800"])
def test_names_that_are_none(tmp_path, name):
    torch.save({name: torch.ones(1)}, tmp_path / "x.bin")
    with pytest.raises(InvalidCheckpoint, match="a name of printable text"):
        opened("pickle", [tmp_path / "x.bin"])
