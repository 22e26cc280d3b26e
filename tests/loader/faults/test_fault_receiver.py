"""Receivers that are killed or stopped: the sender's own work, and the next receiver, go on."""

from __future__ import annotations

import pytest

from tests.loader.faults.scene import Scene

GIVEN = 2.5
"""Seconds that a load may take here, of which peers may take half."""

STEPS = ("agreed", "receiving")


@pytest.mark.parametrize("step", STEPS)
def test_killed(scene: Scene, step: str):
    sender, receiver = scene.worker().serve(max_receivers=1), scene.worker()
    before = sender.survey()
    receiver.halt_at(step)
    receiver.begin(GIVEN)
    receiver.halted(step)
    assert sender.ask("weights") == scene.weights
    receiver.kill()
    # There is room for one: it has to be free again.
    scene.right(scene.worker().load(20), "peer")
    assert sender.ask("served") == 1
    assert sender.survey().threads == before.threads
    scene.registry_clean([sender])


@pytest.mark.parametrize("step", STEPS)
def test_stopped(scene: Scene, step: str):
    sender, receiver = scene.worker().serve(), scene.worker()
    before = sender.survey()
    receiver.halt_at(step)
    receiver.begin(GIVEN)
    receiver.halted(step)
    receiver.stop()
    assert sender.ask("weights") == scene.weights
    scene.right(scene.worker().load(20), "peer")
    # The transfer that got stuck ends by the time that the stopped receiver asked for.
    assert sender.ask("served", within=GIVEN + 1) == 1
    assert sender.survey().threads == before.threads
    assert sender.survey().tasks == before.tasks
    scene.registry_clean([sender])


@pytest.mark.parametrize("step", STEPS)
def test_both_killed(scene: Scene, step: str):
    sender, receiver = scene.worker().serve(), scene.worker()
    receiver.halt_at(step)
    receiver.begin(GIVEN)
    receiver.halted(step)
    sender.kill()
    receiver.kill()
    scene.right(scene.worker().load(GIVEN), "origin")
    scene.registry_clean()


def test_more_than_there_is_room_for(scene: Scene):
    """A receiver that halts in the only place: the next one waits, and is served after it."""
    sender, first, second = scene.worker().serve(max_receivers=1), scene.worker(), scene.worker()
    first.halt_at("receiving")
    first.begin(20)
    first.halted("receiving")
    second.halt_at("waiting")
    second.begin(20)
    second.halted("waiting")
    first.go_on()
    scene.right(first.end(), "peer")
    second.go_on()
    scene.right(second.end(), "peer")
    assert sender.ask("served") == 2
