"""A receiver that passes on what it has to the next in the chain, while it still receives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from warmcast.loader.errors import TransferFailed
from warmcast.loader.transports import Transfer, ipc_memory
from warmcast.loader.transports.ipc_channel import (
    Address,
    Channel,
    Listener,
    Message,
    close_fds,
)
from warmcast.loader.transports.ipc_giving import give
from warmcast.manifests.deadline import Deadline

log = logging.getLogger("warmcast")


class Relay:
    """A receiver's own door: gives what it has to the next in the chain, from a thread."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        # Now, for the driver has one thing at a time done: while this worker opens another's
        # memory, which takes milliseconds, the next in the chain would wait for its description.
        self._parts = ipc_memory.described(transfer.regions)
        self._listener = Listener()
        self._lock = threading.Lock()
        self._next: Channel | None = None
        self._telling = False
        self._have = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="warmcast-relay", daemon=True)

    @property
    def address(self) -> Address:
        """Where the next in the chain connects."""
        return self._listener.address

    @contextmanager
    def running(self) -> Iterator[Relay]:
        """Serve while the context is open."""
        self._thread.start()
        try:
            yield self
        finally:
            self._listener.end()
            with self._lock:
                if self._next is not None:
                    self._next.end()
            self._thread.join()
            self._listener.close()

    def advance(self, have: int) -> None:
        """The first ``have`` bytes are there now."""
        with self._lock:
            self._have = have
            self._tell()

    def finish(self, seconds: float) -> None:
        """Wait for the next in the chain, which is as far behind as a copy takes.

        ``seconds``: how long it may take at most. It can have the rest from the sender.
        """
        self._listener.end()  # nobody new
        with self._lock:
            waited = self._next is not None
        if waited:
            self._over.wait(min(seconds, self._transfer.deadline.remaining()))

    def _serve(self) -> None:
        taken = self._listener.accept("ipc: next in the chain", self._transfer.deadline)
        if taken is None:
            return
        channel, _ = taken
        with self._lock:
            self._next = channel
        try:
            while (message := self._message(channel)).kind != "done":
                if message.kind == "want":
                    give(self._transfer, channel, self._parts)
                    with self._lock:
                        self._telling = True
                        self._tell()
        except TransferFailed as cause:
            log.info("the next in the chain goes on without this worker: %s", cause)
        finally:
            with self._lock:
                self._next = None
                channel.close()
            self._over.set()

    def _message(self, channel: Channel) -> Message:
        received = channel.receive(self._transfer.deadline)
        if received is None:
            raise TransferFailed("ipc", expected="the next in the chain in time", found="nothing")
        close_fds(received.fds)
        return received.message

    def _tell(self) -> None:
        if self._next is None or not self._telling:
            return
        message = Message(kind="have", nbytes=self._have)
        # One that does not read is not waited for: the next message says it again.
        with suppress(TransferFailed):
            self._next.send(message, deadline=Deadline.after(0))
