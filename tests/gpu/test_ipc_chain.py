"""A chain of receivers on one GPU, each taking from the one before it, whose middle fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu.test_faults import PATIENT, nothing_left
from tests.loader.faults.scene import Scene, Worker
from tests.loader.faults.worker import Survey

ENV = {"TEST_DEVICE": "cuda:0", "WARMCAST_TRANSPORTS": "ipc"}
FAULTS = {"kill": Worker.kill, "stop": Worker.stop}

pytestmark = pytest.mark.gpu(1)


def warmed(scene: Scene) -> tuple[Worker, Survey]:
    """A receiver that has received before, and what it holds then."""
    worker = scene.worker(env=ENV)
    scene.right(worker.load(PATIENT), "peer")
    worker.ask("close")
    return worker, worker.survey()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_middle_fails(scene: Scene, fault: str) -> None:
    """The one behind it has connected to it and takes the rest from the sender."""
    sender = scene.worker(env=ENV).serve()
    (first, first_held), (last, last_held) = warmed(scene), warmed(scene)
    middle = scene.worker(env=ENV)
    for worker, moment in ((first, "receiving"), (middle, "receiving"), (last, "following")):
        worker.halt_at(moment)
        worker.begin(PATIENT)
        worker.halted(moment)
    harm: Callable[[Worker], None] = FAULTS[fault]
    harm(middle)
    for worker, held in ((last, last_held), (first, first_held)):
        worker.go_on()
        scene.right(worker.end(), "peer")
        worker.ask("close")
        nothing_left(worker, held)
    assert sender.ask("weights") == scene.weights
