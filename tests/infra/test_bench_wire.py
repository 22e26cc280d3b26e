"""``warmcast bench wire``: a trial of some kilobytes over gloo, and what is refused."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

from warmcast.infra.bench import wire
from warmcast.infra.bench.wire.models import deploy, shapes
from warmcast.loader import Loader
from warmcast.manifests.command import GROUP, main
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.origin import Origin

BENCH = EntryPoint("bench", "warmcast.infra.bench.cli:bench", GROUP)


def test_a_trial_on_the_cpu():
    result = wire.run_small("gloo", "cpu", 2, Deadline.after(100)).record()
    cases = result["cases"]
    assert [(case["model"], case["what"]) for case in cases] == [
        (model, what) for model in ("large", "small") for what in ("first load", "load", "transfer")
    ]
    large, small = shapes(1, scale=4096)
    for case in cases:
        shape = {"large": large, "small": small}[case["model"]]
        assert (case["transport"], case["receivers"]) == ("gloo", 2)
        assert case["bytes"] == shape.nbytes
        assert case["seconds"] > 0
    assert "transfer" in cases[1]["stages"]


def test_models(tmp_path):
    """They are what they are called, and what stands behind their files is one blob each."""
    large, small = shapes(20_600_000_000)
    assert (large.tensors, large.layers) == (108, 12)
    assert 20e9 < large.nbytes <= 20.6e9
    assert (small.tensors, small.nbytes) == (3000, 3000 * 866_816)
    tiny = shapes(2_000_000, scale=4096)[0]
    assert tiny.layers > 1
    with Origin.open((tmp_path / "origin").as_uri()) as origin:
        manifest = deploy(origin, tiny, Deadline.after(60))
    assert len({file.sha256 for file in manifest.files}) == 1
    assert len(manifest.tensors) == tiny.tensors
    with Loader((tmp_path / "origin").as_uri()) as loader:
        with loader.skeleton():
            model = tiny.build()
        assert loader.load(model, tiny.ref).verified
    first, last = model.layers[0].mlp.up_proj.weight, model.layers[-1].mlp.up_proj.weight
    assert torch.equal(first, last)
    assert first.data_ptr() != last.data_ptr()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected two GPUs or more"),
        (("--transport", "pigeon"), "--transport"),
        (("--gb", "0"), "--gb"),
        (("--receivers", "-1"), "--receivers"),
        (("--json", "/no/such/folder/x.json"), "no folder"),
    ],
)
def test_refusals(capsys, words, said):
    with pytest.raises(SystemExit) as end:
        main(["bench", "wire", *words], [BENCH])
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_a_load_by_another_route_is_no_figure():
    bench = object.__new__(wire._Bench)
    stage = {"name": "peer", "outcome": "no", "reason": "no sender", "moved": None}
    report = {"route": "origin", "transport": None, "stages": [stage]}

    class Receiver:
        def tell(self, word):
            pass

        def answer(self, deadline):
            return {"began": 0.0, "ended": 1.0, "report": report}

    bench._deadline = Deadline.never()
    with pytest.raises(wire.WrongRoute, match="no sender"):
        bench._round([Receiver()], "ipc")
