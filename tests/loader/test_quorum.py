"""Votes of a group: the same verdict on every rank, and an end when a rank is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from tests.loader.conftest import free_port
from warmcast.loader.errors import GroupLost
from warmcast.loader.quorum import Alone, GlooGroup, Verdict, group_from_env
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, UsageError

ROOT = Path(__file__).parents[2]


def start(arguments: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    """All that a process told; it is ended if it does not end."""
    try:
        return process.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its ranks along
        process.communicate()
        raise


def vote(size: int, **options: object) -> list[dict[str, object]]:
    """Ranks in processes of their own, with nothing but the environment in common."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    processes = [
        start(["-m", "tests.loader.voter", json.dumps(options)], env | {"RANK": str(rank)})
        for rank in range(size)
    ]
    texts = [output(process) for process in processes]
    return [json.loads(text) if text else {} for text in texts]


def torchrun(size: int, *flags: str, **options: object) -> list[dict[str, object]]:
    """Ranks under a real torchrun; what those of the last attempt told, by rank."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    process = start([*command, *flags, "-m", "tests.loader.voter", json.dumps(options)], {})
    told = [json.loads(line) for line in output(process).splitlines() if line.startswith("{")]
    last = max(value["attempt"] for value in told)
    return sorted((v for v in told if v["attempt"] == last), key=lambda v: v["rank"])


YES = [None, None, None]


def test_three_ranks_vote_until_one_dies():
    """The others learn of it from the connection, long before the deadline."""
    ballots = [YES, [None, "no room", None], ["a", "b", "c"], YES]
    told = vote(3, votes=ballots, die=[1, 3, 0], seconds=50)
    assert told[1] == {}
    for rank in (0, 2):
        assert told[rank]["rank"] == rank
        assert told[rank]["verdicts"] == [
            [True, []],
            [False, [[1, "no room"]]],
            [False, [[0, "a"], [1, "b"], [2, "c"]]],
        ]
        assert told[rank]["error"] == "GroupLost"
        assert "the votes of 3 ranks" in told[rank]["message"]


def check_two(told: list[dict[str, object]]) -> None:
    """Two groups one after the other, and an engine's own, in each of two processes."""
    assert [value.get("error") for value in told] == [None, None]
    assert [value["verdicts"] for value in told] == [[[True, []]] * 2] * 2
    assert [value["first"] for value in told] == ["rank 0"] * 2


def test_torchrun_after_a_restart():
    """The second attempt does not meet the dead of the first, whose store it shares."""
    flags = ("--standalone", "--max-restarts", "1")
    told = torchrun(2, *flags, votes=[YES], die=[1, 0, 0], groups=2, late=1)
    assert [value["attempt"] for value in told] == [1, 1]
    check_two(told)


def test_behind_an_engines_process_group_under_torchrun():
    told = torchrun(2, "--standalone", votes=[YES], engine="before", groups=2, late=1)
    check_two(told)
    assert [value["engine"] for value in told] == [2, 2]


def test_before_an_engines_process_group_without_torchrun():
    """Both listen at MASTER_PORT, in one process."""
    told = vote(2, votes=[YES], engine="after", groups=2, late=1)
    check_two(told)
    assert [value["engine"] for value in told] == [2, 2]


def test_ranks_that_never_come():
    """Rank 0 waits for the other's address, rank 1 for the store."""
    options = json.dumps({"votes": [YES], "seconds": 0.5})
    processes = [
        start(
            ["-m", "tests.loader.voter", options],
            {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "WORLD_SIZE": "2",
                "RANK": rank,
            },
        )
        for rank in ("0", "1")
    ]
    for process in processes:
        assert json.loads(output(process))["error"] == "GroupLost"


def test_threads_as_ranks(ranks):
    def work(rank, group):
        verdict = group.vote(rank != 1, "the reason\nof rank one", Deadline.after(20))
        return verdict, group.first(f"{rank}" * 300, Deadline.after(20))

    for verdict, first in ranks(3, work):
        assert not verdict
        assert verdict.reasons == ((1, "the reason\nof rank one"),)
        assert str(verdict) == "rank 1: the reason\nof rank one"
        assert first == "0" * 255


def test_long_and_empty_reasons(ranks):
    reasons = ["", "ü" * 400, "\0"]
    found = ranks(3, lambda rank, group: group.vote(False, reasons[rank], Deadline.after(20)))
    assert found[0] == found[1] == found[2]
    texts = [reason for _, reason in found[0].reasons]
    assert texts[0] == ""
    assert texts[1].startswith("ü" * 120)


def test_a_vote_after_its_deadline(ranks):
    def work(rank, group):
        return group.vote(True, "", Deadline.after(0))

    assert all(isinstance(found, DeadlineExceeded) for found in ranks(2, work))


def test_a_vote_that_one_rank_does_not_cast(ranks):
    def work(rank, group):
        return group.vote(True, "", Deadline.after(0.3)) if rank == 0 else None

    assert isinstance(ranks(2, work)[0], GroupLost)


def test_a_rank_that_goes_while_the_others_connect():
    """It has told its address, and then nobody is there; gloo alone would wait five times over."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(lambda rank: GlooGroup(store, rank, 2, Deadline.after(20)), range(2)))
    for group in met:
        group.close()
    for rank in (0, 1):
        deadline = Deadline.after(1)
        with pytest.raises(GroupLost, match="2 ranks to meet"):
            GlooGroup(store, rank, 2, deadline)
        assert Deadline.after(0).at < deadline.at + 1


def test_a_vote_may_take_longer_than_the_meeting():
    """The group was made under one load's deadline, and serves the next load too."""
    store = HashStore()

    def one(rank):
        group = GlooGroup(store, rank, 2, Deadline.after(0.5))
        if rank == 1:
            threading.Event().wait(1)
        return group.vote(True, "", Deadline.after(20))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(one, range(2)))


def test_alone():
    group = Alone()
    assert group.vote(True, "x", Deadline.after(1)) == Verdict(True)
    assert group.vote(False, "x", Deadline.after(1)) == Verdict(False, ((0, "x"),))
    assert group.first("mine", Deadline.after(1)) == "mine"
    group.close()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT"),
    ],
)
def test_environments_that_contradict_themselves(monkeypatch, env, words):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=words):
        group_from_env(Deadline.after(1))
