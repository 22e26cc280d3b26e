"""A registry that is killed, hangs, answers late, cuts connections, or comes back empty."""

from __future__ import annotations

import pytest

from tests.loader.faults.proxy import Proxy
from tests.loader.faults.scene import Scene
from warmcast.loader.registry import Registry
from warmcast.manifests.deadline import Deadline

GIVEN = 2.5
"""Seconds that a load may take here, of which peers may take half."""

STEPS = {"found": "origin", "agreed": "origin", "receiving": "peer"}
"""Where a receiver is when the registry goes, and the route by which it ends."""


@pytest.mark.parametrize("fault", ["stop", "pause"])
def test_before(scene: Scene, fault: str):
    receiver = scene.worker()
    before = receiver.survey()
    getattr(scene.registry, fault)()
    scene.right(receiver.load(GIVEN), "origin")
    scene.nothing_left(receiver, before)


@pytest.mark.parametrize("fault", ["stop", "pause"])
@pytest.mark.parametrize("step", STEPS)
def test_during(scene: Scene, step: str, fault: str):
    sender, receiver = scene.worker().serve(), scene.worker()
    before = receiver.survey()
    receiver.halt_at(step)
    receiver.begin(GIVEN)
    receiver.halted(step)
    getattr(scene.registry, fault)()
    receiver.go_on()
    scene.right(receiver.end(), STEPS[step])
    assert sender.ask("weights") == scene.weights
    scene.nothing_left(receiver, before)


@pytest.mark.parametrize("fault", ["stop", "pause"])
@pytest.mark.parametrize("step", ["leased", "reading"])
def test_during_the_origin(scene: Scene, step: str, fault: str):
    receiver = scene.worker()
    before = receiver.survey()
    receiver.halt_at(step)
    receiver.begin(GIVEN)
    receiver.halted(step)
    getattr(scene.registry, fault)()
    receiver.go_on()
    scene.right(receiver.end(), "origin")
    scene.nothing_left(receiver, before)


@pytest.mark.parametrize("fault", ["stop", "pause"])
def test_waiting_for_a_lease(scene: Scene, fault: str):
    holder, waiter = scene.worker(), scene.worker()
    before = waiter.survey()
    holder.halt_at("reading")
    holder.begin(20)
    holder.halted("reading")
    waiter.halt_at("waiting")
    waiter.begin(GIVEN)
    waiter.halted("waiting")
    getattr(scene.registry, fault)()
    waiter.go_on()
    scene.right(waiter.end(), "origin")
    scene.nothing_left(waiter, before)


def test_serving_begins_without_it(scene: Scene):
    """A worker whose registry is down serves from the moment that it is back."""
    sender = scene.worker()
    scene.registry.stop()
    scene.right(sender.load(GIVEN), "origin")
    sender.name = sender.ask("serve")
    scene.registry.restart(Deadline.after(30))
    _wait_for_presence(scene, sender.ask("identity"))
    scene.right(scene.worker().load(GIVEN), "peer")
    scene.registry_clean([sender])


def test_comes_back_empty(scene: Scene):
    sender = scene.worker().serve()
    identity = sender.ask("identity")
    scene.registry.restart(Deadline.after(30))
    _wait_for_presence(scene, identity)
    scene.right(scene.worker().load(GIVEN), "peer")
    scene.registry_clean([sender])


def test_comes_back_from_a_pause(scene: Scene):
    sender, receiver = scene.worker().serve(), scene.worker()
    scene.registry.pause()
    scene.right(receiver.load(GIVEN), "origin")
    scene.registry.resume()
    _wait_for_presence(scene, sender.ask("identity"))
    scene.right(receiver.load(GIVEN), "peer")


def test_late_answers(scene: Scene):
    """Slow is not gone: each answer late by less than a call may take."""
    scene.worker().serve()
    with Proxy(scene.registry.port, delay=0.15) as proxy:
        receiver = scene.worker(proxy.url)
        before = receiver.survey()
        scene.right(receiver.load(30), "peer")
        scene.nothing_left(receiver, before)


def test_answers_later_than_a_call_may_take(scene: Scene):
    scene.worker().serve()
    with Proxy(scene.registry.port, delay=1.5) as proxy:
        receiver = scene.worker(proxy.url)
        before = receiver.survey()
        scene.right(receiver.load(GIVEN), "origin")
        scene.nothing_left(receiver, before)


@pytest.mark.parametrize("nbytes", [0, 1, 100, 1000])
def test_connections_cut(scene: Scene, nbytes: int):
    """Each connection breaks in the middle of an answer."""
    scene.worker().serve()
    with Proxy(scene.registry.port, cut_after=nbytes) as proxy:
        receiver = scene.worker(proxy.url)
        before = receiver.survey()
        outcome = receiver.load(GIVEN)
        scene.right(outcome, outcome.route)
        scene.nothing_left(receiver, before)


def _wait_for_presence(scene: Scene, identity: str) -> None:
    deadline = Deadline.after(15)
    registry = Registry(scene.registry.url)
    try:
        with registry.watch(identity, deadline) as watch:
            while not registry.senders(identity, deadline):
                assert watch.wait(deadline) is not None, "presence does not come back"
    finally:
        registry.close()
