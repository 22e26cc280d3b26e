"""A worker's load by way of its node's agent, and without it when it is not there any more."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.loader.node.fleet import PROMPT, Fleet, Valve, load, publish, read, told
from warmcast.loader import Loader
from warmcast.loader.node import client
from warmcast.loader.routes.node import Arrivals
from warmcast.manifests.deadline import Deadline


def test_the_report_tells_where_the_chunks_came_from(shared: Fleet):
    model = publish(shared.origin, 90)
    a, b = shared.agents
    count = len(model.chunks)
    cold = load(shared.origin, a, model)
    assert (cold.route, cold.transport) == ("node", None)
    assert cold.source == f"node agent at {a.socket}"
    assert [(s.outcome, s.reason) for s in cold.stages if s.name == "node"] == [
        ("yes", cold.source)
    ]
    mine = a.client  # what it owns came from the origin, all else through its neighbour
    assert mine.path == a.socket
    _, _, tiers = told(cold).partition("chunks: ")
    origin, ring = (int(part.split()[0]) for part in tiers.split(", "))
    assert tiers == f"{origin} origin, {ring} ring"
    assert origin + ring == count
    assert told(load(shared.origin, a, model)).endswith(f"chunks: {count} disk")
    near = load(shared.origin, b, model)
    assert told(near).endswith(f"chunks: {ring} disk, {origin} ring")
    assert f"by node from node agent at {b.socket}" in str(near)
    assert not [t.name for t in threading.enumerate() if t.name == "warmcast-node"]


def test_the_environment_names_the_agent(shared: Fleet, monkeypatch: pytest.MonkeyPatch):
    model = publish(shared.origin, 91)
    a, _ = shared.agents
    monkeypatch.setenv("WARMCAST_ORIGIN", shared.origin)
    monkeypatch.setenv("WARMCAST_NODE", str(a.socket))
    bag = model.skeleton()
    loader = Loader.from_env()
    try:
        assert loader.load(bag, model.ref).route == "node"
    finally:
        loader.close()
    model.assert_in(bag)


def test_a_file_that_has_come_as_a_whole_can_be_read_as_any(shared: Fleet):
    """And none that has not."""
    model = publish(shared.origin, 98)
    a, _ = shared.agents
    read(a, shared.store, model)
    deadline = Deadline.after(PROMPT)
    with Arrivals(
        a.client, None, shared.store, model.manifest, [model.file.path], deadline
    ) as blobs:
        reader = blobs.open_blob(model.file.sha256, deadline)
        [number] = blobs._there
        chunks = len(model.file.chunks)
        assert chunks > 2
        assert all(blobs.comes(number, chunk, deadline) for chunk in range(chunks))
        assert reader.cached is not None
        fd, _ = reader.cached
        data = bytearray(model.file.size)
        assert os.preadv(fd, [data], 0) == len(data)
        assert hashlib.sha256(data).hexdigest() == model.file.sha256
        for missing in (0, 1, chunks - 1):
            blobs._there[number][missing] = 0
            assert reader.cached is None
            blobs._there[number][missing] = 1
        reader.close()


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_an_agent_that_is_not_there(fleet: Fleet, end: str):
    model = publish(fleet.origin, 92)
    (a,) = fleet.start("a")
    getattr(a, end)()
    report = load(fleet.origin, a, model)
    assert report.route == "origin"
    (node,) = [stage for stage in report.stages if stage.name == "node"]
    assert node.outcome == "no"
    assert str(a.socket) in node.reason


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_the_only_agent_goes_in_the_middle(
    far_fleet: Fleet, valve: Valve, monkeypatch: pytest.MonkeyPatch, end: str
):
    """The rest comes from the origin; an agent that stands still counts as gone after a while."""
    monkeypatch.setattr(client, "_IDLE", 1.0)
    model = publish(far_fleet.origin, 93)
    (a,) = far_fleet.start("a")
    half = len(model.chunks) // 2
    valve.hold(after=half)
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(load, far_fleet.origin, a, model)
        valve.wait_for(half + 1)
        getattr(a, end)()
        valve.open()
        report = loaded.result()
    assert report.route == "node"
    assert " origin, past the agent" in told(report)
    assert not [t.name for t in threading.enumerate() if t.name == "warmcast-node"]
