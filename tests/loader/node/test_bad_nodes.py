"""Nodes that are slow, that lie, that are gone: passed by, remembered, and no byte of theirs used.

How long they may keep others is in ``peers``; where that is long, it is made short here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.loader.node import impostor as nodes
from tests.loader.node.fleet import PROMPT, Fleet, load, publish, read, told
from tests.loader.node.impostor import Answer, Impostor
from warmcast.infra.servers import Valkey
from warmcast.loader.node import fill, peers
from warmcast.loader.node.cache import Cache
from warmcast.loader.node.fill import Filler, Wish
from warmcast.loader.node.membership import Membership
from warmcast.loader.node.metrics import Metrics
from warmcast.loader.node.peers import Peers
from warmcast.loader.node.tokens import Fleet as Tokens
from warmcast.loader.registry import Registry

FAULTS: dict[str, Answer] = {
    answer.__name__: answer
    for answer in (
        nodes.wrong,
        nodes.another_length,
        nodes.no_length,
        nodes.cut,
        nodes.garbage,
        nodes.elsewhere,
        nodes.refusing,
        nodes.failing,
        nodes.silent,
    )
}


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory, nodes_registry: Valkey) -> Iterator[Fleet]:
    """A fleet of one honest node."""
    folder = tmp_path_factory.mktemp("f")
    fleet = Fleet(folder, (folder / "origin").as_uri(), nodes_registry.url)
    try:
        fleet.start("a")
        yield fleet
    finally:
        fleet.close()


def test_bad_nodes_are_passed_by_and_remembered(lone: Fleet, nodes_registry: Valkey):
    """All kinds of them, among which an honest node is alone with the origin and one more."""
    (a,) = lone.agents
    first, second = (publish(lone.origin, seed, files=6) for seed in (10, 11))
    with ExitStack() as stack:
        impostors = {
            name: stack.enter_context(Impostor(nodes_registry.url, name, lone.store, answer))
            for name, answer in {**FAULTS, "right": nodes.right}.items()
        }
        lone.all_know(len(impostors) + 1)
        load(lone.origin, a, first)
        assert [name for name, each in impostors.items() if not each.asked] == []
        blamed = [name for name in impostors if f"{name} is passed by for 30 s" in a.log]
        assert blamed == list(FAULTS)
        assert {name for name, each in impostors.items() if each.checks} == {"wrong"}
        failed = a.metrics()['warmcast_errors_total{kind="NodeFailed"}']
        assert failed >= len(FAULTS)
        for each in impostors.values():
            each.asked.clear()
        report = load(lone.origin, a, second)
        assert [name for name, each in impostors.items() if each.asked] == ["right"]
        assert a.metrics()['warmcast_errors_total{kind="NodeFailed"}'] == failed, a.log
    ring = len(impostors["right"].asked)
    assert told(report).endswith(f"chunks: {len(second.chunks) - ring} origin, {ring} ring")
    lone.all_know(1)


@pytest.mark.parametrize(
    ("fault", "blamed"),
    [
        (nodes.dripping, True),
        (nodes.stalling, True),
        (nodes.on_its_way, True),
        (nodes.asking, False),
        (nodes.busy, False),
    ],
)
def test_one_that_keeps_others_waiting(
    lone: Fleet,
    nodes_registry: Valkey,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Answer,
    blamed: bool,
):
    """It may do so for a while, and one that is only busy is not blamed for it."""
    monkeypatch.setattr(peers, "COMING", 1.0)
    monkeypatch.setattr(peers, "IDLE", 0.5)
    monkeypatch.setattr(fill, "_BUSY", 0.5)
    model = publish(lone.origin, 12)
    with ExitStack() as stack:
        slow = stack.enter_context(Impostor(nodes_registry.url, "slow", lone.store, fault))
        registry = Registry(nodes_registry.url)
        stack.callback(registry.close)
        me = Membership(registry, "me", "http://127.0.0.1:9")
        me.start()
        stack.callback(me.close)
        asking = Peers("me", Tokens(b"k" * 32))
        stack.callback(asking.close)
        asking.blame("a", ValueError("not asked here"))
        cache = Cache(tmp_path / "cache", 1 << 30, 1 << 30, "a test")
        stack.callback(cache.close)
        filler = Filler(me, asking, lone.store, Metrics(), memory=1 << 20)
        stack.callback(filler.close)
        owners = me.ring.owners(model.file.sha256, len(model.file.chunks), 2)
        chunk = next(n for n, (first, next_) in enumerate(owners) if first == "slow")
        blob = stack.enter_context(cache.use(model.spec))
        wanted = filler.wanted(model.manifest.digest, blob, chunk, Wish.WORKER)
        assert stack.enter_context(wanted).result(PROMPT) == "origin"
        assert blob.check(chunk)
        assert set(slow.asked) == {(model.file.sha256, chunk)}
        assert asking.passed_by("slow") == blamed


def test_nodes_that_are_gone_and_not_yet_known_to_be(fleet: Fleet):
    """One is killed, one stopped; when they are known to be gone they are asked no more."""
    model = publish(fleet.origin, 13)
    a, b, c, d = fleet.start("a", "b", "c", "d")
    b.kill()
    c.stop()
    assert "past the agent" not in told(load(fleet.origin, a, model))
    assert "b is passed by for 30 s" in a.log
    assert "c is passed by for 30 s" in a.log
    assert read(d, fleet.store, model).total() == len(model.chunks)
    # Whom the two have left their chunks to is the same node for all who know of them.
    given = [agent.metrics()["warmcast_origin_bytes_total"] for agent in (a, d)]
    assert sum(given) == model.nbytes
    for agent in (a, d):
        agent.wait(lambda told: told["warmcast_nodes"] == 2, "knows that they are gone")
    c.go_on()
    fleet.all_know(3)
    assert read(c, fleet.store, model).total() == len(model.chunks)
