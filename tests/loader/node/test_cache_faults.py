"""The cache: what is found on disk is believed only when checked, and a disk may refuse.

Agents are killed, chunks are changed under them, the disk is full, the folder is not to be had.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.loader.node.fleet import (
    CHUNK,
    PROMPT,
    Agent,
    Fleet,
    Model,
    Valve,
    eventually,
    load,
    publish,
    read,
    told,
)
from warmcast.infra.servers import Valkey
from warmcast.loader.node.cache import Cache, CacheFull
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import StoreError


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, nodes_registry: Valkey) -> Iterator[Fleet]:
    """Two nodes that tests may change files of, and no more."""
    folder = tmp_path_factory.mktemp("f")
    fleet = Fleet(folder, (folder / "origin").as_uri(), nodes_registry.url)
    try:
        fleet.start("a", "b")
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet without a registry, for an agent that is alone."""
    fleet = Fleet(tmp_path / "f", (tmp_path / "origin").as_uri(), None)
    yield fleet
    fleet.close()


def blob(agent: Agent, sha256: str) -> Path:
    """The file of a whole blob."""
    return agent.cache / "blobs" / sha256[:2] / sha256


def alter(path: Path, *chunks: int) -> None:
    """Flip a bit in some chunks of a file."""
    with path.open("r+b") as file:
        for chunk in chunks:
            file.seek(chunk * CHUNK + 77)
            byte = file.read(1)[0]
            file.seek(chunk * CHUNK + 77)
            file.write(bytes([byte ^ 16]))


def had(agent: Agent, model: Model) -> dict[str, list[int]]:
    """The chunks whose marks stand in an agent's folder, by the blob."""
    found = {}
    for file in model.manifest.files:
        marks = agent.cache / "partial" / f"{file.sha256}.there"
        if blob(agent, file.sha256).exists():
            found[file.sha256] = list(range(len(file.chunks)))
        elif marks.exists():
            found[file.sha256] = [n for n, mark in enumerate(marks.read_bytes()) if mark]
    return found


def assert_whole(agent: Agent, model: Model) -> None:
    """The cache holds the model, right, and nothing half done."""
    for file in model.manifest.files:
        assert blob(agent, file.sha256).is_file()
    assert list((agent.cache / "partial").iterdir()) == []


# Bytes that change under the agent


def test_a_chunk_that_was_altered_is_found_by_the_worker(pair: Fleet):
    """The load ends right by the origin, and the next one by the node again."""
    model = publish(pair.origin, 20)
    a, _ = pair.agents
    load(pair.origin, a, model)
    path = blob(a, model.file.sha256)
    before = a.metrics()["warmcast_origin_bytes_total"]
    alter(path, 3, 5)
    assert load(pair.origin, a, model).route == "origin"
    eventually(lambda: a.log.count("it is fetched again") == 2, "the agent looks at what it has")
    report = load(pair.origin, a, model)
    assert report.route == "node"
    assert_whole(a, model)
    fetched = a.metrics()["warmcast_origin_bytes_total"] - before
    assert fetched in (0, CHUNK, 2 * CHUNK)  # and the others from the neighbour
    assert a.log.count("it is fetched again") == 2


def test_a_chunk_that_was_altered_is_found_by_a_neighbour(pair: Fleet):
    model = publish(pair.origin, 21)
    a, b = pair.agents
    read(a, pair.store, model)
    seen = a.log.count("it is fetched again")
    sent = [a.metrics()["warmcast_sent_bytes_total"], a.metrics()["warmcast_origin_bytes_total"]]
    path = blob(a, model.file.sha256)
    alter(path, *range(len(model.file.chunks)))
    tiers = read(b, pair.store, model)  # it has given away some before it looked, not one is used
    assert tiers["ring"] > 0
    assert tiers["ring"] + tiers["origin"] + tiers["disk"] == len(model.chunks)
    found = a.log.count("it is fetched again") - seen
    assert found > 0
    now = a.metrics()
    assert now["warmcast_origin_bytes_total"] - sent[1] > 0
    assert now["warmcast_sent_bytes_total"] - sent[0] > 0
    assert "is passed by" not in b.log
    assert read(b, pair.store, model) == {"disk": len(model.chunks)}


# Agents that are killed


def test_an_agent_that_was_killed_goes_on_with_what_it_had(far_fleet: Fleet, valve: Valve):
    """One chunk of those is torn though its mark stands: it is fetched again."""
    model = publish(far_fleet.origin, 22)
    (a,) = far_fleet.start("a")
    half = len(model.chunks) // 2
    valve.hold(after=half)
    with ThreadPoolExecutor(1) as pool:
        replica = pool.submit(read, a, far_fleet.store, model)
        eventually(lambda: sum(map(len, had(a, model).values())) >= half, "the half is there")
        valve.wait_for(half + 1)
        a.kill()
        valve.open()
        assert replica.result().total() >= len(model.chunks)
    marked = had(a, model)
    kept = {(sha256, n * CHUNK) for sha256, numbers in marked.items() for n in numbers}
    assert len(kept) >= half
    sha256, numbers = next(item for item in marked.items() if item[1])
    partial = a.cache / "partial" / sha256
    alter(partial if partial.exists() else blob(a, sha256), numbers[0])
    valve.reads.clear()
    a.restart()
    assert read(a, far_fleet.store, model).total() == len(model.chunks)
    kept.remove((sha256, numbers[0] * CHUNK))
    assert sorted(read[:2] for read in valve.reads) == sorted(set(model.chunks) - kept)
    assert_whole(a, model)


