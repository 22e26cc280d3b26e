"""Who is served together: receivers of one sender's memory gather into parties.

A broadcast costs the sender one copy's time for however many receivers, so whoever comes at about
the same time is served at once. The first one waits ``WINDOW`` for others, and longer for those
that were answered and have not yet confirmed. While a party is served nobody else is: two
broadcasts would share the sender's links, so that the second would end no earlier and the first
later; and those who come meanwhile form the next party, which waits for no window.

There is no thread for this. Each receiver's own transfer thread calls :meth:`Gathering.serve`; the
first in the queue leads its party.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from warmcast.loader.errors import TransferFailed
from warmcast.loader.transports import Transfer
from warmcast.loader.transports.nccl_messages import Ticket
from warmcast.manifests.errors import WarmcastError

WINDOW = 0.05
"""Seconds that the first of a party waits for others. Who is started at the same moment does not
come at the same moment, and a party costs 0.2 s beside its bytes.
"""

COMING = 0.2
"""Seconds that it waits while others have been answered: they allocate memory, and confirm."""

_LOOK = 0.25
"""Seconds between looks at a waiting receiver's signs of life."""


@dataclass(eq=False)
class Member:
    """A receiver, from its confirmation to its end.

    ``over`` when it is not to be served any more: it has everything, unless there is an ``error``.
    ``broken`` counts the parties that broke with it, ``erred`` those in which NCCL failed it.
    """

    transfer: Transfer
    ticket: Ticket
    since: float
    over: bool = False
    error: WarmcastError | None = None
    broken: int = 0
    erred: int = 0

    @cached_property
    def memory(self) -> tuple[tuple[int, int], ...]:
        """What it is to get: (address, bytes) of each region."""
        return tuple((r.data_ptr(), r.numel()) for r in self.transfer.regions)

    def finish(self, error: WarmcastError | None = None) -> None:
        """It has everything, or failed."""
        self.over = True
        self.error = error

    def check(self, doing: str) -> None:
        """Raise what ends this receiver's transfer."""
        self.transfer.deadline.check(doing)
        self.transfer.alive()


Lead = Callable[[Sequence[Member]], None]
"""Serves a party. Who is not over afterwards meets the others again."""


class Gathering:
    """The receivers of one sender."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._changed = threading.Condition()
        self._queue: list[Member] = []
        self._served: Sequence[Member] = ()
        self._busy = False
        self._coming = 0

    @contextmanager
    def coming(self) -> Iterator[Callable[[], None]]:
        """Somebody was answered, and will be served or not; to be called when that is known."""
        known = False

        def arrived() -> None:
            nonlocal known
            with self._changed:
                self._coming -= not known
                known = True
                self._changed.notify_all()

        with self._changed:
            self._coming += 1
        try:
            yield arrived
        finally:
            arrived()

    def serve(self, transfer: Transfer, ticket: Ticket) -> None:
        """Serve a receiver; returns when it has everything, raises what ended it."""
        member = Member(transfer, ticket, time.monotonic())
        with self._changed:
            self._queue.append(member)
            self._changed.notify_all()
        try:
            while party := self._party(member):
                self._serve(party)
        finally:
            with self._changed:
                self._queue.remove(member)
                self._changed.notify_all()
        if member.error is not None:
            raise member.error

    def _party(self, member: Member) -> Sequence[Member]:
        """Wait until there is a party for this member to lead, or it is over."""
        with self._changed:
            while not member.over:
                if member not in self._served:
                    member.check("waiting for other receivers")
                if not self._busy and self._queue[0] is member:
                    self._busy = True
                    try:
                        self._gather(member)
                        self._served = self._compatible(member)
                    except BaseException:
                        self._busy = False
                        raise
                    return self._served
                self._changed.wait(_LOOK)
            return ()

    def _gather(self, first: Member) -> None:
        while (left := self._closes(first) - time.monotonic()) > 0:
            self._changed.wait(min(left, _LOOK))
            first.check("waiting for other receivers")

    def _closes(self, first: Member) -> float:
        return first.since + (COMING if self._coming else WINDOW)

    def _compatible(self, first: Member) -> Sequence[Member]:
        """Those who want the same memory, one a GPU."""
        party: dict[str, Member] = {}
        for member in self._queue:
            if not member.over and member.memory == first.memory:
                party.setdefault(member.ticket.gpu, member)
        return list(party.values())

    def _serve(self, party: Sequence[Member]) -> None:
        ended: WarmcastError = TransferFailed("nccl: the broadcast has ended")
        try:
            self._lead(party)
        except BaseException:
            for member in party:
                if not member.over:
                    member.finish(ended)
            raise
        finally:
            with self._changed:
                self._busy = False
                self._served = ()
                self._changed.notify_all()
