"""Prefetching: it ends when all is there, tells how far it is, and never gets in a worker's way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.loader.node.fleet import CHUNK, PROMPT, Agent, Fleet, Valve, load, publish, read, told
from warmcast.manifests.deadline import Deadline


def prefetch(agent: Agent, *words: str) -> tuple[int, str, str]:
    """The command's exit status, and what it prints."""
    command = [sys.executable, "-P", "-m", "warmcast.manifests", "prefetch"]
    ended = subprocess.run(
        [*command, *words, "--socket", str(agent.socket)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PROMPT,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_a_worker_then_reads_the_disk_alone(shared: Fleet):
    model = publish(shared.origin, 80)
    a, _ = shared.agents
    status, out, err = prefetch(a, model.ref)
    assert (status, out) == (0, f"{model.ref} ({model.manifest.digest[:12]}) is there\n")
    assert err.splitlines()[-1].startswith("0.00 of 0.00 GB, ")
    report = load(shared.origin, a, model)
    assert report.route == "node"
    assert told(report).endswith(f"chunks: {len(model.chunks)} disk")
    assert prefetch(a, model.manifest.digest)[0] == 0  # all is there already


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["nothing@here"], 1, "nothing@here"),
        (["0" * 64], 1, "0" * 64),
        (["no ref"], 1, "expected model@name"),
        (["model-80@test", "--deadline", "0"], 2, "--deadline: expected more than 0 seconds"),
    ],
)
def test_what_cannot_be_prefetched(shared: Fleet, words: Sequence[str], status: int, said: str):
    found, out, err = prefetch(shared.agents[0], *words)
    assert (found, out) == (status, "")
    (line,) = err.splitlines()
    assert said in line


def test_no_agent(fleet: Fleet):
    agent = fleet.begin("a")
    agent.wait_ready()
    agent.kill()
    status, out, err = prefetch(agent, "model@test", "--deadline", "0.5")
    assert (status, out) == (1, "")
    (line,) = err.splitlines()
    assert f"node agent at {agent.socket}" in line
    assert "start `warmcast node`" in line


def test_one_that_is_cut_off_goes_on_where_it_was(far_fleet: Fleet, valve: Valve):
    """The agent is killed, and so is the command; what had come is not fetched again."""
    model = publish(far_fleet.origin, 81)
    (a,) = far_fleet.start("a")
    half = len(model.chunks) // 2
    valve.hold(after=half)
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(prefetch, a, model.ref)
        a.wait(lambda told: told["warmcast_cache_bytes"] >= half * CHUNK * 0.9, "has the half")
        a.kill()
        assert cut.result()[0] == 1
    valve.open()
    valve.reads.clear()
    a.restart()
    there = a.metrics()["warmcast_cache_bytes"]
    assert there > 0
    assert prefetch(a, model.ref)[0] == 0
    again = sum(length for _, _, length in valve.reads)
    assert again == model.nbytes - there
    assert read(a, far_fleet.store, model) == {"disk": len(model.chunks)}


# In the background


def test_a_prefetch_stands_still_while_a_worker_loads(far_fleet: Fleet, valve: Valve):
    """It goes on when the worker has gone."""
    wanted, background = (publish(far_fleet.origin, seed) for seed in (82, 83))
    (a,) = far_fleet.start("a")
    valve.hold()
    deadline = Deadline.after(PROMPT)
    mine = {file.sha256 for file in wanted.manifest.files}
    with ThreadPoolExecutor(2) as pool:
        worker = pool.submit(read, a, far_fleet.store, wanted)
        valve.wait_for(1)
        fetched = pool.submit(lambda: list(a.client.prefetch(background.manifest.digest, deadline)))
        a.wait(lambda told: told["warmcast_chunks_in_flight"] > len(wanted.chunks), "wants both")
        valve.open()
        assert worker.result() == {"origin": len(wanted.chunks)}
        assert fetched.result()[-1] == (background.nbytes, background.nbytes)
    whose = [sha256 in mine for sha256, _, _ in valve.reads]
    assert whose == sorted(whose, reverse=True), "the background went before a worker"


def test_the_background_keeps_to_its_rate(far_fleet: Fleet, valve: Valve):
    """At a byte a second there is one chunk, and no second one; a worker is not bound by it."""
    model, other = (publish(far_fleet.origin, seed) for seed in (84, 85))
    (a,) = far_fleet.start("a", background_rate=1)
    fetching = a.client.prefetch(model.manifest.digest, Deadline.after(PROMPT))
    assert next(fetching) == (CHUNK, model.nbytes)
    assert read(a, far_fleet.store, other) == {"origin": len(other.chunks)}
    told = a.metrics()
    assert told["warmcast_cache_bytes"] == told["warmcast_origin_bytes_total"]
    assert told["warmcast_cache_bytes"] == other.nbytes + CHUNK
    assert told["warmcast_chunks_in_flight"] > 0
    assert read(a, far_fleet.store, model).total() == len(model.chunks)
    fetching.close()
    assert a.end() == 0
    a.restart()
    assert prefetch(a, model.ref)[0] == 0  # what is there is no matter of the rate
