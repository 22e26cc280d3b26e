"""A rank that is killed or stopped ends the load of its whole group, in time."""

from __future__ import annotations

import socket

import pytest

from tests.loader.faults.scene import Scene, Worker

GIVEN = 2.0


@pytest.fixture
def ranks(scene: Scene) -> list[Worker]:
    """Two workers that load as one group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    workers = [scene.worker(env=env | {"RANK": str(rank)}) for rank in (0, 1)]
    workers[0].ask("serve_store")
    return workers


def test_no_fault(scene: Scene, ranks: list[Worker]):
    for rank in ranks:
        rank.begin(20)
    for rank in ranks:
        scene.right(rank.end(), "origin")


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("lost", [0, 1])
def test_lost_rank(scene: Scene, ranks: list[Worker], lost: int, fault: str):
    before = [rank.survey() for rank in ranks]
    survivor = 1 - lost
    ranks[lost].halt_at("reading")
    for rank in ranks:
        rank.begin(GIVEN)
    ranks[lost].halted("reading")
    getattr(ranks[lost], fault)()
    scene.wrong(ranks[survivor].end(), "GroupLost", "DeadlineExceeded")
    scene.nothing_left(ranks[survivor], before[survivor])


def test_rank_that_never_comes(scene: Scene, ranks: list[Worker]):
    before = ranks[0].survey()
    scene.wrong(ranks[0].load(1.0), "GroupLost", "DeadlineExceeded")
    scene.nothing_left(ranks[0], before)