def test_an_agent_that_is_killed_and_started_again_under_a_worker(far_fleet: Fleet, valve: Valve):
    """The worker's bytes come through the other node, and the origin gives each but once more."""
    model = publish(far_fleet.origin, 23)
    a, b = far_fleet.start("a", "b")
    half = len(model.chunks) // 2
    valve.hold(after=half)
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(load, far_fleet.origin, a, model)
        valve.wait_for(half + 1)
        a.kill()
        valve.open()
        a.restart()
        report = loaded.result()
    assert report.route == "node"
    assert "other agents, past the agent" in told(report)
    assert "origin, past the agent" not in told(report)
    assert read(b, far_fleet.store, model).total() == len(model.chunks)
    assert read(a, far_fleet.store, model).total() == len(model.chunks)
    assert_whole(a, model)


# Disks that refuse


def test_a_cache_in_which_all_is_in_use_is_full(lone: Fleet):
    """The worker gets the rest from the origin; what the agent has stays right."""
    model = publish(lone.origin, 24)
    (a,) = lone.start("a", high=4 * CHUNK, low=4 * CHUNK)
    tiers = read(a, lone.store, model)
    assert tiers["origin, past the agent"] >= len(model.chunks) - 5
    assert a.metrics()["warmcast_cache_bytes"] <= 4 * CHUNK
    assert 'warmcast_errors_total{kind="CacheFull"}' in a.metrics()
    deadline = Deadline.after(PROMPT)
    with pytest.raises(StoreError, match="all in use; raise --high"):
        list(a.client.prefetch(model.manifest.digest, deadline))


def test_a_disk_that_refuses_a_write(lone: Fleet):
    """The file may grow no further (RLIMIT_FSIZE), and then it may again."""
    model = publish(lone.origin, 25, files=1)
    (a,) = lone.start("a")
    _, hard = resource.prlimit(a.process.pid, resource.RLIMIT_FSIZE)
    read(a, lone.store, publish(lone.origin, 26))
    sparse = a.cache / "partial" / model.file.sha256
    sparse.touch()  # of its full size, as an agent leaves it that was killed at once
    os.truncate(sparse, model.file.size)
    resource.prlimit(a.process.pid, resource.RLIMIT_FSIZE, (5 * CHUNK + 100, hard))
    had = a.metrics()["warmcast_cache_bytes"]
    report = load(lone.origin, a, model)
    assert report.route == "node"
    assert "origin, past the agent" in told(report)
    assert a.metrics()['warmcast_errors_total{kind="StoreError"}'] > 0
    assert a.metrics()["warmcast_cache_bytes"] - had <= 6 * CHUNK
    resource.prlimit(a.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert read(a, lone.store, model).total() == len(model.chunks)
    assert a.metrics()["warmcast_cache_bytes"] - had == model.nbytes
    assert_whole(a, model)


_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def _may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    mount = "mount -t tmpfs none /mnt"
    command = [*_NAMESPACE, "sh", "-c", mount]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="needs a mount namespace of its own")
def test_a_disk_that_is_full(lone: Fleet, tmp_path: Path):
    """A file system of eight chunks: ENOSPC, as a disk says it."""
    model = publish(lone.origin, 27)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size={8 * CHUNK} none {disk} && exec "$@"'
    (a,) = lone.start("a", cache=disk / "cache", by=[*_NAMESPACE, "sh", "-c", mount, "sh"])
    with pytest.raises(StoreError, match="No space left on device; give the cache a larger disk"):
        list(a.client.prefetch(model.manifest.digest, Deadline.after(PROMPT)))
    assert a.metrics()['warmcast_errors_total{kind="CacheFull"}'] > 0
    tiers = read(a, lone.store, model)  # by a worker that does not see the agent's disk
    assert tiers["origin, past the agent"] == len(model.chunks)
    # What is being tried counts until it has failed, and is tried while somebody wants it.
    eventually(lambda: a.metrics()["warmcast_blobs_in_use"] == 0, "nobody reads")
    assert a.metrics()["warmcast_cache_bytes"] <= 8 * CHUNK
    assert a.end() == 0


