"""``warmcast bench verify`` on the CPU, with tiny models: its figures, and when it refuses them."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import pytest
import torch

from warmcast.infra.bench import verify as benchmark
from warmcast.loader import verify as checks
from warmcast.manifests.command import GROUP, main

BENCH = EntryPoint("bench", "warmcast.infra.bench.cli:bench", GROUP)
TINY = ("--device", "cpu", "--gb", "0.001")


@pytest.fixture
def bench(capsys):
    """Runs the command; its exit code, and what it said on either stream."""

    def call(*words):
        with pytest.raises(SystemExit) as end:
            main(["bench", "verify", *map(str, words)], [BENCH])
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    return call


def test_every_figure_stands_beside_the_limit(bench, tmp_path):
    code, out, err = bench(*TINY, "--json", tmp_path / "x.json")
    assert (code, err) == (0, "")
    result = json.loads((tmp_path / "x.json").read_text())
    assert set(result) == {"machine", "limits", "compile_seconds", "cases"}
    assert result["machine"]["device"] == "cpu"
    assert {"cpu", "cpu_cores", "torch"} <= set(result["machine"])
    limit = result["limits"]["memory_read_GBps"]
    assert limit > 0
    assert result["compile_seconds"] is None
    cases = result["cases"]
    assert [(case["check"], case["tensors"]) for case in cases] == [
        ("crc32c", 100),
        ("crc32c", 3000),
        ("sampled hash", 1000),
        ("verify", 100),
        ("verify", 3000),
    ]
    assert [case["bytes"] for case in cases] == [998_400, 162_000, 54_000, 998_400, 162_000]
    for case in cases:
        speed = case["bytes"] / case["seconds"] / 1e9
        assert case["GBps"] == pytest.approx(speed, rel=0.01)
        assert case["ratio_to_limit"] == pytest.approx(case["GBps"] / limit, rel=0.01)
    lines = out.splitlines()
    assert lines[0].startswith("cpu: memory is read at ")
    assert sum(" verify " in line for line in lines) == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--device", "cuda:99"], "--device: expected one of cpu"),
        (["--device", "tpu"], "--device: expected one of cpu"),
        (["--gb", "1e9"], "--gb: expected 0.001 to"),
        (["--gb", "0"], "--gb: expected 0.001 to"),
        (["--gb", "nan"], "--gb: expected 0.001 to"),
        (["--deadline", "0"], "--deadline: expected more than 0 seconds"),
        (["--json", "nowhere/x.json"], "expected a file in a folder, found no folder"),
        (["--json", "."], "expected a file, found a folder"),
        (["--nope"], "No such option: --nope"),
    ],
)
def test_wrong_input_is_one_line(bench, tmp_path, monkeypatch, words, line):
    monkeypatch.chdir(tmp_path)
    code, out, err = bench("--device", "cpu", *words)
    assert (code, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_no_time_left(bench, tmp_path):
    code, out, err = bench(*TINY, "--deadline", "1e-9", "--json", tmp_path / "x.json")
    assert (code, out) == (1, "")
    assert "no time left while" in err
    assert list(tmp_path.iterdir()) == []


def wrong_crc(monkeypatch):
    right = checks.crc32c_at
    monkeypatch.setattr(checks, "crc32c_at", lambda *piece: right(*piece) ^ 1)


def wrong_samples(monkeypatch):
    monkeypatch.setattr(checks, "normalised", lambda dtypes, samples: [s[::-1] for s in samples])


def wrong_verdict(monkeypatch):
    monkeypatch.setattr(benchmark, "verify", lambda pairs, deadline: None)


@pytest.mark.parametrize(
    ("break_it", "line"),
    [
        (wrong_crc, "CRC32C of tensor 99 of 100: expected"),
        (wrong_samples, "sampled hash of tensor 999 of 1000: expected"),
        (wrong_verdict, "one flipped bit of model.layers.50.mlp.weight: expected found"),
    ],
)
def test_a_wrong_result_has_no_figures(bench, tmp_path, monkeypatch, break_it, line):
    break_it(monkeypatch)
    code, out, err = bench(*TINY, "--json", tmp_path / "x.json")
    assert (code, out) == (1, "")
    assert line in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_a_model_differ():
    memory = torch.empty(1_000_000, dtype=torch.uint8)
    benchmark._fill(memory)
    tensors = benchmark._cut(memory, 100)
    assert len({tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors}) == 100
    assert all(torch.isfinite(tensor).all() for tensor in tensors)
