"""Whatever else can write to the registry: garbage, forgeries, replays, records of another type."""

from __future__ import annotations

import random

import pytest

from tests.loader.faults.impostor import Impostor
from tests.loader.faults.scene import Scene, Worker
from warmcast.loader.registry import mailbox

GIVEN = 2.5
"""Seconds that a load may take here, of which peers may take half."""

RANDOM = random.Random(1)
GARBAGE = [
    b"",
    b"\0",
    RANDOM.randbytes(500),
    RANDOM.randbytes(8 << 20),
    b"{}",
    b"[]",
    b"null",
    b'"\\ud800"',
    b"1e999",
    b"9" * 5000,
    b"[" * 100_000,
    b'{"request": 1}',
    b'{"a": 1, "a": 2}',
    '{"request": "é'.encode("latin-1"),
]


@pytest.fixture
def sender(scene: Scene) -> Worker:
    return scene.worker().serve()


@pytest.fixture
def impostor(scene: Scene, sender: Worker):
    with Impostor(scene.registry.url, sender.ask("identity")) as impostor:
        yield impostor


def test_in_the_senders_mailbox(scene: Scene, sender: Worker, impostor: Impostor):
    for message in GARBAGE:
        impostor.put(sender.name, message)
    scene.right(scene.worker().load(20), "peer")
    scene.registry_clean([sender])


def test_mailbox_of_another_type(scene: Scene, sender: Worker):
    """A string where a list should be: the sender cannot be asked until it is gone."""
    box = mailbox(sender.name)
    scene.client.set(box, b"x", px=60_000)
    receiver = scene.worker()
    scene.right(receiver.load(GIVEN), "origin")
    scene.client.delete(box)
    scene.right(receiver.load(20), "peer")


def test_presence(scene: Scene, sender: Worker):
    """Bad presences do not hide the good one."""
    prefix = f"warmcast:{{{sender.ask('identity')}}}:"
    for number, text in enumerate(GARBAGE):
        scene.client.zadd(f"{prefix}senders", {f"bad{number}": 1 << 53})
        scene.client.set(f"{prefix}sender:bad{number}", text, px=60_000)
    scene.right(scene.worker().load(20), "peer")


@pytest.mark.parametrize("name", ["senders", "lease", "waiters", "fence"])
def test_record_of_another_type(scene: Scene, sender: Worker, name: str):
    key = f"warmcast:{{{sender.ask('identity')}}}:{name}"
    sender.ask("close")
    scene.client.delete(key)
    scene.client.hset(key, "a", "b")
    receiver = scene.worker()
    before = receiver.survey()
    scene.right(receiver.load(GIVEN), "origin")
    scene.nothing_left(receiver, before)


FORGERIES = {
    "wrong nonce": lambda ask: {"echo": ask["nonce"] + 2},
    "no nonce": lambda ask: {"echo": 0},
    "text for a nonce": lambda ask: {"echo": str(ask["nonce"] + 1)},
    "another request": lambda ask: {"request": "0" * 32},
    "no endpoint": lambda ask: {"endpoint": None},
    "another transport": lambda ask: {"transport": "pigeon"},
    "an unknown status": lambda ask: {"status": "perhaps"},
    "an unknown field": lambda ask: {"extra": 1},
}


def test_answers(scene: Scene, sender: Worker, impostor: Impostor):
    """The one who forges is passed over; the process that met them all loads right each time."""
    sender.ask("close")
    receiver = scene.worker()
    before = receiver.survey()
    for forgery in FORGERIES.values():
        impostor.announce()
        receiver.begin(GIVEN)
        ask = impostor.asked()
        impostor.put(ask["request"], impostor.answer(ask, **forgery(ask)))
        scene.right(receiver.end(), "origin")
    for message in GARBAGE:
        impostor.announce()
        receiver.begin(GIVEN)
        impostor.put(impostor.asked()["request"], message)
        scene.right(receiver.end(), "origin")
    scene.nothing_left(receiver, before)


ADDRESSES = [b"", b"x", b"\0" * 400, b"\xff" * 400, RANDOM.randbytes(400)]


def test_addresses_for_a_receiver(scene: Scene, sender: Worker, impostor: Impostor):
    """Where gloo would read the peer's address: it must never see these."""
    sender.ask("close")
    receiver = scene.worker()
    before = receiver.survey()
    for address in ADDRESSES:
        impostor.announce()
        receiver.begin(GIVEN)
        ask = impostor.asked()
        for rank in (0, 1):
            impostor.put(f"{ask['request']}/0/{rank}", address)
        impostor.put(ask["request"], impostor.answer(ask))
        scene.right(receiver.end(), "origin")
    scene.nothing_left(receiver, before)


def test_addresses_for_a_sender(scene: Scene, sender: Worker, impostor: Impostor):
    before = sender.survey()
    for address in ADDRESSES:
        ask = impostor.ask(sender.ask("layout"))
        for rank in (0, 1):
            impostor.put(f"{ask['request']}/0/{rank}", address)
        impostor.put(sender.name, ask)
        answer = impostor.answered(ask)
        confirm = {"request": ask["request"], "echo": answer["nonce"] + 1, "ticket": ""}
        impostor.put(ask["request"], confirm, ":confirm")
    scene.right(scene.worker().load(20), "peer")
    assert sender.ask("served") == 1
    assert sender.survey().threads == before.threads


CONFIRMATIONS = [
    b"",
    b"{}",
    {"request": "0" * 32, "echo": 1, "ticket": ""},
    {"ticket": "x" * 5000},
]


def test_confirmations(scene: Scene, sender: Worker, impostor: Impostor):
    before = sender.survey()
    for confirm in CONFIRMATIONS:
        ask = impostor.ask(sender.ask("layout"))
        impostor.put(sender.name, ask)
        assert impostor.answered(ask)["status"] == "ready"
        impostor.put(ask["request"], confirm, ":confirm")
    scene.right(scene.worker().load(20), "peer")
    assert sender.ask("served") == 1
    assert sender.survey().threads == before.threads


def test_replayed_request(scene: Scene, sender: Worker, impostor: Impostor):
    """Each answer has a nonce of its own: what confirmed one does not confirm the next."""
    ask = impostor.ask(sender.ask("layout"))
    impostor.put(sender.name, ask)
    first = impostor.answered(ask)
    impostor.put(sender.name, ask)
    second = impostor.answered(ask)
    assert first["nonce"] != second["nonce"]
    confirm = {"request": ask["request"], "echo": first["nonce"] + 1, "ticket": ""}
    impostor.put(ask["request"], confirm, ":confirm")
    scene.right(scene.worker().load(20), "peer")
    assert sender.ask("served") == 1


def test_request_for_other_weights(scene: Scene, sender: Worker, impostor: Impostor):
    ask = impostor.ask(sender.ask("layout"), identity="1" * 64)
    impostor.put(sender.name, ask)
    assert impostor.answered(ask)["status"] == "no"


def test_silent_after_the_answer(scene: Scene, sender: Worker, impostor: Impostor):
    sender.ask("close")
    impostor.announce()
    receiver = scene.worker()
    before = receiver.survey()
    receiver.begin(GIVEN)
    ask = impostor.asked()
    impostor.put(ask["request"], impostor.answer(ask))
    scene.right(receiver.end(), "origin")
    scene.nothing_left(receiver, before)
