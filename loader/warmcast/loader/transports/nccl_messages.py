"""What the sender and the receivers of a broadcast say to each other, through the registry.

The receivers that one sender serves at a time are a *party*. Each receiver has a mailbox for
orders, under its request; each party has one for the notes of its receivers, under a random name.

======= ================== ====================================================================
begin   sender, order      join the communicator ``unique`` as ``rank`` of ``size``
over    sender, order      the party has broken: leave the communicator, say *again*, wait
failed  sender, order      this receiver is not served any more; ``blame`` tells whether it is
                           the sender's fault
here    receiver, note     it has begun to join the communicator
done    receiver, note     it has every byte
again   receiver, note     it has left the communicator and can join another; ``erred`` if
                           NCCL failed it, and not the word of the sender
gone    receiver, note     it has given up
======= ================== ====================================================================
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field, StringConstraints

from warmcast.loader.errors import RegistryUnavailable
from warmcast.loader.registry import CALL, Registry, Text, mailbox
from warmcast.loader.transports.nccl_library import UNIQUE_ID_NBYTES
from warmcast.manifests.canonical import parse_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, InvalidData
from warmcast.manifests.manifest import Record, parse_record

log = logging.getLogger("warmcast")

MAX_CTAS = 64
"""NCCL's own limit of the CTAs (thread blocks) of a communicator."""

_EVERY = 0.1
"""Seconds between looks into a mailbox beside a running transfer."""

_LOOK = 0.01
"""Seconds that such a look takes at most, where the registry answers."""

Party = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Rank = Annotated[int, Field(ge=0, lt=1 << 16)]
Ctas = Annotated[int, Field(ge=1, le=MAX_CTAS)]
Unique = Annotated[str, StringConstraints(pattern=rf"^([0-9a-f]{{{2 * UNIQUE_ID_NBYTES}}})?$")]
R = TypeVar("R", bound=Record)


class Ticket(Record):
    """What a receiver tells of itself with its confirmation.

    ``gpu`` is its GPU's UUID: a communicator has no two ranks on one GPU. ``staging`` tells that
    it has room to pack small regions, ``max_ctas`` the most CTAs that it allows.
    """

    gpu: Text
    staging: bool
    max_ctas: Ctas | None


class Order(Record):
    """Sender to receiver."""

    kind: Literal["begin", "over", "failed"]
    party: Party
    unique: Unique = ""
    rank: Rank = 0
    size: Rank = 0
    packed: bool = False
    max_ctas: Ctas | None = None
    reason: Text = ""
    blame: bool = True


class Note(Record):
    """Receiver to sender."""

    kind: Literal["here", "done", "again", "gone"]
    rank: Rank
    erred: bool = False
    reason: Text = ""


class Inbox(Generic[R]):
    """A mailbox for messages of one kind."""

    def __init__(self, registry: Registry, box: str, kind: type[R]) -> None:
        self._registry = registry
        self._box = box
        self._kind = kind
        self._next = time.monotonic() + _EVERY

    def wait(self, deadline: Deadline) -> R | None:
        """The next message, or None after the deadline. Raises :class:`RegistryUnavailable`.

        A message that is none of this kind is passed over: whoever wrote it gets no answer.
        """
        with contextlib.suppress(DeadlineExceeded):  # between two of the registry's calls
            while (data := self._registry.pop(self._box, deadline)) is not None:
                if (message := self._read(data)) is not None:
                    return message
        return None

    def look(self) -> R | None:
        """A message, if it is time to look and there is one: the transfer does not wait for it.

        Nothing raises: a registry that is gone ends no transfer.
        """
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + _EVERY
        limit = Deadline.after(_LOOK)
        with contextlib.suppress(DeadlineExceeded):  # then the next look goes on
            try:
                while (data := self._registry.take(self._box, limit)) is not None:
                    if (message := self._read(data)) is not None:
                        return message
            except RegistryUnavailable:
                self._next += CALL
        return None

    def _read(self, data: bytes) -> R | None:
        try:
            return parse(self._kind, data)
        except InvalidData as cause:
            log.warning("a message to %s is passed over: %s", self._box, cause)
            return None


def orders(request: str) -> str:
    """The mailbox of a receiver."""
    return mailbox(f"{request}/order")


def parse(kind: type[R], data: bytes) -> R:
    """A message that came in. Raises :class:`InvalidData`."""
    return parse_record(kind, parse_json(data, kind.__name__, InvalidData), kind.__name__.lower())


def tell(registry: Registry, box: str, message: Record, deadline: Deadline) -> None:
    """Put a message into a mailbox. Raises :class:`RegistryUnavailable`."""
    registry.push(box, message.model_dump_json(exclude_defaults=True).encode(), deadline)


def tell_if_possible(registry: Registry, box: str, message: Record) -> None:
    """Put a message into a mailbox; one that waits for it finds out without it, but later."""
    try:
        tell(registry, box, message, Deadline.after(CALL))
    except (RegistryUnavailable, DeadlineExceeded) as cause:
        log.info("%s not told: %s", box, cause)
