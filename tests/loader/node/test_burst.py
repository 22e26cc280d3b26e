"""Many replicas at once: the origin gives each byte once, whatever becomes of the nodes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.loader.node.fleet import Agent, Fleet, Model, Valve, publish, read
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.origin import Origin

REPLICAS = 8


def burst(agents: Sequence[Agent], origin: Origin, model: Model) -> Counter[str]:
    """Replicas on some nodes, all right; where their chunks came from."""
    with ThreadPoolExecutor(REPLICAS) as pool:
        nodes = [agents[number % len(agents)] for number in range(REPLICAS)]
        return sum(pool.map(lambda node: read(node, origin, model), nodes), Counter())


def test_the_origin_gives_a_model_once(far_fleet: Fleet, valve: Valve):
    model = publish(far_fleet.origin, 1)
    agents = far_fleet.start("a", "b", "c", "d")
    tiers = burst(agents, far_fleet.store, model)
    assert sorted(read[:2] for read in valve.reads) == sorted(model.chunks)
    assert far_fleet.total("warmcast_origin_bytes_total") == model.nbytes
    assert far_fleet.total("warmcast_received_bytes_total") == 3 * model.nbytes
    assert set(tiers) <= {"disk", "ring", "origin"}
    valve.reads.clear()
    everything = {"disk": REPLICAS * len(model.chunks)}
    assert burst(agents, far_fleet.store, model) == everything
    assert valve.reads == []
    assert far_fleet.total("warmcast_cache_bytes") == 4 * model.nbytes
    assert [agent.end() for agent in agents] == [0] * 4


def test_each_chunk_is_fetched_once_whoever_asks(far_fleet: Fleet, valve: Valve):
    """Two workers of a node, a neighbour's and a prefetch ask while the origin holds back."""
    model = publish(far_fleet.origin, 2)
    a, b, c = far_fleet.start("a", "b", "c")
    valve.hold()
    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(read, node, far_fleet.store, model) for node in (a, a, b)]
        digest, deadline = model.manifest.digest, Deadline.after(30)
        told = pool.submit(lambda: list(c.client.prefetch(digest, deadline)))
        for agent in (a, b, c):
            agent.wait(lambda told: told["warmcast_chunks_in_flight"] > 0, "wants chunks")
        valve.wait_for(1)
        valve.open()
        for worker in workers:
            assert worker.result().total() == len(model.chunks)
        assert told.result()[-1] == (model.nbytes, model.nbytes)
    assert sorted(read[:2] for read in valve.reads) == sorted(model.chunks)
    for agent in (a, b, c):
        agent.wait(lambda told: told["warmcast_chunks_in_flight"] == 0, "has all")
        assert agent.metrics()["warmcast_cache_bytes"] == model.nbytes


def test_half_of_the_nodes_die_in_the_middle(far_fleet: Fleet, valve: Valve):
    model = publish(far_fleet.origin, 3)
    agents = far_fleet.start("a", "b", "c", "d")
    half = len(model.chunks) // 2
    valve.hold(after=half)
    met = threading.Barrier(REPLICAS)
    with ThreadPoolExecutor(REPLICAS) as pool:
        replicas = [
            pool.submit(read, agents[n % 4], far_fleet.store, model, met=met.wait)
            for n in range(REPLICAS)
        ]
        valve.wait_for(half + 1)
        for agent in agents[:2]:
            agent.kill()
        valve.open()
        tiers = [replica.result() for replica in replicas]  # each has looked at its bytes
    assert all(mine.total() >= len(model.chunks) for mine in tiers)
    assert "other agents, past the agent" in sum(tiers, Counter())
    valve.reads.clear()
    everything = {"disk": REPLICAS * len(model.chunks)}
    assert burst(agents[2:], far_fleet.store, model) == everything
    assert valve.reads == []
