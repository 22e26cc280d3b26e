"""The sender's side of ``ipc``: hands out its memory, and tells each receiver whom to take from."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from warmcast.loader.cuda_context import current
from warmcast.loader.errors import TransferFailed
from warmcast.loader.transports import Transfer, ipc_memory
from warmcast.loader.transports.ipc_channel import (
    PATIENCE,
    STALL,
    Address,
    Channel,
    Listener,
    Message,
    close_fds,
)
from warmcast.loader.transports.ipc_memory import Part

_LATEST = 0.5
"""The part of the bytes after which a receiver takes nobody behind it: it would wait for longer
than both lose by sharing the sender's link."""


@dataclass(slots=True)
class _Link:
    """One receiver in a chain, from the sender's side: where it gives, and how much it has."""

    address: Address | None
    nbytes: int
    have: int = 0


class Chain:
    """Who comes after whom; one a sender."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: _Link | None = None

    @contextmanager
    def joined(self, link: _Link) -> Iterator[Address | None]:
        """Join; the address of the one before, or None for who takes from the sender."""
        with self._lock:
            before = self._last
            if before is not None and (
                before.nbytes != link.nbytes or before.have > _LATEST * before.nbytes
            ):
                before = None
            self._last = link
        try:
            yield before.address if before is not None else None
        finally:
            with self._lock:
                if self._last is link:
                    self._last = None


class Giving:
    """The sender's side of one transfer: answers what the receiver says, until it is done."""

    def __init__(self, transfer: Transfer, chain: Chain, listener: Listener) -> None:
        self._transfer = transfer
        self._chain = chain
        self._listener = listener

    def run(self, ticket: str) -> None:
        """Serve one receiver."""
        transfer = self._transfer
        channel, hello = self._accepted()
        link = _Link(hello.address, transfer.nbytes)
        try:
            with self._chain.joined(link) as before:
                begin = Message(kind="begin", address=before)
                channel.send(begin, deadline=transfer.deadline.within(PATIENCE))
                while (message := self._next(channel)).kind != "done":
                    if message.kind == "want":
                        give(transfer, channel)
                    elif message.kind == "have":
                        link.have = message.nbytes
        finally:
            channel.close()

    def _accepted(self) -> tuple[Channel, Message]:
        deadline = self._transfer.deadline.within(PATIENCE)
        while not deadline.expired:
            self._transfer.alive()
            taken = self._listener.accept("ipc: receiver", deadline.within(STALL))
            if taken is not None:
                return taken
        raise TransferFailed("ipc", expected="the receiver to connect", found="it did not")

    def _next(self, channel: Channel) -> Message:
        while (received := channel.receive(self._transfer.deadline.within(STALL))) is None:
            self._transfer.deadline.check("sending weights")
            self._transfer.alive()
        close_fds(received.fds)
        return received.message


def give(transfer: Transfer, channel: Channel, ready: Sequence[Part] | None = None) -> None:
    """Hand out the memory: as it was described before, or described now."""
    with ExitStack() as stack:
        parts: Iterable[tuple[Part, list[int]]] = [(part, []) for part in ready or ()]
        if ready is None:
            stack.enter_context(current(transfer.device))
            parts = ipc_memory.export(transfer.regions)
        for part, fds in parts:
            try:
                message = Message(kind="part", part=part)
                channel.send(message, fds, deadline=transfer.deadline.within(PATIENCE))
            finally:
                close_fds(fds)
