"""Wrong bytes: on the origin's disk, in a sender's memory, in the records; and no origin at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.loader.faults.scene import Scene
from tests.loader.faults.worker import REF
from warmcast.infra.servers import seaweed
from warmcast.manifests.deadline import Deadline

GIVEN = 10.0
"""Seconds that a load may take here."""


def _weights(origin: Path) -> Path:
    return max(origin.glob("blobs/sha256/*/*"), key=lambda path: path.stat().st_size)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(20 << 20)
        byte = file.read(1)[0]
        file.seek(20 << 20)
        file.write(bytes([byte ^ 4]))


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(20 << 20)


FAULTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "flipped bit": (_flip, "IntegrityError", f"model.safetensors at byte {16 << 20} "),
    "truncated": (_truncate, "StoreError", "model.safetensors (blob "),
    "missing": (Path.unlink, "NotFound", "blobs/sha256/"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_blob(scene: Scene, fault: str):
    """Without a peer an error that names the place; with one, its right bytes win."""
    damage, error, place = FAULTS[fault]
    blob = _weights(scene.own_origin())
    sender = scene.worker().serve()
    sender.ask("withdraw")
    damage(blob)
    receiver = scene.worker()
    before = receiver.survey()
    assert place in scene.wrong(receiver.load(GIVEN), error)
    scene.registry_clean()
    scene.memory_back(receiver, before)
    sender.name = sender.ask("serve")
    scene.right(receiver.load(GIVEN), "peer")
    scene.registry_clean([sender])
    scene.nothing_left(receiver, before)


RECORDS = {
    "flipped bit": lambda data: bytes([*data[:40], data[40] ^ 1, *data[41:]]),
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "garbage": lambda data: bytes(range(256)),
    # Not one digit, which may be one of the time's: of a ref that is as good as before.
    "another": lambda data: re.sub(rb"[0-9a-f]{64}", b"0" * 63 + b"1", data, count=1),
}


@pytest.mark.parametrize("kind", ["manifests", "refs"])
def test_record(scene: Scene, kind: str):
    sender, receiver = scene.worker().serve(), scene.worker()
    before = receiver.survey()
    path = next(path for path in (scene.own_origin() / kind).rglob("*.json"))
    whole = path.read_bytes()
    receiver = scene.worker()
    before = receiver.survey()
    for damage in RECORDS.values():
        path.write_bytes(damage(whole))
        outcome = receiver.load(GIVEN)
        message = scene.wrong(outcome, "InvalidManifest", "IntegrityError", "NotFound")
        assert kind.removesuffix("s") in message
    path.unlink()
    scene.wrong(receiver.load(GIVEN), "NotFound")
    path.write_bytes(whole)
    scene.right(receiver.load(GIVEN), "peer")
    scene.registry_clean([sender])
    scene.nothing_left(receiver, before)


def test_flipped_bit_in_a_senders_memory(scene: Scene):
    sender, receiver = scene.worker().serve(), scene.worker()
    before = receiver.survey()
    tensor = sender.ask("flip")
    outcome = receiver.load(GIVEN)
    scene.right(outcome, "origin")
    assert f"1 of 6 tensors in 1 layers differ from the truth: {tensor} has CRC32C" in outcome.tree
    scene.nothing_left(receiver, before)


def test_the_sender_with_right_bytes_wins(scene: Scene):
    bad, good, receiver = scene.worker().serve(), scene.worker().serve(), scene.worker()
    bad.ask("flip")
    outcome = receiver.load(GIVEN)
    scene.right(outcome, "peer")
    assert outcome.source == good.name


def test_wrong_everywhere(scene: Scene):
    blob = _weights(scene.own_origin())
    sender, receiver = scene.worker().serve(), scene.worker()
    before = receiver.survey()
    sender.ask("flip")
    _flip(blob)
    scene.wrong(receiver.load(GIVEN), "IntegrityError")
    scene.memory_back(receiver, before)
    scene.registry_clean([sender])
    scene.nothing_left(receiver, before)


def test_truth_of_changed_weights(scene: Scene):
    """A sender of changed weights, and a truth to which nobody can be held, or none at all."""
    scene.own_origin()
    sender, receiver = scene.worker(), scene.worker()
    first = sender.load(GIVEN, REF, True)
    assert first.route == "origin"
    sender.ask("serve")
    good = receiver.load(GIVEN, REF, True)
    assert (good.route, good.weights) == ("peer", first.weights)
    truth = next(path for path in (scene.origin / "truths").rglob("*.json"))
    for garbage in (b"", b"{}", b"\xff\xfe", b'{"identity":"0"}'):
        truth.write_bytes(garbage)
        outcome = receiver.load(GIVEN, REF, True)
        assert (outcome.error, outcome.route) == ("", "origin"), outcome
        assert outcome.weights == first.weights
        assert receiver.ask("serve") == ""
    truth.unlink()
    outcome = receiver.load(GIVEN, REF, True)
    assert (outcome.error, outcome.route, outcome.weights) == ("", "origin", first.weights)
    assert sender.ask("weights") == first.weights


@pytest.mark.parametrize("fault", ["stop", "pause"])
def test_unreachable(scene: Scene, fault: str):
    """The manifest comes from the origin too: a peer alone cannot tell what is right."""
    with seaweed(Deadline.after(60)) as server:
        url = f"{server.make_bucket('faults')}/models"
        scene.upload(url, server.env)
        sender = scene.worker(origin=url, env=server.env).serve()
        receiver = scene.worker(origin=url, env=server.env)
        scene.right(receiver.load(GIVEN), "peer")
        receiver.ask("close")
        before = receiver.survey()
        getattr(server, fault)()
        scene.wrong(receiver.load(2.0), "StoreUnreachable", "DeadlineExceeded")
        assert sender.ask("weights") == scene.weights
        scene.registry_clean([sender])
        scene.nothing_left(receiver, before)
