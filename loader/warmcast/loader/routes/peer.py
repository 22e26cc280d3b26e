"""A peer: a worker that has these weights in its memory and serves them."""

from __future__ import annotations

from collections.abc import Sequence

from warmcast.loader.address import address_for
from warmcast.loader.errors import (
    PartyBroken,
    PeerBusy,
    PeerError,
    PeerRefused,
    PeerSilent,
    TransportUnusable,
    without_frames,
)
from warmcast.loader.handshake import (
    RECEIVER_PATIENCE,
    SENDER_PATIENCE,
    Agreement,
    Lifeline,
    ask,
    confirm,
)
from warmcast.loader.plan import Targets
from warmcast.loader.registry import Presence, Registry
from warmcast.loader.routes import Job, Source
from warmcast.loader.transports import Endpoint, Span, Transfer, Transport
from warmcast.manifests.deadline import Deadline


class NoSender(PeerError):
    """Nobody serves this identity."""


class PeerRoute:
    """Ask the registered senders, the nearest and least loaded first, until one says yes.

    One object serves one load: senders that failed it are not asked again.
    """

    name = "peer"

    def __init__(
        self, registry: Registry, endpoint: Endpoint, transports: Sequence[Transport]
    ) -> None:
        self._registry = registry
        self._endpoint = endpoint
        self._transports = {transport.name: transport for transport in transports}
        self._failed: set[str] = set()
        self._unusable: set[tuple[str, str]] = set()

    def find(self, job: Job, deadline: Deadline) -> Source:
        """Shake hands with a sender.

        Raises :class:`NoSender` if none is registered, :class:`PeerBusy` if all that would serve
        are busy, :class:`PeerError` if all failed, :class:`RegistryUnavailable`.
        """
        senders = [
            sender
            for sender in self._registry.senders(job.identity.digest, deadline)
            if sender.sender not in self._failed
        ]
        if not senders:
            failed = f"; {len(self._failed)} failed before" if self._failed else ""
            raise NoSender(f"no sender of {job.identity.digest[:12]} is registered{failed}")
        problems: list[PeerError] = []
        for left, sender in zip(
            range(len(senders), 0, -1), sorted(senders, key=self._distance), strict=True
        ):
            # One that is silent must not take the time in which the others could be asked.
            patience = min(RECEIVER_PATIENCE, deadline.remaining() / left)
            try:
                return self._meet(job, sender, deadline, patience)
            except PeerError as cause:
                problems.append(without_frames(cause))
                if not isinstance(cause, PeerBusy):
                    self._failed.add(sender.sender)
        busy = [problem for problem in problems if isinstance(problem, PeerBusy)]
        raise busy[0] if busy else PeerError("; ".join(map(str, problems)))

    def known(self, identity: str, deadline: Deadline) -> bool:
        """Whether a sender is registered that has not failed this load."""
        senders = self._registry.senders(identity, deadline)
        return any(sender.sender not in self._failed for sender in senders)

    def blame(self, source: Source, problem: Exception) -> None:
        """Do not ask this sender again, or not for this transport, if that is what failed."""
        if isinstance(problem, TransportUnusable) and source.transport is not None:
            self._unusable.add((source.name, source.transport))
        elif not isinstance(problem, (PeerSilent, PartyBroken)):
            self._failed.add(source.name)

    def _meet(self, job: Job, sender: Presence, deadline: Deadline, patience: float) -> Source:
        names = self._endpoint.transports
        usable = tuple(name for name in names if (sender.sender, name) not in self._unusable)
        agreement = ask(
            self._registry,
            sender,
            self._endpoint.model_copy(update={"transports": usable}),
            job.plan.layout,
            deadline,
            arena=job.arena,
            patience=patience,
        )
        transport = self._transports.get(agreement.answer.transport)
        if transport is None:
            raise PeerRefused(
                f"sender {sender.sender}",
                expected=f"a transport of {', '.join(self._transports)}",
                found=repr(agreement.answer.transport),
            )
        return PeerSource(self._registry, sender, agreement, transport, job)

    def _distance(self, sender: Presence) -> tuple[bool, int, str]:
        return (sender.host != self._endpoint.host, sender.active, sender.sender)


class PeerSource:
    """A sender that has answered and waits for the confirmation."""

    def __init__(
        self,
        registry: Registry,
        sender: Presence,
        agreement: Agreement,
        transport: Transport,
        job: Job,
    ) -> None:
        self._registry = registry
        self._agreement = agreement
        self._transport = transport
        self._job = job
        self.name = sender.sender
        self.transport: str | None = transport.name
        self.reason = agreement.answer.reason
        self._waits = Deadline.after(SENDER_PATIENCE)

    def fill(self, targets: Targets, deadline: Deadline) -> Span:
        """Confirm, and receive. Raises :class:`TransferFailed`, :class:`TransportUnusable`,
        :class:`RegistryUnavailable`, and :class:`PeerSilent` if the sender has waited for too
        long: it can be asked again.
        """
        if self._waits.expired:
            raise PeerSilent(
                f"sender {self.name}",
                expected=f"the group to be ready within {SENDER_PATIENCE:g} s",
                found="it took longer, and the sender no longer waits",
            )
        answer = self._agreement.answer
        request = self._agreement.ask.request
        lifeline = Lifeline(self._registry, request, "receiver", "sender")
        transfer = Transfer(
            request,
            targets.regions(whole=answer.whole),
            self._job.device,
            self._registry,
            address_for(self._registry.url),
            deadline,
            lifeline.check,
        )
        with self._transport.receiving(transfer, answer.offer) as receiving:
            confirm(self._registry, self._agreement, receiving.ticket, deadline)
            with lifeline.kept():
                return receiving.run()

    def abandon(self) -> None:
        """Nothing was allocated: the sender stops waiting after its second."""
