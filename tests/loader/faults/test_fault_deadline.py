"""Deadlines that are over before, or in the middle of, whatever the load does."""

from __future__ import annotations

import pytest

from tests.loader.faults.scene import Scene

TINY = [0.0, 1e-6, 0.003, 0.01, 0.05]


@pytest.mark.parametrize("where", ["origin", "peer"])
def test_tiny(scene: Scene, where: str):
    sender = scene.worker().serve() if where == "peer" else None
    receiver = scene.worker()
    before = receiver.survey()
    for deadline in TINY:
        _ended(scene, receiver.load(deadline))
    scene.right(receiver.load(20), where)
    receiver.name = receiver.ask("serve")
    scene.registry_clean([sender, receiver] if sender else [receiver])
    scene.nothing_left(receiver, before)


def test_tiny_while_the_registry_hangs(scene: Scene):
    receiver = scene.worker()
    before = receiver.survey()
    scene.registry.pause()
    for deadline in (0.01, 0.1, 0.5):
        _ended(scene, receiver.load(deadline))
    scene.registry.resume()
    scene.nothing_left(receiver, before)


def test_tiny_while_the_sender_is_stopped(scene: Scene):
    sender, receiver = scene.worker().serve(), scene.worker()
    before = receiver.survey()
    sender.stop()
    for deadline in (0.01, 0.1, 0.5):
        _ended(scene, receiver.load(deadline))
    scene.nothing_left(receiver, before)


def test_over_while_the_origin_is_read(scene: Scene):
    receiver = scene.worker()
    before = receiver.survey()
    receiver.halt_at("reading")
    receiver.begin(0.5)
    receiver.halted("reading")
    receiver.past_deadline()
    receiver.go_on()
    scene.wrong(receiver.end(), "DeadlineExceeded")
    scene.registry_clean()
    scene.nothing_left(receiver, before)


def _ended(scene: Scene, outcome) -> None:
    if outcome.error:
        scene.wrong(outcome, "DeadlineExceeded")
    else:
        scene.right(outcome, outcome.route)
