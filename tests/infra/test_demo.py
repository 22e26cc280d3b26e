"""The demo as a user runs it: a process, its output, its exit code, and what it leaves behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from warmcast.infra.demo.result import STAGES

ROUTES = ["origin", "peer", "peer", "origin"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A Hugging Face folder of a BERT with random weights, without a tokenizer."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=100,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def demo(tmp_path):
    """Start the demo; it is ended with the test. Its temporary files are below ``tmp_path/tmp``."""
    (tmp_path / "tmp").mkdir()
    started = []

    def start(*words, command=("-m", "warmcast.infra")):
        process = subprocess.Popen(
            [sys.executable, *command, *map(str, words)],
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finished(process):
    out, err = process.communicate(timeout=280)
    return process.returncode, out, err


def check_workers(workers, nbytes):
    assert [worker["route"] for worker in workers] == ROUTES
    assert [worker["transport"] is None for worker in workers] == [True, False, False, True]
    assert all(worker["verified"] is True and worker["identical"] is True for worker in workers)
    assert {worker["bytes"] for worker in workers} == {nbytes}
    assert [worker["name"] for worker in workers] == [f"worker-{n}" for n in range(1, 5)]
    for worker in workers:
        assert set(worker["stages"]) == {*STAGES, "rest"}
        assert 0 < worker["seconds"] == pytest.approx(sum(worker["stages"].values()), abs=1e-4)


@pytest.mark.timeout(300)
def test_the_demo(demo, tmp_path):
    """The real model over S3: origin, peer, peer, and the origin again when the peers are dead."""
    warmcast = ("-c", "from warmcast.manifests.command import main; main()", "demo")
    code, out, err = finished(demo("--json", tmp_path / "demo.json", command=warmcast))
    assert code == 0, err
    record = json.loads((tmp_path / "demo.json").read_text())
    check_workers(record["workers"], 90_852_864)
    assert record["origin"] == "s3"
    assert record["outputs"]["sentence_embedding"] == [4, 384]

    rows = [line.split() for line in out.splitlines() if line.strip().startswith("worker-")]
    assert [row[:2] for row in rows] == [[f"worker-{n}", r] for n, r in enumerate(ROUTES, 1)]
    assert all(row[3] == "90,852,864" and row[-2:] == ["yes", "yes"] for row in rows)
    assert "4 of 4 workers compute, bit by bit, what all-MiniLM-L6-v2 does" in out
    # The peers were dead, not absent: the last worker asked them.
    fallback = "\n".join(record["workers"][3]["tree"])
    assert "3 senders" in fallback
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.timeout(300)
def test_any_hugging_face_folder(demo, tiny, tmp_path):
    words = ("--model", tiny, "--origin", "file", "--json", tmp_path / "demo.json")
    code, _, err = finished(demo(*words))
    assert code == 0, err
    record = json.loads((tmp_path / "demo.json").read_text())
    nbytes = sum(p.stat().st_size for p in tiny.glob("*.safetensors"))
    check_workers(record["workers"], record["workers"][0]["bytes"])
    assert 0.9 * nbytes < record["workers"][0]["bytes"] < nbytes
    assert (record["model"], record["origin"]) == ("tiny", "file")


def test_a_folder_without_weights_ends_in_one_line(demo, tiny, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_bytes((tiny / "config.json").read_bytes())
    code, out, err = finished(demo("--model", empty, "--origin", "file"))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("warmcast: folder:empty: expected .safetensors")
    assert "Traceback" not in err
    assert not list((tmp_path / "tmp").iterdir())


def test_weights_that_do_not_fit_the_model_end_in_one_line(demo, tiny, tmp_path):
    """The error of a worker, which is another process, comes out as the demo's own."""
    other = tmp_path / "other"
    other.mkdir()
    for path in tiny.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    code, out, err = finished(demo("--model", other, "--origin", "file"))
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith("warmcast: worker-1: ")
    assert "encoder.layer.2." in last


def test_time_that_runs_out_ends_in_one_line(demo, tiny):
    code, _, err = finished(demo("--model", tiny, "--origin", "file", "--deadline", 0.01))
    assert code == 1
    assert err.splitlines()[-1].startswith("warmcast: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--deadline", "0"], "--deadline"),
        (["--json", "/no/such/folder/demo.json"], "--json /no/such/folder/demo.json"),
        (["--origin", "tape"], "tape"),
    ],
)
def test_wrong_options(demo, words, message):
    code, out, err = finished(demo(*words))
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "code", "when"),
    [
        (signal.SIGKILL, -signal.SIGKILL, "worker-1 on "),
        (signal.SIGINT, 130, "model@demo: published"),
        (signal.SIGTERM, 130, "model@demo: published"),
    ],
)
def test_nothing_outlives_the_demo(demo, tiny, tmp_path, number, code, when):
    """Servers and workers end with the demo, however it ends."""
    process = demo("--model", tiny)
    assert any(line.startswith(when) for line in process.stderr)
    pids = descendants(process.pid)
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
    assert {"valkey-server", "weed"} <= names
    assert len(pids) >= 5  # two servers, their watchers, a worker or the reference
    ends = [os.pidfd_open(pid) for pid in pids]
    try:
        process.send_signal(number)
        finished(process)
        assert process.returncode == code
        for pid, end in zip(pids, ends, strict=True):
            assert select.select([end], [], [], 30)[0], f"process {pid} is still there"
    finally:
        for end in ends:
            os.close(end)
    if number != signal.SIGKILL:
        assert not list((tmp_path / "tmp").iterdir())


def descendants(pid):
    """The processes below one, as they stand now."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [*children, *(below for child in children for below in descendants(child))]
