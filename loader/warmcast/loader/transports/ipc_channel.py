"""What two workers of one host say to each other while memory is pulled between them.

A channel is a Unix socket of the abstract namespace: datagrams in order (``SOCK_SEQPACKET``), which
may carry file descriptors, and whose end is noticed at once when a process dies. Names are random,
but every user of the host can list them, so who connects has to show a token.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from warmcast.loader.errors import TransferFailed
from warmcast.loader.transports.ipc_memory import MAX_FDS, Part
from warmcast.manifests.canonical import parse_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidData
from warmcast.manifests.manifest import Record, parse_record

STALL = 0.25
"""Seconds after which a neighbour without progress is passed by, or one behind is not waited for
any longer."""

PATIENCE = 10.0
"""Seconds that the other side has for one message that is due."""

_LONGEST = 1 << 17
"""Bytes of the longest message; what a socket's buffer holds of one."""

_HELLO = 1.0
"""Seconds that who connects has to show the token."""

Token = Annotated[str, StringConstraints(max_length=256)]


class Address(Record):
    """Where somebody gives memory: the socket's name, and the token to show there."""

    name: Token
    token: Token


class Message(Record):
    """One message. A giver is whoever's memory is read, a taker whoever reads it.

    ===== ================ =======================================================================
    hello taker to giver   the ``token``; ``address`` is where the taker itself gives
    begin giver to taker   ``address`` is who to take from, None for the giver itself
    want  taker to giver   the giver's memory is needed now
    part  giver to taker   the next ``part`` of the memory, with its file descriptors
    have  both             the first ``nbytes`` bytes of the regions are there
    done  taker to giver   the memory is needed no more
    ===== ================ =======================================================================
    """

    kind: Literal["hello", "begin", "want", "part", "have", "done"]
    token: Token = ""
    address: Address | None = None
    nbytes: Annotated[int, Field(ge=0, strict=True)] = 0
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """A message, and the file descriptors that came with it, which are the receiver's to close."""

    message: Message
    fds: tuple[int, ...]


class ChannelClosed(TransferFailed):
    """The other side has gone: its process ended, or it gave up."""


class Channel:
    """One connection. Sending and receiving may go on in two threads."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._peer = peer

    @classmethod
    def connect(cls, address: Address, peer: str) -> Channel:
        """Connect to a giver; raises OSError where nobody listens in this network namespace."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(f"\0{address.name}")
        except BaseException:
            connection.close()
            raise
        return cls(connection, peer)

    def send(self, message: Message, fds: Sequence[int] = (), *, deadline: Deadline) -> None:
        """Send a message. Raises :class:`ChannelClosed`, :class:`TransferFailed`."""
        data = message.model_dump_json(exclude_defaults=True).encode()
        while True:
            try:
                socket.send_fds(self._socket, [data], list(fds))
                return
            except BlockingIOError:
                if not _ready(self._socket, select.POLLOUT, deadline):
                    raise TransferFailed(
                        self._peer, expected=f"to take {message.kind!r}", found="it does not read"
                    ) from None
            except OSError as cause:
                raise self._closed(cause) from cause

    def receive(self, deadline: Deadline) -> Received | None:
        """The next message, or None if none came in time. Raises :class:`ChannelClosed`."""
        while True:
            try:
                data, fds, flags, _ = socket.recv_fds(self._socket, _LONGEST, MAX_FDS)
                break
            except BlockingIOError:
                if not _ready(self._socket, select.POLLIN, deadline):
                    return None
            except OSError as cause:
                raise self._closed(cause) from cause
        try:
            return Received(self._parse(data, flags), tuple(fds))
        except BaseException:
            close_fds(fds)
            raise

    def end(self) -> None:
        """End the conversation; a thread that waits in :meth:`receive` is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, which no other thread may use any more."""
        self._socket.close()

    def _parse(self, data: bytes, flags: int) -> Message:
        if not data:
            raise self._closed(None)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise TransferFailed(self._peer, expected="a message in one piece", found="a part")
        try:
            return parse_record(Message, parse_json(data, "message", InvalidData), "message")
        except InvalidData as cause:
            raise TransferFailed(f"{self._peer}: {cause}") from cause

    def _closed(self, cause: OSError | None) -> ChannelClosed:
        found = os.strerror(cause.errno or 0) if cause is not None else "it has gone"
        return ChannelClosed(self._peer, expected="to go on", found=found)


def _ready(waited: socket.socket, event: int, deadline: Deadline) -> bool:
    """Wait until a socket can be read or written; False if that did not come in time.

    Not by the socket's own timeout, which two threads would set for each other.
    """
    left = min(deadline.remaining(), 3600.0)
    if left <= 0:
        return False
    poll = select.poll()
    try:
        poll.register(waited, event)
    except ValueError:  # closed
        return True
    return bool(poll.poll(max(left * 1000, 0.1)))


class Listener:
    """A giver's door, at an address of its own."""

    def __init__(self) -> None:
        self.address = Address(name=f"warmcast-{secrets.token_hex(8)}", token=secrets.token_hex(16))
        self._ended = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.bind(f"\0{self.address.name}")
            self._socket.listen(4)
        except BaseException:
            self._socket.close()
            raise

    def accept(self, peer: str, deadline: Deadline) -> tuple[Channel, Message] | None:
        """The next taker that shows the token, and its hello.

        None if none came in time, or the listener was ended. Whoever shows another token, or
        nothing within a second, is sent away.
        """
        while not (self._ended or deadline.expired):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                _ready(self._socket, select.POLLIN, deadline)
                continue
            except OSError:
                return None
            channel = Channel(connection, peer)
            with contextlib.suppress(TransferFailed):
                received = channel.receive(deadline.within(_HELLO))
                if received is not None and self._right(received):
                    return channel, received.message
            channel.close()
        return None

    def end(self) -> None:
        """Take nobody more; a thread that waits in :meth:`accept` is woken."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, which no other thread may use any more."""
        self._socket.close()

    def _right(self, received: Received) -> bool:
        close_fds(received.fds)
        message = received.message
        # Bytes: of strings it compares ASCII alone.
        shown, right = message.token.encode(), self.address.token.encode()
        return message.kind == "hello" and secrets.compare_digest(shown, right)


@contextmanager
def listening() -> Iterator[Listener]:
    """A listener that is closed with the context."""
    listener = Listener()
    try:
        yield listener
    finally:
        listener.close()


def close_fds(fds: Sequence[int]) -> None:
    """Close descriptors that came with a message."""
    for fd in fds:
        os.close(fd)
