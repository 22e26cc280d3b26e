"""Being a sender: a daemon thread answers receivers while the worker does its own work.

The thread takes requests from its mailbox; each is then served in a thread of its own, of which
there is a bounded number: a receiver beyond it is told "busy" at once.
A receiver that breaks costs the handshake's second, or a transfer thread until its deadline; never
the worker. Nothing here touches the model: what is served are the tensors as they stood when
serving began.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from warmcast.loader import goodbye, handshake
from warmcast.loader.address import address_for
from warmcast.loader.containers import flat_bytes
from warmcast.loader.errors import RegistryUnavailable, TransferFailed
from warmcast.loader.handshake import Ask, Lifeline
from warmcast.loader.heartbeat import Heartbeat
from warmcast.loader.ready import Served
from warmcast.loader.registry import BEAT, CALL, Presence, Registry
from warmcast.loader.transports import Endpoint, Transfer, Transport, choose
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, WarmcastError

log = logging.getLogger("warmcast")

PARTING = 10.0
"""Seconds that a sender which is being closed gives the transfers under way."""

MAX_TRANSFER = 600.0
"""Seconds that a sender gives one transfer at most, whatever the receiver asks for."""


class Sender:
    """Serves one offer until it is closed."""

    def __init__(
        self,
        served: Served,
        device: torch.device,
        registry: Registry,
        endpoint: Endpoint,
        transports: Sequence[Transport],
        heartbeat: Heartbeat,
        *,
        max_receivers: int,
    ) -> None:
        self._offer = served
        self._device = device
        self._registry = registry
        self._endpoint = endpoint
        self._transports = tuple(transports)
        self._heartbeat = heartbeat
        self._room = threading.Semaphore(max_receivers)
        self._max = max_receivers
        self._closed = threading.Event()
        self._ending = threading.Event()
        self._announcing = threading.Lock()
        self._transfers: set[threading.Thread] = set()
        self._served = 0
        # A new name at each start: a request to an earlier generation finds nobody.
        self.name = f"{endpoint.worker}-{secrets.token_hex(4)}"
        self._thread = threading.Thread(target=self._serve, name="warmcast-sender", daemon=True)

    @property
    def served(self) -> int:
        """Receivers whose transfers this sender has completed."""
        return self._served

    def start(self, deadline: Deadline) -> None:
        """Announce the sender and answer from now on, or from when the registry is back."""
        try:
            self._announce(deadline)
        except (RegistryUnavailable, DeadlineExceeded) as cause:
            log.warning("sender %s is announced when the registry answers: %s", self.name, cause)
        self._heartbeat.keep(self.name, self._announce)
        self._thread.start()
        # Not by way of the loader, which whoever made it may have let go of.
        goodbye.on_exit(self)
        goodbye.ended_at_exit(self)

    def close(self) -> None:
        """Take the presence back at once, give transfers under way ``PARTING`` seconds, and end."""
        self.withdraw(Deadline.after(CALL))
        self._heartbeat.drop(self.name)
        if self._thread.is_alive():
            self._thread.join()
        self.join(Deadline.after(PARTING))
        self.stop()
        for thread in list(self._transfers):
            thread.join()

    def stop(self) -> None:
        """Answer nobody any more, and have transfers under way given up."""
        self._closed.set()
        self._ending.set()

    def join(self, deadline: Deadline) -> None:
        """Wait until no transfer is under way, or time is over."""
        for thread in list(self._transfers):
            if thread.ident is not None:  # it has begun
                thread.join(deadline.remaining())

    def leave(self) -> None:
        """Take the presence back at once; the process is about to end."""
        self.withdraw(Deadline.after(CALL))

    def withdraw(self, deadline: Deadline) -> None:
        """Take the presence back, so that nobody new asks; a registry that is gone has none."""
        self._closed.set()
        with self._announcing:
            try:
                self._registry.withdraw(self._presence(), deadline)
            except WarmcastError as cause:
                log.warning("presence of %s left to expire: %s", self.name, cause)

    def _presence(self) -> Presence:
        return Presence(
            sender=self.name,
            identity=self._offer.identity,
            host=self._endpoint.host,
            device=self._endpoint.device,
            transports=self._endpoint.transports,
            active=len(self._transfers),
        )

    def _announce(self, deadline: Deadline) -> bool:
        # The lock keeps a beat that is under way from undoing a withdrawal.
        with self._announcing:
            if self._closed.is_set():
                return False
            self._registry.announce(self._presence(), deadline)
            return True

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                request = handshake.next_ask(self._registry, self.name, Deadline.after(BEAT))
                if request is not None:
                    self._answer(request)
            except RegistryUnavailable as cause:
                log.warning("sender %s: %s", self.name, cause)
                self._closed.wait(BEAT)
            except WarmcastError as cause:
                log.warning("sender %s: %s", self.name, cause)

    def _answer(self, request: Ask) -> None:
        deadline = Deadline.after(handshake.SENDER_PATIENCE + CALL)
        whole = request.arena and bool(self._offer.segments)
        regions = _regions(self._offer, whole=whole)
        transport, reason = choose(self._transports, self._endpoint, request.endpoint, regions)
        if (request.identity, request.layout) != (self._offer.identity, self._offer.layout):
            transport, reason = None, "this sender has other weights, or other tensors of them"
        if transport is None:
            handshake.turn_away(self._registry, request, "no", reason, deadline)
            return
        if not self._room.acquire(blocking=False):
            reason = f"{self._max} receivers are being served"
            handshake.turn_away(self._registry, request, "busy", reason, deadline)
            return
        # The handshake ends in the transfer's own thread: a receiver confirms when its whole group
        # has met senders, and one whose group waits for another would keep that one waiting.
        lifeline = Lifeline(self._registry, request.request, "sender", "receiver")
        transfer = Transfer(
            request.request,
            regions,
            self._device,
            self._registry,
            address_for(self._registry.url),
            Deadline.after(min(request.seconds, MAX_TRANSFER)),
            partial(self._going_on, lifeline),
        )
        accept = partial(
            handshake.accept,
            self._registry,
            request,
            self._endpoint,
            deadline,
            transport=transport.name,
            reason=reason,
            whole=whole,
        )
        thread = threading.Thread(
            target=self._transfer,
            args=(request, transport, transfer, lifeline, accept),
            name="warmcast-transfer",
            daemon=True,
        )
        self._transfers.add(thread)
        thread.start()

    def _transfer(
        self,
        request: Ask,
        transport: Transport,
        transfer: Transfer,
        lifeline: Lifeline,
        accept: Callable[..., str],
    ) -> None:
        try:
            with transport.sending(transfer) as sending:
                ticket = accept(offer=sending.offer)
                with lifeline.kept():
                    sending.run(ticket)
            self._served += 1
            log.info("sent %d bytes to %s", transfer.nbytes, request.endpoint.worker)
        except WarmcastError as cause:
            log.warning("transfer to %s ended: %s", request.endpoint.worker, cause)
        finally:
            self._room.release()
            self._transfers.discard(threading.current_thread())
            self._tell_waiters()

    def _going_on(self, lifeline: Lifeline) -> None:
        if self._ending.is_set():
            raise TransferFailed("sender", expected="to go on", found="it is being closed")
        lifeline.check()

    def _tell_waiters(self) -> None:
        """There is room again, for receivers that were told to come back."""
        try:
            self._registry.wake(self._offer.identity, "room", Deadline.after(CALL))
        except WarmcastError as cause:
            log.warning("nobody told of the room that is free: %s", cause)


def _regions(served: Served, *, whole: bool) -> list[Tensor]:
    """The memory as a transfer sees it, in the receiver's order."""
    if whole:
        return [segment for segment in served.segments if segment.numel()]
    return [flat_bytes(tensor) for tensor in served.tensors if tensor.numel()]
