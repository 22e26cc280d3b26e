"""The Transport protocol: how bytes cross between two workers, and which transports there are.

A transfer is between one receiver and one sender that have shaken hands. Both hold the same list
of *regions*: uint8 tensors of equal lengths, on the device of their model; the transport fills the
receiver's from the sender's, in order. It checks nothing: the loader verifies what arrived.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from warmcast.loader.registry import Registry, Text
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError
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


Span = tuple[float, float]
"""A begin and an end, in seconds on the monotonic clock, which is one for all of a host."""


@dataclass(frozen=True, slots=True)
class Sending:
    """The sender's side of a transfer, ready to begin.

    ``offer`` goes to the receiver with the answer. ``run`` takes the receiver's ticket and returns
    when the receiver has everything; it raises :class:`TransferFailed`.
    """

    offer: str
    run: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Receiving:
    """The receiver's side of a transfer, ready to begin.

    ``ticket`` goes to the sender with the confirmation. ``run`` fills the regions and returns when
    bytes began to move and when the last had come, without what it took to get at them; it raises
    :class:`TransferFailed`, and the regions are then worth nothing.
    """

    ticket: str
    run: Callable[[], Span]


class Transport(Protocol):
    """A way across. A new transport is one file beside this one and a line in ``_TRANSPORTS``.

    One object serves one sender, or one load.
    """

    name: str

    def usable(self, device: torch.device) -> bool:
        """Whether this worker can use the transport for tensors on ``device``."""

    def objection(self, mine: Endpoint, theirs: Endpoint) -> str | None:
        """Why these two workers cannot use it together; None if they can."""

    def unfit(self, regions: Sequence[Tensor]) -> str | None:
        """Why this memory cannot be sent from; None if it can."""

    def sending(self, transfer: Transfer) -> AbstractContextManager[Sending]:
        """Prepare to send; the context ends what was begun, however the transfer ended."""

    def receiving(self, transfer: Transfer, offer: str) -> AbstractContextManager[Receiving]:
        """Prepare to receive what a sender offers; the context ends what was begun.

        Raises :class:`TransportUnusable` where this receiver cannot take the offer.
        """


# In order of preference.
_TRANSPORTS = {
    "ipc": "warmcast.loader.transports.ipc:Ipc",
    "nccl": "warmcast.loader.transports.nccl:Nccl",
    "gloo": "warmcast.loader.transports.gloo:Gloo",
}


def transports_for(device: torch.device) -> tuple[Transport, ...]:
    """The transports that this worker can use for tensors on ``device``, the best first.

    WARMCAST_TRANSPORTS (``nccl,gloo``) limits them; raises :class:`UsageError` for an unknown one.
    """
    transports = [kind() for kind in import_transports()]
    return tuple(transport for transport in transports if transport.usable(device))


def import_transports() -> list[Callable[[], Transport]]:
    """What makes each transport that may be used, the best first; as :func:`transports_for`."""
    kinds = []
    for name in _allowed():
        module, _, attribute = _TRANSPORTS[name].partition(":")
        kinds.append(getattr(importlib.import_module(module), attribute))
    return kinds


def _allowed() -> list[str]:
    text = os.environ.get("WARMCAST_TRANSPORTS", "")
    named = {name.strip() for name in text.split(",")} if text else set(_TRANSPORTS)
    if not named <= set(_TRANSPORTS):
        raise UsageError(
            "WARMCAST_TRANSPORTS",
            expected=f"names of {', '.join(_TRANSPORTS)}",
            found=repr(text),
        )
    return [name for name in _TRANSPORTS if name in named]


def choose(
    mine: Sequence[Transport], here: Endpoint, there: Endpoint, regions: Sequence[Tensor]
) -> tuple[Transport | None, str]:
    """The best transport that both have, none objects to and that can send from this memory; and
    why those before it fell out.
    """
    reasons = []
    for transport in mine:
        if transport.name not in there.transports:
            reasons.append(f"{transport.name}: the peer does not have it")
        elif problem := transport.objection(here, there) or transport.unfit(regions):
            reasons.append(f"{transport.name}: {problem}")
        else:
            return transport, "; ".join(reasons)
    return None, "; ".join(reasons) or f"no transport for {here.device}"
