"""CUDA IPC: between two processes of one host, of two GPUs or of one.

The receiver opens the sender's memory and copies it with its own copy engine, on a stream of its
own; the sender launches nothing. The sender keeps its memory until the receiver says that it is
done, has gone, or is late.

Receivers that come while another is being served form a chain. Each takes from the one before it
what that one has already, so that every link of the machine is used and the sender's memory is read
once. Who waits for a neighbour that is gone or stands still takes the rest from the sender itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from warmcast.loader.cuda_context import current
from warmcast.loader.errors import TransferFailed, TransportUnusable
from warmcast.loader.transports import Endpoint, Receiving, Sending, Span, Transfer, ipc_memory
from warmcast.loader.transports.ipc_channel import (
    PATIENCE,
    STALL,
    Address,
    Channel,
    Message,
    close_fds,
    listening,
)
from warmcast.loader.transports.ipc_giving import Chain, Giving
from warmcast.loader.transports.ipc_pull import Pull
from warmcast.loader.transports.ipc_relay import Relay
from warmcast.manifests.canonical import parse_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidData
from warmcast.manifests.manifest import parse_record


class Ipc:
    """Pulls by the receiver's copy engine."""

    name = "ipc"

    def __init__(self) -> None:
        self._chain = Chain()

    def usable(self, device: torch.device) -> bool:
        """On a GPU, with cuda-bindings."""
        return device.type == "cuda" and ipc_memory.driver() is not None

    def objection(self, mine: Endpoint, theirs: Endpoint) -> str | None:
        """Both on GPUs of one host."""
        if theirs.device != "cuda":
            return f"the peer's weights are on {theirs.device}"
        if mine.host != theirs.host:
            return "another host"
        return None

    def unfit(self, regions: Sequence[Tensor]) -> str | None:
        """Memory that the driver does not give to other processes."""
        return ipc_memory.unexportable(regions)

    @contextmanager
    def sending(self, transfer: Transfer) -> Iterator[Sending]:
        """The offer is the address of a socket."""
        with listening() as listener:
            giving = Giving(transfer, self._chain, listener)
            yield Sending(listener.address.model_dump_json(), giving.run)

    @contextmanager
    def receiving(self, transfer: Transfer, offer: str) -> Iterator[Receiving]:
        """Connects to the sender's socket: where that fails, the sender has not begun anything."""
        try:
            content = parse_json(offer.encode(), "offer", InvalidData)
            address = parse_record(Address, content, "offer")
            sender = Channel.connect(address, "ipc: sender")
        except (InvalidData, OSError) as cause:
            raise TransportUnusable(
                "ipc",
                expected="the sender's socket in this network namespace",
                found=str(cause),
            ) from cause
        with ExitStack() as stack:
            stack.callback(sender.close)
            yield Receiving("", partial(_receive, transfer, sender, address.token))


def _receive(transfer: Transfer, sender: Channel, token: str) -> Span:
    with current(transfer.device), ExitStack() as stack:
        relay = None
        if transfer.regions and ipc_memory.unexportable(transfer.regions) is None:
            relay = stack.enter_context(Relay(transfer).running())
        deadline = transfer.deadline.within(PATIENCE)
        hello = Message(
            kind="hello", token=token, address=relay.address if relay is not None else None
        )
        sender.send(hello, deadline=deadline)
        begin = _expect(sender, "begin", transfer, deadline)
        pull = stack.enter_context(Pull(transfer, sender, relay).running())
        return pull.run(begin.address)


def _expect(channel: Channel, kind: str, transfer: Transfer, deadline: Deadline) -> Message:
    while (received := channel.receive(deadline.within(STALL))) is None:
        transfer.alive()
        if deadline.expired:
            raise TransferFailed("ipc", expected=f"{kind!r} from the sender", found="nothing")
    close_fds(received.fds)
    if received.message.kind != kind:
        raise TransferFailed("ipc", expected=repr(kind), found=repr(received.message.kind))
    return received.message
