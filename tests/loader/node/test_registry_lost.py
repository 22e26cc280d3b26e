"""The registry goes, stays away, comes back empty: the nodes know each other by what they heard."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from tests.loader.node.fleet import Agent, Fleet, eventually, publish, read
from warmcast.infra.servers import Valkey
from warmcast.manifests.deadline import Deadline


def ready(agent: Agent) -> bool:
    connection = http.client.HTTPConnection(urlsplit(agent.url).netloc, timeout=20)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def test_a_registry_that_is_lost_and_comes_back_empty(fleet: Fleet, registry: Valkey):
    first, second, third = (publish(fleet.origin, seed) for seed in (70, 71, 72))
    a, b, c = agents = fleet.start("a", "b", "c")
    assert all(ready(agent) for agent in agents)
    registry.stop()
    eventually(lambda: not any(ready(agent) for agent in agents), "they know that it is lost")
    for agent in agents:
        assert agent.metrics()["warmcast_nodes"] == 3
        assert read(agent, fleet.store, first).total() == len(first.chunks)
    assert fleet.total("warmcast_origin_bytes_total") == first.nbytes
    registry.restart(Deadline.after(30))
    eventually(lambda: all(ready(agent) for agent in agents), "they hear of it again")
    fleet.all_know(3)
    for agent in agents:
        read(agent, fleet.store, second)
    assert fleet.total("warmcast_origin_bytes_total") == first.nbytes + second.nbytes
    registry.pause()
    eventually(lambda: not any(ready(agent) for agent in agents), "they know that it hangs")
    c.kill()  # and nobody hears of it
    assert read(a, fleet.store, third).total() == len(third.chunks)
    assert "c is passed by for 30 s" in a.log
    registry.resume()
    eventually(lambda: ready(a) and ready(b), "it goes on")


def test_an_agent_that_starts_without_a_registry_meets_the_others_later(
    fleet: Fleet, registry: Valkey
):
    registry.stop()
    a, b = fleet.begin("a"), fleet.begin("b")
    model = publish(fleet.origin, 73)
    for agent in (a, b):
        agent.wait_ready()
        assert not ready(agent)
        assert agent.metrics()["warmcast_nodes"] == 1
    assert read(a, fleet.store, model) == {"origin": len(model.chunks)}
    registry.restart(Deadline.after(30))
    fleet.all_know(2)
    assert ready(a)
    assert read(b, fleet.store, model)["ring"] > 0
