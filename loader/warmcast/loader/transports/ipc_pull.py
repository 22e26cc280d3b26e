"""The receiver's side of ``ipc``: copies out of another process's memory, in order, as far as the
giver has the bytes; from the one before in the chain, and where that fails from the sender.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from warmcast.loader.errors import (
    PeerError,
    TransferFailed,
    TransportUnusable,
    without_frames,
)
from warmcast.loader.transports import Span, Transfer, ipc_memory
from warmcast.loader.transports.ipc_channel import (
    PATIENCE,
    STALL,
    Address,
    Channel,
    Message,
    close_fds,
)
from warmcast.loader.transports.ipc_relay import Relay
from warmcast.manifests.deadline import Deadline

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


class Pull:
    """The receiver's side: copies in order, as far as the giver has the bytes."""

    def __init__(self, transfer: Transfer, sender: Channel, relay: Relay | None) -> None:
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
    def running(self) -> Iterator[Pull]:
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
            stands = time.monotonic() - progress > STALL and not self._copies
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
                channel.send(Message(kind="done"), deadline=Deadline.after(STALL))
        if self._relay is not None:
            self._relay.finish(STALL + seconds)

    def _neighbour(self, address: Address) -> _Giver | None:
        """The one before in the chain, if it can be reached."""
        deadline = self._transfer.deadline.within(STALL)
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
        self._sender.send(want, deadline=self._transfer.deadline.within(PATIENCE))
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
