"""NCCL: between GPUs, of one host or of several, from one sender to many receivers at once.

Receivers that ask a sender at about the same time are served by one broadcast (see
:mod:`nccl_party`); its communicator is made for it and gone after it. Nothing of NCCL's is waited
for without a bound: communicators are nonblocking, polled under the deadline, and aborted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from warmcast.loader.errors import TransferFailed
from warmcast.loader.transports import Endpoint, Receiving, Sending, Transfer
from warmcast.loader.transports import nccl_library as nccl
from warmcast.loader.transports.nccl_broadcast import Payload
from warmcast.loader.transports.nccl_messages import MAX_CTAS, Ticket, parse
from warmcast.loader.transports.nccl_party import Gathering
from warmcast.loader.transports.nccl_receive import Receiver
from warmcast.loader.transports.nccl_send import lead
from warmcast.manifests.errors import InvalidData, UsageError


class Nccl:
    """Broadcasts from a sender to the receivers of the moment."""

    name = "nccl"

    def __init__(self) -> None:
        """Raises :class:`UsageError` for a wrong WARMCAST_NCCL_MAX_CTAS."""
        self._max_ctas = max_ctas(os.environ)
        self._gathering = Gathering(lambda party: lead(party, self._max_ctas))

    def usable(self, device: torch.device) -> bool:
        """On a GPU, with the NCCL that torch brings."""
        return device.type == "cuda" and nccl.library() is not None

    def objection(self, mine: Endpoint, theirs: Endpoint) -> str | None:
        """Both need a GPU of their own, and one version of NCCL."""
        if theirs.device != "cuda":
            return f"the peer's weights are on {theirs.device}"
        if mine.nccl != theirs.nccl:
            return f"NCCL {mine.nccl} here, {theirs.nccl} there"
        if mine.gpu == theirs.gpu:
            return "both are on one GPU"
        return None

    def unfit(self, regions: Sequence[torch.Tensor]) -> str | None:
        """All memory of a GPU can be sent."""
        return None

    @contextmanager
    def sending(self, transfer: Transfer) -> Iterator[Sending]:
        """Nothing to offer: what the receivers need is told them when a party is complete."""
        with self._gathering.coming() as arrived:

            def send(ticket: str) -> None:
                arrived()
                self._gathering.serve(transfer, _parsed(ticket))

            yield Sending("", send)

    @contextmanager
    def receiving(self, transfer: Transfer, offer: str) -> Iterator[Receiving]:
        """Allocates what it takes to receive small regions together, for the time being."""
        payload = Payload(transfer.regions, transfer.device)
        gpu = str(torch.cuda.get_device_properties(transfer.device).uuid)
        ticket = Ticket(gpu=gpu, staging=payload.can_pack, max_ctas=self._max_ctas)
        try:
            yield Receiving(ticket.model_dump_json(), Receiver(transfer, payload).run)
        finally:
            payload.release()


def max_ctas(env: Mapping[str, str]) -> int | None:
    """WARMCAST_NCCL_MAX_CTAS: the thread blocks that a transfer may take of the GPU."""
    text = env.get("WARMCAST_NCCL_MAX_CTAS")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_CTAS):
        raise UsageError(
            "WARMCAST_NCCL_MAX_CTAS", expected=f"an integer from 1 to {MAX_CTAS}", found=repr(text)
        )
    return int(text)


def _parsed(ticket: str) -> Ticket:
    try:
        return parse(Ticket, ticket.encode())
    except InvalidData as cause:
        raise TransferFailed("nccl", found=f"no ticket: {cause}") from cause
