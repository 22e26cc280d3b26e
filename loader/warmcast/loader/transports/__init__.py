"""The Transport protocol: how bytes cross between two workers, and which transports there are.

A transfer is between one receiver and one sender that have shaken hands. Both hold the same list
of *regions*: uint8 tensors of equal lengths, on the device of their model; the transport fills the
receiver's from the sender's, in order. It checks nothing: the loader verifies what arrived.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from warmcast.loader.registry import Registry, Text
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.manifest import Record


class Endpoint(Record):
    """What a worker tells a peer of itself before anything is created.

    ``device`` is ``cpu`` or ``cuda``; ``gpu`` the GPU's UUID, ``nccl`` NCCL's version code, both
    empty without a GPU; ``transports`` in order of preference.
    """

    worker: Text
    host: Text
    device: Text
    gpu: Text
    nccl: Text
    transports: tuple[Text, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer, as one of its two sides sees it.

    ``alive`` raises :class:`TransferFailed` when the other side gives no more signs of life.
    ``address`` is the one at which this worker can be reached.
    """

    request: str
    regions: Sequence[Tensor]
    device: torch.device
    registry: Registry
    address: str
    deadline: Deadline
    alive: Callable[[], None]

    @property
    def nbytes(self) -> int:
        """Bytes to transfer."""
        return sum(region.numel() for region in self.regions)


class Transport(Protocol):
    """A way across. A new transport is one file beside this one and a line in ``_TRANSPORTS``."""

    name: str

    def usable(self, device: torch.device) -> bool:
        """Whether this worker can use the transport for tensors on ``device``."""

    def objection(self, mine: Endpoint, theirs: Endpoint) -> str | None:
        """Why these two workers cannot use it together; None if they can."""

    def ticket(self) -> str:
        """What the sender needs to meet the receiver, made by the receiver after the answer."""

    def discard(self, ticket: str) -> None:
        """End what :meth:`ticket` started, for a transfer that will not be."""

    def receive(self, transfer: Transfer, ticket: str) -> None:
        """Fill the regions. Raises :class:`TransferFailed`; the regions are then worth nothing."""

    def send(self, transfer: Transfer, ticket: str) -> None:
        """Send the regions. Raises :class:`TransferFailed`."""


# In order of preference.
_TRANSPORTS = {
    "nccl": "warmcast.loader.transports.nccl:Nccl",
    "gloo": "warmcast.loader.transports.gloo:Gloo",
}


def transports_for(device: torch.device) -> tuple[Transport, ...]:
    """The transports that this worker can use for tensors on ``device``, the best first."""
    found = []
    for target in _TRANSPORTS.values():
        module, _, name = target.partition(":")
        transport: Transport = getattr(importlib.import_module(module), name)()
        if transport.usable(device):
            found.append(transport)
    return tuple(found)


def choose(
    mine: Sequence[Transport], here: Endpoint, there: Endpoint
) -> tuple[Transport | None, str]:
    """The best transport that both have and none objects to, and why those before it fell out."""
    reasons = []
    for transport in mine:
        if transport.name not in there.transports:
            reasons.append(f"{transport.name}: the peer does not have it")
        elif problem := transport.objection(here, there):
            reasons.append(f"{transport.name}: {problem}")
        else:
            return transport, "; ".join(reasons)
    return None, "; ".join(reasons) or f"no transport for {here.device}"
