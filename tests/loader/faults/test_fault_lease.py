"""Whoever reads the origin for others is killed or stopped while they wait."""

from __future__ import annotations

import signal

from tests.loader.faults.scene import Scene

GIVEN = 20.0
"""Seconds that a load may take here; a lease that is not renewed lasts five."""


def test_holder_killed(scene: Scene):
    holder, waiter = scene.worker(), scene.worker()
    before = waiter.survey()
    _begin(holder, waiter)
    holder.kill()
    waiter.go_on()
    outcome = waiter.end()
    scene.right(outcome, "origin")
    assert "(lease 2)" in outcome.tree
    waiter.name = waiter.ask("serve")
    scene.registry_clean([waiter])
    scene.nothing_left(waiter, before)


def test_holder_stopped(scene: Scene):
    """It comes back after another has taken over: both end right, and neither's lease stays."""
    holder, waiter = scene.worker(), scene.worker()
    before = holder.survey()
    _begin(holder, waiter)
    holder.stop()
    waiter.go_on()
    scene.right(waiter.end(), "origin")
    waiter.name = waiter.ask("serve")
    holder.signal(signal.SIGCONT)
    holder.go_on()
    scene.right(holder.end(), "origin")
    holder.name = holder.ask("serve")
    scene.registry_clean([waiter, holder])
    scene.right(scene.worker().load(GIVEN), "peer")
    scene.nothing_left(holder, before)


def test_holder_fails(scene: Scene):
    """Its lease goes with its load, and who waits is told at once."""
    blob = max(scene.own_origin().glob("blobs/sha256/*/*"), key=lambda path: path.stat().st_size)
    holder, waiter = scene.worker(), scene.worker()
    _begin(holder, waiter)
    whole = blob.read_bytes()
    blob.chmod(0o600)
    blob.write_bytes(whole[:100])
    holder.go_on()
    scene.wrong(holder.end(), "StoreError")
    scene.registry_clean()
    blob.write_bytes(whole)
    waiter.go_on()
    scene.right(waiter.end(), "origin")


def _begin(holder, waiter) -> None:
    holder.halt_at("reading")
    holder.begin(GIVEN)
    holder.halted("reading")
    waiter.halt_at("waiting")
    waiter.begin(GIVEN)
    waiter.halted("waiting")
