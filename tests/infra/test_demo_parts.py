"""The parts of the demo: what a result says, how outputs are hashed, and the pipe to a process."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from warmcast.infra.demo.channel import Child, Ended
from warmcast.infra.demo.encode import digest
from warmcast.infra.demo.places import Places
from warmcast.infra.demo.result import NotAsExpected, Result, Worker
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded

REPORT = {
    "route": "peer",
    "transport": "gloo",
    "source": "a",
    "bytes": 90_852_864_000,
    "seconds": 1.0,
    "verified": True,
    "stages": [
        {"name": "ref", "seconds": 0.125},
        {"name": "peer", "seconds": 0.125},
        {"name": "transfer", "seconds": 0.25},
        {"name": "verify", "seconds": 0.25},
        {"name": "ready", "seconds": 0.125},
    ],
}
GOOD = Worker("worker-1", "cpu", "peer", REPORT, "the tree\nas walked", identical=True)


def result(*workers):
    return Result("tiny", "s3", "ab" * 32, {"logits": [2, 16, 100]}, workers)


def test_a_good_result_passes():
    result(GOOD, GOOD).check()


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (replace(GOOD, identical=False), "outputs as those of tiny"),
        (replace(GOOD, expected="origin"), "worker-1: expected route origin, found peer"),
        (replace(GOOD, report={**REPORT, "verified": False}), "every byte checked"),
    ],
)
def test_a_result_that_is_not_as_expected(worker, message):
    with pytest.raises(NotAsExpected, match=message):
        result(GOOD, worker).check()


def test_seconds_by_stage_add_up():
    stages = GOOD.record()["stages"]
    assert stages == {"find": 0.25, "move": 0.25, "verify": 0.25, "rest": 0.25}


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_the_table_is_whole_however_narrow_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    result(GOOD, replace(GOOD, name="worker-2", identical=False)).print()
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if "worker-" in line]
    numbers = ["90,852,864,000", "0.250", "0.250", "0.250", "0.250", "1.000"]
    assert rows == [
        ["worker-1", "peer", "gloo", *numbers, "yes", "yes"],
        ["worker-2", "peer", "gloo", *numbers, "yes", "NO"],
    ]
    assert any(line.startswith("1 of 2 workers") for line in lines)


def test_a_digest_covers_names_types_shapes_and_every_byte():
    tensor = torch.arange(6, dtype=torch.float32)
    flipped = tensor.clone()
    flipped.view(torch.uint8)[23] ^= 1
    others = [
        {"b": tensor},
        {"a": tensor.view(torch.int32)},
        {"a": tensor.reshape(2, 3)},
        {"a": flipped},
        {"a": tensor, "b": tensor},
    ]
    digests = {digest(outputs) for outputs in [{"a": tensor}, *others]}
    assert len(digests) == 6
    assert digest({"a": tensor.reshape(2, 3).t().contiguous().t()}) == digest(others[2])
    assert digest({"a": torch.ones(2, dtype=torch.bfloat16)})


def test_places_are_taken_in_turn():
    places = Places(("cuda:0", "cuda:1"), shared=False, why="")
    assert [places.of(n) for n in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


@pytest.fixture
def child(tmp_path):
    """Start a process of the demo that runs a script; it ends with the test."""
    children = []

    def start(script):
        (tmp_path / "act.py").write_text(
            "import os, sys\nfrom warmcast.infra.demo.channel import serve\n"
            f"from warmcast.manifests.errors import WarmcastError\n{script}\nserve(act)\n"
        )
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path}
        children.append(Child("child", "act", [], env, tmp_path))
        return children[-1]

    yield start
    for child in children:
        with child:
            pass


def test_a_process_is_told_and_answers(child, deadline):
    script = """
def act(channel):
    print("noise of a library")
    os.system("echo noise of a library's process")
    channel.tell({"n": 1})
    channel.wait_for("go")
    channel.tell({"n": 2})
    channel.wait_for("end")
"""
    process = child(script)
    assert process.answer(deadline) == {"n": 1}
    process.tell("go")
    assert process.answer(deadline) == {"n": 2}
    assert not process.ended
    process.end()
    assert process.ended
    with pytest.raises(Ended):
        process.tell("go")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise WarmcastError('weights', found='none')", "^child: weights: found none$"),
        ("raise ValueError('of\\nits own')", "^child: ValueError: of its own$"),
        ("print('Illegal instruction'); os._exit(4)", "Illegal instruction|exit code 4"),
        ("os._exit(4)", "^child: expected an answer, found exit code 4 and no word$"),
    ],
)
def test_a_process_that_fails_says_why(child, deadline, body, message):
    with pytest.raises(Ended, match=message):
        child(f"def act(channel):\n    {body}").answer(deadline)


def test_a_process_that_says_nothing_costs_the_deadline(child):
    process = child("def act(channel):\n    channel.wait_for('end')")
    with pytest.raises(DeadlineExceeded, match="waiting for child"):
        process.answer(Deadline.after(0.05))
    assert not process.ended
