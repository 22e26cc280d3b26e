"""The receiver's side of a broadcast: join a party, receive, and if it breaks join the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from warmcast.loader.errors import PartyBroken, RegistryUnavailable, TransferFailed
from warmcast.loader.registry import BEAT, CALL, mailbox
from warmcast.loader.transports import Span, Transfer
from warmcast.loader.transports.nccl_broadcast import Payload
from warmcast.loader.transports.nccl_communicator import Communicator
from warmcast.loader.transports.nccl_messages import (
    Inbox,
    Note,
    Order,
    orders,
    tell,
    tell_if_possible,
)
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError, one_line


class Receiver:
    """One transfer's receiver."""

    def __init__(self, transfer: Transfer, payload: Payload) -> None:
        self._transfer = transfer
        self._payload = payload
        self._orders = Inbox(transfer.registry, orders(transfer.request), Order)
        self._away = False

    def run(self) -> Span:
        """Receive; when bytes moved.

        Raises :class:`TransferFailed`, and :class:`PartyBroken` where the sender is not to blame.
        """
        self._payload.prepare()
        while True:
            span = self._attend(self._next_begin())
            if span is not None:
                return span

    def _next_begin(self) -> Order:
        doing = "waiting for the broadcast to begin"
        while True:
            self._transfer.deadline.check(doing)
            self._transfer.alive()
            try:
                order = self._orders.wait(self._transfer.deadline.within(BEAT))
            except RegistryUnavailable as cause:
                raise TransferFailed(f"nccl: {cause}") from cause
            if order is None or order.kind == "over":  # of a party that this receiver has left
                continue
            if order.kind == "failed":
                raise _sent_away(order)
            return order

    def _attend(self, begin: Order) -> Span | None:
        """Receive in one party; None if it broke and the sender forms another."""
        comm = Communicator(self._transfer.device, self._checking(begin.party))
        try:
            unique = bytes.fromhex(begin.unique)
            comm.create(unique, begin.rank, begin.size, begin.max_ctas)
            self._tell(begin, "here")
            comm.connect()
            span = self._payload.move(comm, sending=False, packed=begin.packed)
        except BaseException as cause:
            left = comm.abort(self._payload.memory)
            if left and self._asked_again(begin, cause):
                return None
            self._tell(begin, "gone", one_line(cause))
            if isinstance(cause, RuntimeError):
                raise TransferFailed("nccl", found=one_line(cause)) from cause
            raise
        self._tell(begin, "done")
        comm.close()
        return span

    def _asked_again(self, begin: Order, cause: BaseException) -> bool:
        """Whether it was the party that failed, and the sender can be told that this receiver is
        ready for another.
        """
        if self._away or not isinstance(cause, PartyBroken | TransferFailed):
            return False
        erred = not isinstance(cause, PartyBroken)
        note = Note(kind="again", rank=begin.rank, erred=erred, reason=one_line(cause))
        try:
            self._transfer.deadline.check("receiving weights")
            self._transfer.alive()
            tell(self._transfer.registry, mailbox(begin.party), note, Deadline.after(CALL))
        except WarmcastError:
            return False
        return True

    def _tell(self, begin: Order, kind: Literal["here", "done", "gone"], reason: str = "") -> None:
        note = Note(kind=kind, rank=begin.rank, reason=reason)
        tell_if_possible(self._transfer.registry, mailbox(begin.party), note)

    def _checking(self, party: str) -> Callable[[str], None]:
        """What ends the waiting for a communicator of a party."""

        def check(doing: str) -> None:
            self._transfer.deadline.check(doing)
            self._transfer.alive()
            order = self._orders.look()
            if order is not None and order.kind == "failed":
                self._away = True
                raise _sent_away(order)
            if order is not None and order.kind == "over" and order.party == party:
                raise PartyBroken("nccl: another receiver left the broadcast", found=order.reason)

        return check


def _sent_away(order: Order) -> WarmcastError:
    kind = TransferFailed if order.blame else PartyBroken
    return kind("nccl: sent away by the sender", found=order.reason)
