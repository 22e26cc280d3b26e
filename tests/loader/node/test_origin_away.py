"""No origin, and warm nodes: workers load, by what the nodes know."""

from __future__ import annotations

import pytest

from tests.loader.node.fleet import Fleet, Valve, load, publish, read, told
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import StoreUnreachable


def test_workers_load_without_the_origin(far_fleet: Fleet, valve: Valve):
    """On a warm node, on one that knows the ref, and on one that has just come."""
    model, other = (publish(far_fleet.origin, seed) for seed in (60, 61))
    a, b = far_fleet.start("a", "b")
    read(a, far_fleet.store, model)
    assert b.client.resolve(model.ref, Deadline.after(20)) == model.manifest.digest
    assert a.client.resolve(model.ref, Deadline.after(20)) == model.manifest.digest
    (c,) = far_fleet.start("c")
    valve.close()
    report = load(far_fleet.origin, a, model)
    assert report.route == "node"
    assert told(report).endswith(f"chunks: {len(model.chunks)} disk")
    assert f"{model.ref} is taken as it was" in a.log
    report = load(far_fleet.origin, b, model)
    assert report.route == "node"
    assert "origin" not in told(report)
    # c owns chunks that only a and b have, and has never heard of the model.
    report = load(far_fleet.origin, c, model)
    assert report.route == "node"
    assert "origin" not in told(report)
    assert "past the agent" not in told(report)
    with pytest.raises(StoreUnreachable):  # what nobody has is not to be had, and said to be so
        load(far_fleet.origin, a, other)
    assert {agent.process.poll() for agent in (a, b, c)} == {None}
