"""Mailboxes beside a broadcast: looked into without waiting."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from warmcast.loader.registry import Registry, mailbox
from warmcast.loader.transports import nccl_messages
from warmcast.loader.transports.nccl_messages import Inbox, Note, tell
from warmcast.manifests.deadline import Deadline


def soon() -> Deadline:
    return Deadline.after(30)


@pytest.fixture
def registry(valkey_url: str) -> Iterator[Registry]:
    registry = Registry(valkey_url)
    yield registry
    registry.close()


@pytest.fixture
def box() -> str:
    return mailbox(secrets.token_hex(16))


@pytest.fixture
def inbox(registry: Registry, box: str, monkeypatch: pytest.MonkeyPatch) -> Inbox[Note]:
    monkeypatch.setattr(nccl_messages, "_EVERY", 0.0)
    return Inbox(registry, box, Note)


def commands(registry: Registry) -> dict[str, int]:
    stats = registry._call(lambda client: client.info("commandstats"), soon())
    return {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}


def test_a_look_does_not_wait(registry: Registry, box: str, inbox: Inbox[Note]) -> None:
    before = commands(registry)
    assert inbox.look() is None
    tell(registry, box, Note(kind="here", rank=3), soon())
    tell(registry, box, Note(kind="done", rank=3), soon())
    found = [inbox.look() for _ in range(3)]
    assert [note and note.kind for note in found] == ["here", "done", None]
    assert commands(registry).get("blpop", 0) == before.get("blpop", 0)


def test_what_is_no_note_is_passed_over(registry: Registry, box: str, inbox: Inbox[Note]) -> None:
    registry.push(box, b"{}", soon())
    registry.push(box, b"\xff", soon())
    tell(registry, box, Note(kind="here", rank=1), soon())
    note = inbox.look()
    assert note is not None
    assert note.rank == 1


def test_looks_are_apart(
    registry: Registry, box: str, inbox: Inbox[Note], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inbox.look() is None
    monkeypatch.setattr(nccl_messages, "_EVERY", 1e9)
    assert inbox.look() is None  # the last for a long time
    tell(registry, box, Note(kind="here", rank=1), soon())
    assert inbox.look() is None
    assert inbox.wait(soon()) is not None


def test_a_registry_that_is_gone_ends_nothing(box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_messages, "_EVERY", 0.0)
    registry = Registry("redis://127.0.0.1:1")  # a port at which nobody listens
    inbox = Inbox(registry, box, Note)
    assert inbox.look() is None
    assert inbox.look() is None
    registry.close()
