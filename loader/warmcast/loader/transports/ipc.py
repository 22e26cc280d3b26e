"""CUDA IPC: between two processes of one host, of two GPUs or of one.

The receiver opens the sender's memory and copies it with its own copy engine, on a stream of its
own; the sender launches nothing. The sender keeps its memory until the receiver says that it is
done, has gone, or is late.

Receivers that come while another is being served form a chain. Each takes from the one before it
what that one has already, so that every link of the machine is used and the sender's memory is read
once. Who waits for a neighbour that is gone or stands still takes the rest from the sender itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from warmcast.loader.cuda_context import current
from warmcast.loader.errors import (
    PeerError,
    TransferFailed,
    TransportUnusable,
    without_frames,
)
from warmcast.loader.transports import Endpoint, Receiving, Sending, Span, Transfer, ipc_memory
from warmcast.loader.transports.ipc_channel import (
    Address,
    Channel,
    Listener,
    Message,
    close_fds,
    listening,
)
from warmcast.loader.transports.ipc_memory import Part
from warmcast.manifests.canonical import parse_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidData
from warmcast.manifests.manifest import parse_record

log = logging.getLogger("warmcast")

CHUNK = 256 << 20
"""Bytes of a copy, and what a receiver has before the next in the chain can have it. Each copy
costs 4 µs beside the bytes; one of this length takes 0.7 ms over NVLink."""

_DEPTH = 8
"""Copies under way at a time: what has to be waited for when a transfer is given up."""

_COPIES = 5.0
"""Seconds after which copies that were started do not count on to end."""

_POLL = 0.0001
"""Seconds between looks at a copy's event, while nobody writes."""

_STALL = 0.25
"""Seconds after which a neighbour without progress is passed by, or one behind is not waited for
any longer."""

_PATIENCE = 10.0
"""Seconds that the other side has for one message that is due."""

_LATEST = 0.5
"""The part of the bytes after which a receiver takes nobody behind it: it would wait for longer
than both lose by sharing the sender's link."""


class Ipc:
    """Pulls by the receiver's copy engine."""

    name = "ipc"

    def __init__(self) -> None:
        self._chain = _Chain()

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
            giving = _Giving(transfer, self._chain, listener)
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
            relay = stack.enter_context(_Relay(transfer).running())
        deadline = transfer.deadline.within(_PATIENCE)
        hello = Message(
            kind="hello", token=token, address=relay.address if relay is not None else None
        )
        sender.send(hello, deadline=deadline)
        begin = _expect(sender, "begin", transfer, deadline)
        pull = stack.enter_context(_Pull(transfer, sender, relay).running())
        return pull.run(begin.address)


def _expect(channel: Channel, kind: str, transfer: Transfer, deadline: Deadline) -> Message:
    while (received := channel.receive(deadline.within(_STALL))) is None:
        transfer.alive()
        if deadline.expired:
            raise TransferFailed("ipc", expected=f"{kind!r} from the sender", found="nothing")
    close_fds(received.fds)
    if received.message.kind != kind:
        raise TransferFailed("ipc", expected=repr(kind), found=repr(received.message.kind))
    return received.message


# Giving


@dataclass(slots=True)
class _Link:
    """One receiver in a chain, from the sender's side: where it gives, and how much it has."""

    address: Address | None
    nbytes: int
    have: int = 0


class _Chain:
    """Who comes after whom; one a sender."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: _Link | None = None

    @contextmanager
    def joined(self, link: _Link) -> Iterator[Address | None]:
        """Join; the address of the one before, or None for who takes from the sender."""
        with self._lock:
            before = self._last
            if before is not None and (
                before.nbytes != link.nbytes or before.have > _LATEST * before.nbytes
            ):
                before = None
            self._last = link
        try:
            yield before.address if before is not None else None
        finally:
            with self._lock:
                if self._last is link:
                    self._last = None


class _Giving:
    """The sender's side of one transfer: answers what the receiver says, until it is done."""

    def __init__(self, transfer: Transfer, chain: _Chain, listener: Listener) -> None:
        self._transfer = transfer
        self._chain = chain
        self._listener = listener

    def run(self, ticket: str) -> None:
        """Serve one receiver."""
        transfer = self._transfer
        channel, hello = self._accepted()
        link = _Link(hello.address, transfer.nbytes)
        try:
            with self._chain.joined(link) as before:
                begin = Message(kind="begin", address=before)
                channel.send(begin, deadline=transfer.deadline.within(_PATIENCE))
                while (message := self._next(channel)).kind != "done":
                    if message.kind == "want":
                        _give(transfer, channel)
                    elif message.kind == "have":
                        link.have = message.nbytes
        finally:
            channel.close()

    def _accepted(self) -> tuple[Channel, Message]:
        deadline = self._transfer.deadline.within(_PATIENCE)
        while not deadline.expired:
            self._transfer.alive()
            taken = self._listener.accept("ipc: receiver", deadline.within(_STALL))
            if taken is not None:
                return taken
        raise TransferFailed("ipc", expected="the receiver to connect", found="it did not")

    def _next(self, channel: Channel) -> Message:
        while (received := channel.receive(self._transfer.deadline.within(_STALL))) is None:
            self._transfer.deadline.check("sending weights")
            self._transfer.alive()
        close_fds(received.fds)
        return received.message


