"""Senders that are killed or stopped, at every step of a transfer."""

from __future__ import annotations

import signal

import pytest

from tests.loader.faults.scene import Scene

GIVEN = 2.5
"""Seconds that a load may take here, of which peers may take half."""

STEPS = ("asked", "answered", "confirmed", "addressed", "sending")


def test_peer(scene: Scene):
    """No fault: what all others are compared with."""
    sender = scene.worker().serve()
    receiver = scene.worker()
    before = receiver.survey()
    scene.right(receiver.load(GIVEN), "peer")
    assert sender.ask("served") == 1
    scene.registry_clean([sender])
    scene.nothing_left(receiver, before)


def test_killed_before_it_is_asked(scene: Scene):
    sender, receiver = scene.worker().serve(), scene.worker()
    before = receiver.survey()
    sender.kill()
    outcome = receiver.load(GIVEN)
    scene.right(outcome, "origin")
    assert "expected an answer, found none in time" in outcome.tree
    scene.registry_clean()
    scene.nothing_left(receiver, before)


@pytest.mark.parametrize("step", STEPS)
def test_killed(scene: Scene, step: str):
    sender, receiver = scene.worker().serve(), scene.worker()
    before = receiver.survey()
    sender.halt_at(step)
    receiver.begin(GIVEN)
    sender.halted(step)
    sender.kill()
    scene.right(receiver.end(), "origin")
    receiver.name = receiver.ask("serve")  # the survivor goes on: it is a sender now
    scene.registry_clean([receiver])
    scene.nothing_left(receiver, before)


def test_others_are_served_beside_a_dead_sender(scene: Scene):
    """Its presence outlives it by seconds; whoever asks it first still comes to the living."""
    dead, living = scene.worker().serve(), scene.worker().serve()
    dead.kill()
    outcome = scene.worker().load(GIVEN)
    scene.right(outcome, "peer")
    assert outcome.source == living.name


@pytest.mark.parametrize("step", STEPS)
def test_stopped(scene: Scene, step: str):
    sender, receiver = scene.worker().serve(), scene.worker()
    before = receiver.survey()
    sender.halt_at(step)
    receiver.begin(GIVEN)
    sender.halted(step)
    sender.stop()
    scene.right(receiver.end(), "origin")
    sender.signal(signal.SIGCONT)
    sender.go_on()
    scene.nothing_left(receiver, before)
    # What it comes back to is a receiver that has gone; the next one is served.
    assert sender.ask("weights") == scene.weights
    scene.right(receiver.load(PATIENT), "peer")
    scene.registry_clean([sender])


PATIENT = 20.0
"""Seconds for a load that has to end well, however long a sender takes to come back."""
