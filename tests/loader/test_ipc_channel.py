"""The channel between two workers of one host: what is said, what is refused, and how it ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from warmcast.loader.errors import TransferFailed, TransportUnusable
from warmcast.loader.transports import Transfer
from warmcast.loader.transports.ipc import Ipc
from warmcast.loader.transports.ipc_channel import (
    Address,
    Channel,
    ChannelClosed,
    Listener,
    Message,
    listening,
)
from warmcast.loader.transports.ipc_memory import Block, Opened, Part
from warmcast.manifests.deadline import Deadline

NOW = Deadline.after(0)


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as listener:
        yield listener


@pytest.fixture
def pair(listener: Listener) -> Iterator[tuple[Channel, Channel]]:
    """A taker's end and a giver's, after the hello."""
    taker = Channel.connect(listener.address, "giver")
    taker.send(Message(kind="hello", token=listener.address.token), deadline=soon())
    accepted = listener.accept("taker", soon())
    assert accepted is not None
    yield taker, accepted[0]
    taker.close()
    accepted[0].close()


def raw(listener: Listener) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(f"\0{listener.address.name}")
    return stranger


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_messages_and_descriptors_arrive(pair: tuple[Channel, Channel]) -> None:
    taker, giver = pair
    read, write = os.pipe()
    part = Part(blocks=(Block(kind="fd", sizes=(4096, 8192)),), extents=((0, 16, 99),), last=True)
    giver.send(Message(kind="part", part=part), [read, write], deadline=soon())
    for end in (read, write):
        os.close(end)
    received = taker.receive(soon())
    assert received is not None
    assert received.message.part == part
    mine = received.fds
    os.write(mine[1], b"x")
    assert os.read(mine[0], 1) == b"x"
    for fd in mine:
        os.close(fd)
    assert taker.receive(NOW) is None


def test_the_hello_carries_an_address(listener: Listener) -> None:
    other = Address(name="warmcast-1", token="t")  # noqa: S106
    taker = Channel.connect(listener.address, "giver")
    token = listener.address.token
    taker.send(Message(kind="hello", token=token, address=other), deadline=soon())
    accepted = listener.accept("taker", soon())
    assert accepted is not None
    assert accepted[1].address == other
    accepted[0].close()
    taker.close()


def test_strangers_are_sent_away(listener: Listener) -> None:
    """One that is silent, those with another token, one that talks nonsense; then the right one."""
    strangers = [raw(listener) for _ in range(4)]
    strangers[1].send(json.dumps({"kind": "hello", "token": "guessed"}).encode())
    strangers[2].send(json.dumps({"kind": "hello", "token": "é"}).encode())
    strangers[3].send(b"\xff\xfe")
    taker = Channel.connect(listener.address, "giver")
    taker.send(Message(kind="hello", token=listener.address.token), deadline=soon())
    accepted = listener.accept("taker", soon())
    assert accepted is not None
    accepted[0].send(Message(kind="begin"), deadline=soon())
    received = taker.receive(soon())
    assert received is not None
    assert received.message.kind == "begin"
    for stranger in strangers:
        assert stranger.recv(10) == b""
        stranger.close()
    accepted[0].close()
    taker.close()


def test_nobody_listens() -> None:
    with pytest.raises(OSError, match="refused"):
        Channel.connect(Address(name="warmcast-nobody", token="t"), "giver")  # noqa: S106


HOSTILE = {
    "nothing that is JSON": b"{",
    "another kind": b'{"kind": "please"}',
    "an unknown field": b'{"kind": "have", "path": "/etc/passwd"}',
    "a negative length": b'{"kind": "have", "nbytes": -1}',
    "a length that is no number": b'{"kind": "have", "nbytes": "7"}',
    "a negative extent": b'{"kind": "part", "part": {"extents": [[0, -1, 5]]}}',
    "an empty extent": b'{"kind": "part", "part": {"extents": [[0, 0, 0]]}}',
    "a handle that is none": b'{"kind": "part", "part": {"blocks": '
    b'[{"kind": "ipc", "sizes": [1], "handle": "zz"}]}}',
    "an allocation without its handle": b'{"kind": "part", "part": {"blocks": '
    b'[{"kind": "ipc", "sizes": [1]}]}}',
    "no pieces": b'{"kind": "part", "part": {"blocks": [{"kind": "fd", "sizes": []}]}}',
    "pieces longer than any memory": b'{"kind": "part", "part": {"blocks": [{"kind": "fd", '
    b'"sizes": [4611686018427387903, 4611686018427387903]}]}}',
    "a block of no kind": b'{"kind": "part", "part": {"blocks": [{"kind": "x", "sizes": [1]}]}}',
    "deep nesting": b"[" * 5000,
    "more than fits": b'{"kind": "hello", "token": "' + b"x" * 140_000 + b'"}',
}


@pytest.mark.parametrize("case", HOSTILE)
def test_garbage_is_an_error_and_keeps_no_descriptor(listener: Listener, case: str) -> None:
    stranger = raw(listener)
    stranger.send(json.dumps({"kind": "hello", "token": listener.address.token}).encode())
    accepted = listener.accept("taker", soon())
    assert accepted is not None
    before = open_files()
    read, write = os.pipe()
    socket.send_fds(stranger, [HOSTILE[case]], [read, write])
    os.close(read)
    os.close(write)
    with pytest.raises(TransferFailed) as failure:
        accepted[0].receive(soon())
    assert "\n" not in str(failure.value)
    assert open_files() == before
    accepted[0].close()
    stranger.close()


def test_pieces_without_their_descriptors() -> None:
    """More pieces than descriptors came: none is opened, and those that came are closed."""
    part = Part(blocks=(Block(kind="fd", sizes=(4096, 4096)),), last=True)
    before = open_files()
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(TransferFailed, match="expected 2 file descriptors, found 1"):
        Opened(0).add(part, [read])
    assert open_files() == before


def test_a_process_that_is_killed_is_noticed(listener: Listener) -> None:
    """Without a word: the kernel closes its end."""
    address = listener.address
    code = (
        "import socket, sys, json, time\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.connect(chr(0) + sys.argv[1])\n"
        "s.send(json.dumps({'kind': 'hello', 'token': sys.argv[2]}).encode())\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, address.name, address.token])
    try:
        accepted = listener.accept("taker", soon())
        assert accepted is not None
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ChannelClosed):
        accepted[0].receive(soon())
    accepted[0].close()


def test_where_the_socket_is_not_reached_ipc_is_unusable(listener: Listener) -> None:
    """So the receiver asks the same sender again, for another transport; and nothing is left."""
    listener.end()
    listener.close()
    transfer = Transfer("r", [], torch.device("cpu"), None, "", soon(), lambda: None)
    before = open_files()
    for offer in (listener.address.model_dump_json(), "{", "{}", '{"name": "", "token": ""}'):
        with pytest.raises(TransportUnusable), Ipc().receiving(transfer, offer):
            pass
    assert open_files() == before


def test_an_end_is_noticed_at_once(pair: tuple[Channel, Channel]) -> None:
    taker, giver = pair
    taker.close()
    with pytest.raises(ChannelClosed):
        giver.receive(soon())
    with pytest.raises(ChannelClosed):
        giver.send(Message(kind="begin"), deadline=soon())


def test_who_does_not_read_is_not_waited_for(pair: tuple[Channel, Channel]) -> None:
    _, giver = pair
    with pytest.raises(TransferFailed, match="does not read"):
        for _ in range(100_000):
            giver.send(Message(kind="have", nbytes=1), deadline=NOW)


@pytest.mark.parametrize("what", ["receive", "accept"])
def test_waiting_ends_when_it_is_told_to(
    listener: Listener, pair: tuple[Channel, Channel], what: str
) -> None:
    ended: list[object] = []

    def wait() -> None:
        try:
            ended.append(
                pair[0].receive(soon()) if what == "receive" else listener.accept("x", soon())
            )
        except ChannelClosed as cause:
            ended.append(cause)

    thread = threading.Thread(target=wait)
    thread.start()
    (pair[0] if what == "receive" else listener).end()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(ended[0], ChannelClosed) if what == "receive" else ended == [None]
