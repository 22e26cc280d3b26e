"""Tensor-parallel shards: merged as the rules say, and in no other way."""

from __future__ import annotations

import argparse
import json
import os

import pytest
import torch

from tests.flows.checkpoints import opened
from warmcast.flows.convert.merge_rules import merge_rules, read_merge_rules
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.errors import InvalidCheckpoint, MissingShard, SourceError, UnsafePickle
from warmcast.flows.run import deploy
from warmcast.manifests.errors import UsageError

RULES = {
    "*.query_key_value.weight": {"concat": 0},
    "*.gate_up.weight": {"concat": 0, "parts": 2},
    "*.dense.weight": {"concat": 1},
    "*.conv.weight": {"concat": 2},
    "*norm*": "same",
    "*embedding*": {"concat": 0},
    "*output_layer*": {"concat": 0},
}


def whole(layers: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    state = {"embedding.word_embeddings.weight": rand(8, 4)}
    for layer in range(layers):
        state |= {
            f"encoder.layers.{layer}.query_key_value.weight": rand(12, 4),
            f"encoder.layers.{layer}.gate_up.weight": rand(16, 4),
            f"encoder.layers.{layer}.dense.weight": rand(4, 8),
            f"encoder.layers.{layer}.conv.weight": rand(2, 3, 6),
            f"encoder.layers.{layer}.norm.weight": rand(4),
        }
    return state


def part(name: str, tensor: torch.Tensor, rank: int, size: int = 2) -> torch.Tensor:
    if "norm" in name:
        return tensor
    if "gate_up" in name:
        return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])
    dim = 1 if "dense" in name else 2 if "conv" in name else 0
    return tensor.chunk(size, dim)[rank].clone()


def save(state: dict, path, rank: int) -> None:
    """As Megatron does: nested, beside an optimizer, a namespace of options and random states."""
    nested: dict = {}
    for name, tensor in state.items():
        top, _, rest = name.partition(".")
        nested.setdefault(top, {})[rest] = part(name, tensor, rank)
    nested["encoder"] = nested.get("encoder", {}) | {"final._extra_state": torch.ones(3)}
    path.parent.mkdir(parents=True, exist_ok=True)
    args = argparse.Namespace(tensor_model_parallel_size=2, dtype=torch.bfloat16)
    optimizer = {"exp_avg": torch.ones(2)}
    torch.save({"args": args, "model": nested, "optimizer": optimizer, "iteration": 3}, path)


def paths(size: int = 2) -> list[str]:
    return [f"mp_rank_{rank:02d}/model_optim_rng.pt" for rank in range(size)]


