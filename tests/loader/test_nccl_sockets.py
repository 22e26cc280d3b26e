"""Which connections are NCCL's, and that only those are cut."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from warmcast.loader.transports import nccl_sockets


@contextmanager
def listener(*, inherited: bool, family: int = socket.AF_INET) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as door:
        door.set_inheritable(inherited)
        door.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        door.listen()
        yield door


@contextmanager
def connected(door: socket.socket, *, inherited: bool) -> Iterator[tuple[socket.socket, ...]]:
    with ExitStack() as stack:
        there = stack.enter_context(socket.create_connection(door.getsockname()[:2], timeout=10))
        here = stack.enter_context(door.accept()[0])
        here.set_inheritable(inherited)
        here.settimeout(10)
        yield here, there


def test_ports_that_came_meanwhile() -> None:
    with listener(inherited=True) as before:
        known = nccl_sockets.listening()
        assert before.getsockname()[1] in known
        with listener(inherited=True) as mine, listener(inherited=False):
            assert nccl_sockets.listening() - known == {mine.getsockname()[1]}
        assert nccl_sockets.listening() == known


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_only_what_was_accepted_there_is_cut(family: int) -> None:
    with listener(inherited=True, family=family) as mine, listener(inherited=True) as other:
        port = mine.getsockname()[1]
        with (
            connected(mine, inherited=True) as (here, there),
            connected(mine, inherited=False) as (python, its_peer),
            connected(other, inherited=True) as (elsewhere, its_other),
        ):
            assert nccl_sockets.cut([port]) == 1
            assert here.recv(1) == b""
            assert there.recv(1) == b""
            for near, far in ((python, its_peer), (elsewhere, its_other)):
                far.sendall(b"x")
                assert near.recv(1) == b"x"
            # The door is open still, and nothing of ours is.
            with connected(mine, inherited=False):
                assert nccl_sockets.listening() >= {port}


def test_what_is_gone_already() -> None:
    with listener(inherited=True) as mine:
        port = mine.getsockname()[1]
        with connected(mine, inherited=True) as (here, _):
            nccl_sockets.cut([port])
            nccl_sockets.cut([port])  # does no harm
            here.close()
        assert nccl_sockets.cut([port, 1]) == 0
        assert nccl_sockets.cut([]) == 0