def _give(transfer: Transfer, channel: Channel, ready: Sequence[Part] | None = None) -> None:
    """Hand out the memory: as it was described before, or described now."""
    with ExitStack() as stack:
        parts: Iterable[tuple[Part, list[int]]] = [(part, []) for part in ready or ()]
        if ready is None:
            stack.enter_context(current(transfer.device))
            parts = ipc_memory.export(transfer.regions)
        for part, fds in parts:
            try:
                message = Message(kind="part", part=part)
                channel.send(message, fds, deadline=transfer.deadline.within(_PATIENCE))
            finally:
                close_fds(fds)


class _Relay:
    """A receiver's own door: gives what it has to the next in the chain, from a thread."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        # Now, for the driver has one thing at a time done: while this worker opens another's
        # memory, which takes milliseconds, the next in the chain would wait for its description.
        self._parts = ipc_memory.described(transfer.regions)
        self._listener = Listener()
        self._lock = threading.Lock()
        self._next: Channel | None = None
        self._telling = False
        self._have = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="warmcast-relay", daemon=True)

    @property
    def address(self) -> Address:
        """Where the next in the chain connects."""
        return self._listener.address

    @contextmanager
    def running(self) -> Iterator[_Relay]:
        """Serve while the context is open."""
        self._thread.start()
        try:
            yield self
        finally:
            self._listener.end()
            with self._lock:
                if self._next is not None:
                    self._next.end()
            self._thread.join()
            self._listener.close()

    def advance(self, have: int) -> None:
        """The first ``have`` bytes are there now."""
        with self._lock:
            self._have = have
            self._tell()

    def finish(self, seconds: float) -> None:
        """Wait for the next in the chain, which is as far behind as a copy takes.

        ``seconds``: how long it may take at most. It can have the rest from the sender.
        """
        self._listener.end()  # nobody new
        with self._lock:
            waited = self._next is not None
        if waited:
            self._over.wait(min(seconds, self._transfer.deadline.remaining()))

    def _serve(self) -> None:
        taken = self._listener.accept("ipc: next in the chain", self._transfer.deadline)
        if taken is None:
            return
        channel, _ = taken
        with self._lock:
            self._next = channel
        try:
            while (message := self._message(channel)).kind != "done":
                if message.kind == "want":
                    _give(self._transfer, channel, self._parts)
                    with self._lock:
                        self._telling = True
                        self._tell()
        except TransferFailed as cause:
            log.info("the next in the chain goes on without this worker: %s", cause)
        finally:
            with self._lock:
                self._next = None
                channel.close()
            self._over.set()

    def _message(self, channel: Channel) -> Message:
        received = channel.receive(self._transfer.deadline)
        if received is None:
            raise TransferFailed("ipc", expected="the next in the chain in time", found="nothing")
        close_fds(received.fds)
        return received.message

    def _tell(self) -> None:
        if self._next is None or not self._telling:
            return
        message = Message(kind="have", nbytes=self._have)
        # One that does not read is not waited for: the next message says it again.
        with suppress(TransferFailed):
            self._next.send(message, deadline=Deadline.after(0))


# Taking


class _Giver:
    """Somebody whose memory is read: the sender, or the one before in the chain."""

    def __init__(self, channel: Channel, device: int, *, has_all: bool) -> None:
        self.channel = channel
        self.memory = ipc_memory.Opened(device)
        self.gone: PeerError | None = None
        self._has_all = has_all
        self._have = 0

    @property
    def ready(self) -> int:
        """How many of the first bytes can be read."""
        return self.memory.nbytes if self._has_all else min(self._have, self.memory.nbytes)

    def listen(self) -> None:
        """Take what it has said, without waiting; ``gone`` tells what became of it, if anything."""
        try:
            while self.gone is None:
                received = self.channel.receive(Deadline.after(0))
                if received is None:
                    return
                if received.message.part is not None:
                    self.memory.add(received.message.part, received.fds)
                else:
                    close_fds(received.fds)
                if received.message.kind == "have":
                    self._have = received.message.nbytes
        except (TransferFailed, TransportUnusable) as cause:
            self.gone = without_frames(cause)


class _Pull:
    """The receiver's side: copies in order, as far as the giver has the bytes."""

    def __init__(self, transfer: Transfer, sender: Channel, relay: _Relay | None) -> None:
        self._transfer = transfer
        self._sender = sender
        self._relay = relay
        self._stream = torch.cuda.Stream(transfer.device)
        self._targets = _Cursor([(r.data_ptr(), r.numel()) for r in transfer.regions])
        self._asked = 0
        self._done = 0
        self._copies: deque[tuple[int, torch.cuda.Event]] = deque()
        self._givers: list[_Giver] = []

    @contextmanager
    def running(self) -> Iterator[_Pull]:
        """Ends every copy before the memory that it reads or writes may go."""
        try:
            yield self
        finally:
            ended = self._end_copies()
            for giver in self._givers:
                if ended:  # else the GPU hangs: what it may still read stays mapped
                    giver.memory.close()
                if giver.channel is not self._sender:
                    giver.channel.close()

    def run(self, before: Address | None) -> Span:
        """Fill the regions; when the first copy began and the last had ended."""
        # The memory may have been in use, by work that the current stream has yet to do.
        self._stream.wait_stream(torch.cuda.current_stream(self._transfer.device))
        giver = self._neighbour(before) if before is not None else None
        giver = giver or self._from_sender()
        moving = time.monotonic()
        progress = time.monotonic()
        while self._done < self._transfer.nbytes:
            giver.listen()
            if not self._asked and giver.ready:
                moving = time.monotonic()
            self._transfer.deadline.check("transferring weights")
            moved = self._ask(giver) | self._settle()
            if moved:
                progress = time.monotonic()
                continue
            self._transfer.alive()
            stands = time.monotonic() - progress > _STALL and not self._copies
            lost = giver.gone is not None and giver.ready <= self._asked
            if giver.channel is not self._sender and (stands or lost):
                log.info("the one before in the chain is passed by: %s", giver.gone or "it stalls")
                giver = self._from_sender()
                progress = time.monotonic()
            elif lost and not self._copies:
                raise giver.gone or TransferFailed("ipc")
            time.sleep(_POLL)
        ended = time.monotonic()
        self._part(ended - moving)
        return moving, ended

    def _part(self, seconds: float) -> None:
        """Tell everybody that all is there; a giver that has gone meanwhile does not matter."""
        for channel in {self._sender, *(giver.channel for giver in self._givers)}:
            with suppress(TransferFailed):
                channel.send(Message(kind="done"), deadline=Deadline.after(_STALL))
        if self._relay is not None:
            self._relay.finish(_STALL + seconds)

    def _neighbour(self, address: Address) -> _Giver | None:
        """The one before in the chain, if it can be reached."""
        deadline = self._transfer.deadline.within(_STALL)
        try:
            channel = Channel.connect(address, "ipc: the one before in the chain")
        except OSError as cause:
            log.info("the one before in the chain is passed by: %s", cause)
            return None
        giver = self._add(channel, has_all=False)
        try:
            channel.send(Message(kind="hello", token=address.token), deadline=deadline)
            channel.send(Message(kind="want"), deadline=deadline)
        except TransferFailed as cause:
            log.info("the one before in the chain is passed by: %s", cause)
            return None
        return giver

    def _from_sender(self) -> _Giver:
        want = Message(kind="want")
        self._sender.send(want, deadline=self._transfer.deadline.within(_PATIENCE))
        return self._add(self._sender, has_all=True)

    def _add(self, channel: Channel, *, has_all: bool) -> _Giver:
        index = self._transfer.device.index
        device = index if index is not None else torch.cuda.current_device()
        self._givers.append(_Giver(channel, device, has_all=has_all))
        return self._givers[-1]

    def _ask(self, giver: _Giver) -> bool:
        """Start copies of what the giver has; whether there was any."""
        sources = _Cursor(giver.memory.extents)
        started = False
        while len(self._copies) < _DEPTH and self._asked < giver.ready:
            end = min(self._asked + CHUNK, giver.ready, self._transfer.nbytes)
            runs = []
            while self._asked < end:
                to, room = self._targets.at(self._asked)
                source, there = sources.at(self._asked)
                nbytes = min(room, there, end - self._asked)
                runs.append((to, source, nbytes))
                self._asked += nbytes
            ipc_memory.copy(runs, self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
            self._copies.append((self._asked, event))
            started = True
        return started

    def _settle(self) -> bool:
        """Count the copies that have ended, and pass on that they have; whether any had."""
        before = self._done
        while self._copies and self._copies[0][1].query():
            self._done = self._copies.popleft()[0]
        if self._done == before:
            return False
        if self._relay is not None:
            self._relay.advance(self._done)
            with suppress(TransferFailed):
                have = Message(kind="have", nbytes=self._done)
                self._sender.send(have, deadline=Deadline.after(0))
        return True

    def _end_copies(self) -> bool:
        """Wait for copies under way, as long as ``_DEPTH`` of them may take; whether they ended."""
        limit = Deadline.after(_COPIES)
        while self._copies and not self._copies[-1][1].query():
            if limit.expired:
                return False
            time.sleep(_POLL)
        self._copies.clear()
        return True


class _Cursor:
    """Finds the place of a position in runs of memory, (address, bytes) each, that follow on each
    other. Positions are asked for in ascending order.
    """

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self._runs = runs
        self._number = 0
        self._begin = 0  # the run's first position

    def at(self, position: int) -> tuple[int, int]:
        """The address of a position, and how many bytes follow in its run."""
        while position >= self._begin + self._runs[self._number][1]:
            self._begin += self._runs[self._number][1]
            self._number += 1
        address, nbytes = self._runs[self._number]
        return address + position - self._begin, self._begin + nbytes - position
