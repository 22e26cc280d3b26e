"""The sender's side of a broadcast: one party, from *begin* to the last receiver's *done*.

The thread that leads watches over all receivers of the party. Where one fails, by its signs of
life, its deadline or its own word, the party breaks: the others are told at once, for their kernels
would wait for the lost one as long as they may. The sender leaves the communicator, calls the roll,
and those who answer are served again, by a new communicator without the lost.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from warmcast.loader.errors import (
    PartyBroken,
    RegistryUnavailable,
    TransferFailed,
    without_frames,
)
from warmcast.loader.registry import CALL, mailbox
from warmcast.loader.transports import nccl_library as nccl
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
from warmcast.loader.transports.nccl_party import Member
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError, one_line

log = logging.getLogger("warmcast")

_JOIN = 3.0
"""Seconds that receivers have to begin to join."""

_ROLL_CALL = 10.0
"""Seconds that receivers have to leave a broken party: more than an abort may take."""

_PATIENCE = 0.25
"""Seconds of a wait for notes, between looks at signs of life."""

_ERRORS = 2
"""Errors of NCCL at a receiver, before it is sent away: it may be what breaks the parties."""

_PARTIES = 3
"""Parties that may break with a receiver in them, before it is sent away."""


def lead(party: Sequence[Member], max_ctas: int | None) -> None:
    """Serve a party. Who is not over afterwards is to be served again; see :class:`Member`."""
    _Party(party, max_ctas).run()


class _Party:
    """Receivers that are served by one communicator.

    ``_open`` has those, by rank, who are neither done nor lost nor back for the next party.
    """

    def __init__(self, members: Sequence[Member], max_ctas: int | None) -> None:
        transfer = members[0].transfer
        bounds = [max_ctas, *(member.ticket.max_ctas for member in members)]
        self._ctas = min((bound for bound in bounds if bound is not None), default=None)
        self._staging = all(member.ticket.staging for member in members)
        self._size = 1 + len(members)
        self._open = dict(enumerate(members, 1))
        self._here: set[int] = set()  # ranks that have begun to join
        self._left = False  # whether a receiver has left the communicator
        self._lost: WarmcastError | None = None
        self._name = secrets.token_hex(16)
        self._registry = transfer.registry
        self._notes = Inbox(self._registry, mailbox(self._name), Note)
        self._regions = transfer.regions
        self._device = transfer.device

    def run(self) -> None:
        payload = Payload(self._regions, self._device)
        comm = Communicator(self._device, self._check)
        try:
            self._send(comm, payload)
        except BaseException as cause:
            self._send_over(cause)
            comm.abort(payload.memory)
            if not isinstance(cause, WarmcastError | RuntimeError):
                raise
            log.warning("a broadcast to %d receivers broke: %s", self._size - 1, one_line(cause))
            self._call_roll()
        else:
            log.info("sent to %d receivers by one broadcast", self._size - 1)
            comm.close()
        finally:
            payload.release()

    def _send(self, comm: Communicator, payload: Payload) -> None:
        packed = self._staging and payload.can_pack
        unique = nccl.unique_id()
        try:
            self._begin(unique, packed=packed)
            payload.prepare()
            self._wait_for_joiners()
            comm.create(unique, 0, self._size, self._ctas)
            comm.connect()
        finally:
            if not comm.connected:
                nccl.release(unique)
        payload.move(comm, sending=True, packed=packed)
        self._wait_for_all()

    def _begin(self, unique: bytes, *, packed: bool) -> None:
        for rank, member in self._open.items():
            order = Order(
                kind="begin",
                party=self._name,
                unique=unique.hex(),
                rank=rank,
                size=self._size,
                packed=packed,
                max_ctas=self._ctas,
            )
            tell(self._registry, _box(member), order, Deadline.after(CALL))

    def _check(self, doing: str) -> None:
        """Look after the receivers; raises :class:`PartyBroken` when one is lost."""
        self._look_after(doing)
        note = self._notes.look()
        if note is not None:
            self._hear(note)
        self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self._lost is not None or self._left:
            raise PartyBroken("nccl: a receiver left the broadcast", found=self._lost)

    def _look_after(self, doing: str) -> None:
        for rank, member in list(self._open.items()):
            try:
                member.check(doing)
            except WarmcastError as cause:
                self._lose(rank, without_frames(cause))

    def _hear(self, note: Note) -> None:
        if note.rank not in self._open:
            return
        if note.kind == "gone":
            self._lose(note.rank, TransferFailed("receiver", found=f"gave up: {note.reason}"))
            return
        if note.kind == "here":
            self._here.add(note.rank)
            return
        member = self._open.pop(note.rank)
        if note.kind == "done":
            member.finish()
            return
        log.info("rank %d has left the broadcast: %s", note.rank, note.reason)
        self._left = True
        member.broken += 1
        member.erred += note.erred
        if member.erred == _ERRORS:
            cause = TransferFailed(f"nccl: {_ERRORS} errors of this receiver", found=note.reason)
            self._dismiss(member, cause)
        elif member.broken == _PARTIES:
            cause = TransferFailed(f"nccl: {_PARTIES} broadcasts to this receiver broke")
            self._dismiss(member, cause, blame=self._lost is None)

    def _lose(self, rank: int, cause: WarmcastError) -> None:
        member = self._open.pop(rank)
        self._lost = self._lost or cause
        self._dismiss(member, cause)

    def _dismiss(self, member: Member, cause: WarmcastError, *, blame: bool = True) -> None:
        member.finish(cause)
        order = Order(kind="failed", party=self._name, reason=str(cause)[:512], blame=blame)
        tell_if_possible(self._registry, _box(member), order)

    def _wait_for_joiners(self) -> None:
        """Until every receiver has begun to join.

        This side comes last: what NCCL began for ranks that never meet it does not free.
        """
        limit = Deadline.after(_JOIN)
        while set(self._open) - self._here:
            note = self._notes.wait(limit.within(_PATIENCE))
            if note is not None:
                self._hear(note)
            if limit.expired:
                for rank in set(self._open) - self._here:
                    cause = TransferFailed("receiver", expected="to join in time", found="silence")
                    self._lose(rank, cause)
            self._check("waiting for the receivers to join")

    def _wait_for_all(self) -> None:
        """Until every receiver has everything."""
        while self._open:
            try:
                note = self._notes.wait(Deadline.after(_PATIENCE))
            except RegistryUnavailable as cause:
                # The bytes have gone out. Who has not got them notices that this side has left.
                log.info("receivers are taken to be done: %s", cause)
                self._finish_all(None)
                break
            if note is not None:
                self._hear(note)
            self._check("waiting for the receivers to be done")
        self._raise_if_broken()

    def _send_over(self, cause: BaseException) -> None:
        order = Order(kind="over", party=self._name, reason=one_line(cause))
        for member in self._open.values():
            tell_if_possible(self._registry, _box(member), order)

    def _call_roll(self) -> None:
        """Wait for those who are left to leave the communicator, too; they are served again."""
        limit = Deadline.after(_ROLL_CALL)
        while self._open and not limit.expired:
            try:
                note = self._notes.wait(limit.within(_PATIENCE))
            except RegistryUnavailable as cause:
                self._finish_all(without_frames(cause))
                break
            if note is not None:
                self._hear(note)
            self._look_after("waiting for the receivers to leave a broken broadcast")
        for rank in list(self._open):
            self._lose(rank, TransferFailed("receiver", expected="an answer", found="none in time"))

    def _finish_all(self, cause: WarmcastError | None) -> None:
        for member in self._open.values():
            member.finish(cause)
        self._open.clear()


def _box(member: Member) -> str:
    return orders(member.transfer.request)
