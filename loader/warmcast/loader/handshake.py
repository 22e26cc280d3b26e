"""The handshake: three messages, after which both sides know that the other lives and means this.

1. *ask*: the receiver puts its endpoint, the layout of its containers and a nonce X into the
   sender's mailbox.
2. *answer*: the sender returns X + 1, its own nonce Y, its endpoint and the transport it chose; or
   says at once that it is busy, or why it will not.
3. *confirm*: the receiver returns Y + 1 and the transport's ticket.

Nothing is allocated before the third message. The sender waits one second for it, the receiver ten
for the answer. Answers come by blocking pops. From then on each side gives signs of life and looks
for the other's (see :class:`Lifeline`).

Source: layer 3 of NCCLBack's protocol, where the two sides polled Redis for incremented values.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import Field, StringConstraints

from warmcast.loader.errors import (
    PeerBusy,
    PeerRefused,
    PeerSilent,
    RegistryUnavailable,
    TransferFailed,
)
from warmcast.loader.registry import BEAT, EXPIRY, Presence, Registry, Text, mailbox
from warmcast.loader.transports import Endpoint
from warmcast.manifests.canonical import parse_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, InvalidData
from warmcast.manifests.manifest import Record, Sha256, parse_record

SENDER_PATIENCE = 1.0
"""Seconds that a sender waits for the confirmation."""

RECEIVER_PATIENCE = 10.0
"""Seconds that a receiver waits for the answer."""

R = TypeVar("R", bound=Record)
Nonce = Annotated[int, Field(ge=0, lt=1 << 62)]
Request = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class Ask(Record):
    """Receiver to sender: the digest of the plan's layout, whether its memory is an arena, and the
    time in seconds that it has for the transfer.
    """

    request: Request
    identity: Sha256
    layout: Sha256
    arena: bool
    endpoint: Endpoint
    nonce: Nonce
    seconds: Annotated[float, Field(gt=0, le=86400)]


class Answer(Record):
    """Sender to receiver. ``whole``: both sides have an arena, and they are copied as they are;
    ``offer`` is the transport's, and ``reason`` tells why a better one was not taken.
    """

    request: Request
    status: Literal["ready", "busy", "no"]
    reason: Text = ""
    echo: Nonce
    nonce: Nonce = 0
    endpoint: Endpoint | None = None
    transport: Text = ""
    offer: Annotated[str, StringConstraints(max_length=4096)] = ""
    whole: bool = False


class Confirm(Record):
    """Receiver to sender: the transfer begins."""

    request: Request
    echo: Nonce
    ticket: Annotated[str, StringConstraints(max_length=4096)]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a handshake came to on the receiver's side, before the confirmation."""

    ask: Ask
    answer: Answer


def ask(
    registry: Registry,
    sender: Presence,
    endpoint: Endpoint,
    layout: str,
    deadline: Deadline,
    *,
    arena: bool,
    patience: float = RECEIVER_PATIENCE,
) -> Agreement:
    """Ask a sender for its weights; the answer, once both have proved to be alive.

    The wait ends early when the sender's presence does: nobody is left who could answer.

    Raises :class:`PeerSilent`, :class:`PeerBusy`, :class:`PeerRefused` or
    :class:`RegistryUnavailable`.
    """
    message = Ask(
        request=secrets.token_hex(16),
        identity=sender.identity,
        layout=layout,
        arena=arena,
        endpoint=endpoint,
        nonce=secrets.randbelow(1 << 61),
        seconds=min(max(deadline.remaining(), 0.001), 86400.0),
    )
    if not registry.present(sender, deadline):  # it may have gone while others were asked
        raise PeerSilent(f"sender {sender.sender}", expected="an answer", found="it has gone")
    registry.push(mailbox(sender.sender), message.model_dump_json().encode(), deadline)
    reply = _reply(registry, sender, mailbox(message.request), deadline.within(patience))
    try:
        answer = _parse(Answer, reply)
    except InvalidData as cause:
        raise PeerRefused(f"sender {sender.sender}: {cause}") from cause
    if answer.echo != message.nonce + 1 or answer.request != message.request:
        raise PeerRefused(f"sender {sender.sender}", expected="an answer to this request")
    if answer.status == "busy":
        raise PeerBusy(f"sender {sender.sender} is busy: {answer.reason}")
    if answer.status == "no" or answer.endpoint is None:
        raise PeerRefused(f"sender {sender.sender} refused: {answer.reason}")
    return Agreement(message, answer)


