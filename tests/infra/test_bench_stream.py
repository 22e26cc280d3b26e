"""``warmcast bench stream`` on the CPU, with a checkpoint of some megabytes."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

from warmcast.infra.bench import stream
from warmcast.infra.bench.stream.checkpoint import make
from warmcast.infra.bench.wire.models import shapes
from warmcast.loader import Loader
from warmcast.manifests.command import GROUP, main
from warmcast.manifests.deadline import Deadline

BENCH = EntryPoint("bench", "warmcast.infra.bench.cli:bench", GROUP)
CPU = torch.device("cpu")


def test_each_loader_from_each_place():
    result = stream.run(CPU, 0.03, Deadline.after(100), scale=256).record()
    cases = {(case["loader"], case["where"]): case for case in result["cases"]}
    assert {("warmcast", "warm"), ("warmcast", "cold"), ("safetensors", "warm")} <= set(cases)
    for case in cases.values():
        assert case["checked"], case
        assert case["seconds"] > 0
        assert case["bytes"] == shapes(30_000_000, scale=256)[0].nbytes
    found = result["progressive"]
    assert found["checked"]
    assert found["ratio"] == pytest.approx(
        found["first_output_seconds"] / max(found["load_seconds"], found["compute_seconds"]),
        rel=0.05,
    )
    assert 0 < found["first_layer"] <= 1
    if "disk_read_GBps" in result["limits"]:
        limit = result["limits"]["disk_read_GBps"]
        case = cases["warmcast", "cold"]
        assert case["ratio_to_limit"] == pytest.approx(case["GBps"] / limit, rel=0.05, abs=0.01)


def test_wrong_bytes_are_seen(tmp_path, monkeypatch):
    """A loader that is fast and wrong is reported as wrong."""
    shape = shapes(1, scale=2048)[0]
    checkpoint = make(tmp_path, shape, Deadline.after(60))
    path = checkpoint.files[0]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    result = stream.Result("cpu", {}, {})
    folder = tmp_path / "child"
    folder.mkdir()
    case = next(
        stream._case("safetensors", "warm", checkpoint, shape, result, folder, Deadline.after(60))
    )
    assert not case.checked


def test_the_checkpoint_is_a_deployment(tmp_path):
    shape = shapes(2_000_000, scale=2048)[0]
    assert shape.layers > 1
    checkpoint = make(tmp_path, shape, Deadline.after(60))
    assert len({file.sha256 for file in checkpoint.manifest.files}) == shape.layers
    with Loader(checkpoint.origin) as loader:
        with loader.skeleton():
            model = shape.build()
        assert loader.load(model, shape.ref).verified


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gb", "-1"), "--gb"),
        (("--deadline", "0"), "--deadline"),
        (("--device", "tpu"), "--device"),
        (("--where", "warm,tape"), "--where"),
        (("--json", "/no/such/folder/x.json"), "no folder"),
        (("--device", "cpu", "--gb", "10000000"), "free"),
    ],
)
def test_refusals(capsys, words, said):
    with pytest.raises(SystemExit) as end:
        main(["bench", "stream", *words], [BENCH])
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1