def test_files_that_cannot_be_made_leave_nothing_open(lone: Fleet):
    """Not even an empty file may grow (RLIMIT_FSIZE): every blob fails where it begins."""
    model = publish(lone.origin, 37, files=1)
    (a,) = lone.start("a")
    assert a.client.resolve(model.ref, Deadline.after(PROMPT)) == model.manifest.digest
    a.client.manifest(model.manifest.digest, Deadline.after(PROMPT))
    _, hard = resource.prlimit(a.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(a.process.pid, resource.RLIMIT_FSIZE, (CHUNK, hard))
    assert load(lone.origin, a, model).route == "node"
    files = Path(f"/proc/{a.process.pid}/fd")
    eventually(lambda: a.metrics()["warmcast_chunks_in_flight"] == 0, "nothing is under way")
    open_files = {path.readlink() for path in files.iterdir() if path.is_symlink()}
    assert not [name for name in open_files if a.cache / "partial" in name.parents]


def test_a_folder_that_turns_unusable(lone: Fleet):
    """Where new blobs begin there is a file now: workers read past the cache."""
    first, second = (publish(lone.origin, seed) for seed in (28, 29))
    (a,) = lone.start("a")
    read(a, lone.store, first)
    (a.cache / "partial").rmdir()
    (a.cache / "partial").touch()
    report = load(lone.origin, a, second)
    assert report.verified
    assert load(lone.origin, a, first).route == "node"
    with pytest.raises(StoreError):
        list(a.client.prefetch(second.manifest.digest, Deadline.after(PROMPT)))
    (a.cache / "partial").unlink()
    (a.cache / "partial").mkdir()
    assert read(a, lone.store, second).total() == len(second.chunks)
    assert_whole(a, second)


def test_a_cache_that_is_no_folder(lone: Fleet):
    (lone.key.parent / "a").mkdir()
    (lone.key.parent / "a" / "cache").touch()
    a = lone.begin("a")
    assert a.process.wait(PROMPT) in (1, 2)
    (line,) = a.log.splitlines()
    assert f"cache {a.cache}: expected a folder that can be written" in line


def test_two_agents_of_one_cache(lone: Fleet):
    (a,) = lone.start("a")
    b = lone.begin("b", cache=a.cache)
    assert b.process.wait(PROMPT) == 2
    (line,) = b.log.splitlines()
    assert f"found a, process {a.process.pid}, holds it; end that one" in line
    model = publish(lone.origin, 30)
    assert load(lone.origin, a, model).route == "node"


# Eviction


def test_what_was_used_longest_ago_goes_first(lone: Fleet):
    """Between the watermarks, by the cache's own bytes."""
    models = [publish(lone.origin, 31 + n, files=1) for n in range(4)]
    size = models[0].nbytes
    assert {model.nbytes for model in models} == {size}
    (a,) = lone.start("a", high=3 * size, low=2 * size + CHUNK)
    blobs = [blob(a, model.file.sha256) for model in models]
    foreign = a.cache / "blobs" / "of somebody else's"
    foreign.write_bytes(bytes(size))

    def use(model: Model) -> None:
        read(a, lone.store, model)
        # It was used until the agent has noticed that nobody reads it any more.
        eventually(lambda: a.metrics()["warmcast_blobs_in_use"] == 0, "nobody reads")

    for model in models[:3]:
        use(model)
    assert a.metrics()["warmcast_cache_bytes"] == 3 * size
    assert a.metrics()["warmcast_cache_evicted_bytes"] == 0
    for model in (models[0], models[1], models[3]):
        use(model)
    assert [path.exists() for path in blobs] == [True, True, False, True]
    told = a.metrics()
    assert told["warmcast_cache_evicted_bytes"] == size
    assert told["warmcast_cache_bytes"] == 3 * size
    assert foreign.exists()
    foreign.unlink()
    assert a.end() == 0
    a.restart()  # of what is found then, nobody knows when it was used
    assert a.metrics()["warmcast_cache_bytes"] == 3 * size
    assert load(lone.origin, a, models[2]).route == "node"
    told = a.metrics()
    assert told["warmcast_cache_bytes"] == sum(p.stat().st_size for p in blobs if p.exists())
    assert told["warmcast_cache_bytes"] <= 3 * size


def test_what_is_in_use_stays(lone: Fleet, tmp_path: Path):
    """However long ago it was used last; where nothing else can go, there is no room."""
    first, second, third = (publish(lone.origin, 38 + n, files=1) for n in range(3))
    size = first.nbytes
    cache = Cache(tmp_path / "cache", 2 * size, size + CHUNK, "a test")

    def fill(model: Model) -> None:
        with cache.use(model.spec) as blob:
            for chunk in blob.missing():
                begin, length = model.spec.span(chunk)
                data = memoryview(bytearray(length))
                lone.store.read_blob(model.file.sha256, begin, data, Deadline.after(PROMPT))
                blob.write(chunk, data)

    try:
        fill(first)
        fill(second)
        with cache.use(first.spec) as blob:
            fill(third)
            assert blob.whole
            assert blob.path.exists()
            assert (cache.nbytes, cache.evicted) == (2 * size, size)
            with cache.use(third.spec), pytest.raises(CacheFull, match="all in use"):
                fill(second)
            assert blob.check(0)
        assert not cache.whole(second.file.sha256).exists()
    finally:
        cache.close()