def _reply(registry: Registry, sender: Presence, box: str, deadline: Deadline) -> bytes:
    while (reply := registry.pop(box, deadline.within(BEAT))) is None:
        if deadline.expired:
            raise PeerSilent(f"sender {sender.sender}", expected="an answer", found="none in time")
        if not registry.present(sender, deadline):
            raise PeerSilent(f"sender {sender.sender}", expected="an answer", found="it has gone")
    return reply


def confirm(registry: Registry, agreement: Agreement, ticket: str, deadline: Deadline) -> None:
    """Tell the sender to begin."""
    request = agreement.ask.request
    message = Confirm(request=request, echo=agreement.answer.nonce + 1, ticket=ticket)
    registry.push(_confirmations(request), message.model_dump_json().encode(), deadline)


def next_ask(registry: Registry, sender: str, deadline: Deadline) -> Ask | None:
    """The next request in a sender's mailbox; None if none came in time.

    A message that is no request is dropped: whoever wrote it will not get an answer.
    """
    message = registry.pop(mailbox(sender), deadline)
    if message is None:
        return None
    try:
        return _parse(Ask, message)
    except InvalidData:
        return None


def turn_away(
    registry: Registry, request: Ask, status: Literal["busy", "no"], reason: str, deadline: Deadline
) -> None:
    """Answer a request with a no, at once."""
    answer = Answer(
        request=request.request, status=status, reason=reason[:512], echo=request.nonce + 1
    )
    registry.push(mailbox(request.request), answer.model_dump_json().encode(), deadline)


def accept(
    registry: Registry,
    request: Ask,
    endpoint: Endpoint,
    deadline: Deadline,
    *,
    transport: str,
    offer: str,
    reason: str,
    whole: bool,
) -> str:
    """Answer a request with a yes and wait for the confirmation; the transport's ticket.

    Raises :class:`PeerSilent` if the receiver does not confirm within a second.
    """
    nonce = secrets.randbelow(1 << 61)
    answer = Answer(
        request=request.request,
        status="ready",
        echo=request.nonce + 1,
        nonce=nonce,
        endpoint=endpoint,
        transport=transport,
        offer=offer,
        reason=reason[:512],
        whole=whole,
    )
    registry.push(mailbox(request.request), answer.model_dump_json().encode(), deadline)
    reply = registry.pop(_confirmations(request.request), deadline.within(SENDER_PATIENCE))
    if reply is None:
        raise PeerSilent("receiver", expected="a confirmation", found="none in time")
    message = _parse(Confirm, reply)
    if message.echo != nonce + 1 or message.request != request.request:
        raise PeerSilent("receiver", expected="a confirmation of this request", found="another")
    return message.ticket


class Lifeline:
    """Signs of life during one transfer: ours given, the peer's looked for, every second."""

    def __init__(self, registry: Registry, request: str, ours: str, theirs: str) -> None:
        self._registry = registry
        self._ours = f"{mailbox(request)}:{ours}"
        self._theirs = f"{mailbox(request)}:{theirs}"
        self._over = threading.Event()
        self._lost = threading.Event()
        self._seen = False
        self._patience = Deadline.after(EXPIRY)

    def check(self) -> None:
        """Raise :class:`TransferFailed` if the peer stopped giving signs of life."""
        if self._lost.is_set():
            raise TransferFailed(
                "peer", expected="signs of life", found="none: it has ended or hangs"
            )

    @contextmanager
    def kept(self) -> Iterator[Lifeline]:
        """Give signs of life while the context is open."""
        thread = threading.Thread(target=self._beat, name="warmcast-lifeline", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def _beat(self) -> None:
        while not self._over.is_set():
            # A registry that is gone says nothing about the peer: the deadline is left to judge.
            with contextlib.suppress(RegistryUnavailable, DeadlineExceeded):
                deadline = Deadline.after(BEAT)
                self._registry.beat(self._ours, deadline)
                alive = self._registry.alive(self._theirs, deadline)
                # A peer that died before its first sign is as lost as one whose signs ended.
                if not alive and (self._seen or self._patience.expired):
                    self._lost.set()
                self._seen = self._seen or alive
            self._over.wait(BEAT)


def _confirmations(request: str) -> str:
    return f"{mailbox(request)}:confirm"


def _parse(kind: type[R], data: bytes) -> R:
    return parse_record(kind, parse_json(data, kind.__name__, InvalidData), kind.__name__.lower())