def test_deploy(source, file_url, work, restore, same_bits, tmp_path):
    state = whole()
    for rank, path in enumerate(paths()):
        save(state, source / path, rank)
    rules = {p: rule for p, rule in RULES.items() if "output" not in p}
    (tmp_path / "rules.yaml").write_text(json.dumps({"shards": paths(), "rules": rules}))
    options = ConvertOptions(merge=read_merge_rules(tmp_path / "rules.yaml"))
    result = deploy(source, file_url, "m@a", work=work, convert=options)
    same_bits(restore(result.manifest), state)
    told = "\n".join(result.left_out)
    for name in ("'optimizer'", "'args'", "_extra_state"):
        assert name in told
    assert {f.path for f in result.manifest.files} == {
        "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip


def merged(tmp_path, ranks: list[dict], rules: dict | None = None, **more):
    """Ranks' flat state dicts, merged."""
    files = []
    for number, state in enumerate(ranks):
        files.append(tmp_path / f"{number}.pt")
        torch.save(state, files[-1])
    stages = more.pop("stages", None) or [{"shards": [file.name for file in files]}]
    record = {"stages": stages, "rules": rules or {"*": {"concat": 0}}} | more
    return opened("megatron", files, ConvertOptions(merge=merge_rules(record, "rules")))


def test_pipeline_stages(tmp_path):
    states = [
        {"encoder.layers.0.w": torch.ones(2) * 1, "embedding": torch.ones(2)},
        {"encoder.layers.0.w": torch.ones(2) * 2, "encoder.layers.1.w": torch.ones(2) * 3},
    ]
    stages = [{"shards": ["0.pt"]}, {"shards": ["1.pt"], "layer_offset": 1}]
    found, _ = merged(tmp_path, states, stages=stages, layers=["encoder.layers."])
    layers = {name: int(tensor[0]) for name, tensor in found.items() if "layers" in name}
    assert layers == {f"encoder.layers.{n}.w": n + 1 for n in range(3)}
    with pytest.raises(InvalidCheckpoint, match=r"layers\.0\.w': .*it in two"):
        merged(tmp_path, states, stages=[{"shards": ["0.pt"]}, {"shards": ["1.pt"]}])


def test_ties_are_those_that_every_rank_has(tmp_path):
    ranks = []
    for _ in range(2):
        weight = torch.randn(3, 2)
        ranks.append({"embed": weight, "head": weight, "loose": weight.clone()})
    found, checkpoint = merged(tmp_path, ranks)
    assert set(found) == {"embed", "loose"}
    assert [(tie.name, tie.of, tie.shape) for tie in checkpoint.tied] == [("head", "embed", (6, 2))]
    ranks[1]["head"] = ranks[1]["head"].clone()
    found, checkpoint = merged(tmp_path, ranks)
    assert (set(found), checkpoint.tied) == ({"embed", "head", "loose"}, ())


def test_shards_that_are_not_row_major(tmp_path):
    ranks = [{"w": torch.randn(6, 4).t(), "v": torch.randn(6, 4)[:, :2]} for _ in range(3)]
    found, _ = merged(tmp_path, ranks, {"w": {"concat": 1}, "v": {"concat": 0}})
    assert torch.equal(found["w"], torch.cat([rank["w"] for rank in ranks], 1))
    assert torch.equal(found["v"], torch.cat([rank["v"] for rank in ranks]))


def test_a_block_of_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("warmcast.flows.convert.megatron.PIECE", 40)
    ranks = [{"w": torch.randn(7, 6), "v": torch.randn(6, 7).t()} for _ in range(2)]
    found, _ = merged(tmp_path, ranks, {"*": {"concat": 1, "parts": 2}})
    for name in ("w", "v"):
        halves = [rank[name].chunk(2, 1) for rank in ranks]
        parts = [half[part] for part in range(2) for half in halves]
        assert torch.equal(found[name], torch.cat(parts, 1))


ONE = {"w": torch.ones(4, 2)}


@pytest.mark.parametrize(
    ("ranks", "rules", "words"),
    [
        ([ONE, {"w": torch.zeros(4, 2)}], {"*": "same"}, "the same as in 0.pt"),
        ([ONE, {"w": torch.ones(4, 3)}], {"*": "same"}, "the same as in 0.pt"),
        ([ONE, ONE], {"x": "same"}, "a merge rule for it"),
        ([ONE, ONE], {"w": "same", "x.*": "same"}, "rule 'x.*': .*no match"),
        ([ONE, {}], {"*": "same"}, "1.pt: expected tensors"),
        ([ONE, {"v": torch.ones(1)}], {"*": "same"}, "'w': .*no such tensor"),
        ([ONE, ONE | {"v": torch.ones(1)}], {"*": "same"}, "'v': .*no such tensor"),
        ([ONE, ONE], {"*": {"concat": 2}}, "along 2"),
        ([ONE, ONE], {"*": {"concat": 0, "parts": 3}}, "in 3 parts along 0"),
        ([ONE, {"w": torch.ones(4, 2).half()}], {"*": {"concat": 0}}, "found F16"),
        ([{"w": torch.ones(1).expand(4)}] * 2, {"*": {"concat": 0}}, "overlaps itself"),
        ([[1]], {"*": "same"}, "a dict of tensors"),
        ([{"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}}], {"*": "same"}, "it twice"),
    ],
)
def test_what_does_not_fit_the_rules(tmp_path, ranks, rules, words):
    with pytest.raises((SourceError, UsageError), match=words):
        merged(tmp_path, ranks, rules)


class Call:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def test_nothing_runs(tmp_path):
    state = {"model": ONE, "args": Call(os.system, f"touch {tmp_path}/marker")}
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        merged(tmp_path, [state])
    assert not (tmp_path / "marker").exists()


def test_a_shard_that_is_not_there(source, file_url, work):
    options = ConvertOptions(merge=merge_rules({"shards": paths(), "rules": RULES}, "rules"))
    save(whole(), source / paths()[0], 0)
    with pytest.raises(MissingShard, match=r"rules to merge shards: .*mp_rank_01"):
        deploy(source, file_url, "m@a", work=work, convert=options)


SHARDS = {"shards": ["a.pt"], "rules": {"*": "same"}}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ([], "rules, and shards or stages"),
        ({"rules": {}}, "shards or stages"),
        (SHARDS | {"stages": []}, "shards or stages"),
        (SHARDS | {"rules": {}}, "rules by pattern"),
        (SHARDS | {"rulez": {}}, "'rulez'"),
        (SHARDS | {"shards": []}, "a list of files"),
        (SHARDS | {"shards": ["../a"]}, r"'\.\.'"),
        (SHARDS | {"shards": ["a", "a"]}, "each file once"),
        (SHARDS | {"rules": {"*": "sum"}}, "found 'sum'"),
        (SHARDS | {"rules": {"*": {"concat": -1}}}, '"concat": dimension'),
        (SHARDS | {"rules": {"*": {"concat": True}}}, '"concat": dimension'),
        (SHARDS | {"rules": {"*": {"concat": 0, "part": 2}}}, '"concat": dimension'),
        (SHARDS | {"rules": {"*": {"concat": 0, "parts": 0}}}, '"concat": dimension'),
        (SHARDS | {"layers": "encoder."}, "a list of prefixes"),
        (
            {"stages": [{"shards": ["a"], "layer_offset": 2}], "rules": {"*": "same"}},
            "prefixes that layer_offset concerns",
        ),
        ({"stages": [{"shards": ["a"], "layer_offset": -1}], "rules": {"*": "same"}}, "a count"),
    ],
)
def test_rules_that_are_none(record, words):
    with pytest.raises(UsageError, match=words):
        merge_rules(record, "rules")


@pytest.mark.parametrize(("name", "text"), [("x.json", "{"), ("x.yaml", "a: [")])
def test_files_of_rules_that_are_none(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=name):
        read_merge_rules(tmp_path / name)
    with pytest.raises(UsageError, match="a file of rules"):
        read_merge_rules(tmp_path / "nowhere")
