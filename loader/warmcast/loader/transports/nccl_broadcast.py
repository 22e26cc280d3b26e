"""The bytes of one broadcast, on either side of it.

Large regions go from where they lie to where they belong, in one group. Small ones are packed (see
:mod:`nccl_packing`): the sender gathers a chunk while the one before is on its way, the receiver
scatters it while the next one is, so the staging is two chunks. Copies run on a stream of their
own; events order them and the broadcasts, and the host waits only for the last.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from warmcast.loader.transports import Span, nccl_packing
from warmcast.loader.transports.nccl_communicator import Communicator

_BUFFERS = 2

_WORD = torch.int64
"""What is copied at a time where a region's place and length allow it."""


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Views of small regions, and of their places in a buffer."""

    regions: list[Tensor] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)


class Payload:
    """The regions of one transfer, and the staging through which small ones ride.

    ``can_pack`` is False where there is no room for the staging: they can then only go one by one.
    """

    def __init__(self, regions: Sequence[Tensor], device: torch.device) -> None:
        self._regions: Sequence[Tensor] = regions
        self._device = device
        self._plan = nccl_packing.packed([region.numel() for region in regions])
        self._buffers: list[Tensor] = []
        self._copies: list[tuple[_Pairs, _Pairs]] = []
        self.can_pack = self._allocate()

    @property
    def memory(self) -> list[Tensor]:
        """What the GPU reads and writes."""
        return [*self._regions, *self._buffers]

    def release(self) -> None:
        """Let go of all memory, though somebody may keep an error that came by here."""
        self._buffers.clear()
        self._copies.clear()
        self._regions = ()

    def prepare(self) -> None:
        """Do the host's part of packing beforehand: it takes some 3 µs a small region."""
        if self._copies or not self._buffers:
            return
        for number, chunk in enumerate(self._plan.chunks):
            buffer = self._buffers[number % _BUFFERS]
            by_word, by_byte = _Pairs(), _Pairs()
            for index, offset in chunk.places:
                region = self._regions[index]
                place = buffer[offset : offset + region.numel()]
                if (region.data_ptr() | region.numel()) % _WORD.itemsize:
                    pairs = by_byte
                else:
                    pairs, region, place = by_word, region.view(_WORD), place.view(_WORD)
                pairs.regions.append(region)
                pairs.places.append(place)
            self._copies.append((by_word, by_byte))

    def move(self, comm: Communicator, *, sending: bool, packed: bool) -> Span:
        """Send as rank 0, or receive; all ranks say alike whether small regions are packed.

        Returns when the GPU began, and when all was there.
        """
        copies = torch.cuda.Stream(self._device)
        # The memory may have been in use, by work that the current stream has yet to do.
        for stream in (comm.stream, copies):
            stream.wait_stream(torch.cuda.current_stream(self._device))
        began = comm.stream.record_event(torch.cuda.Event(enable_timing=True))
        if not packed:
            comm.broadcast(_memory(self._regions))
        else:
            if self._plan.direct:
                comm.broadcast(_memory(self._regions[index] for index in self._plan.direct))
            self._move_chunks(comm, copies, sending=sending)
        comm.stream.wait_stream(copies)
        ended = comm.stream.record_event(torch.cuda.Event(enable_timing=True))
        comm.wait(ended, "transferring weights")
        now = time.monotonic()
        return now - float(began.elapsed_time(ended)) / 1e3, now

    def _move_chunks(self, comm: Communicator, copies: torch.cuda.Stream, *, sending: bool) -> None:
        self.prepare()
        free: list[torch.cuda.Event] = []  # of each chunk: when its buffer can be used again
        for number, chunk in enumerate(self._plan.chunks):
            filling, emptying = (copies, comm.stream) if sending else (comm.stream, copies)
            if number >= _BUFFERS:
                filling.wait_event(free[number - _BUFFERS])
            if sending:
                self._copy(number, copies, gather=True)
                comm.stream.wait_event(copies.record_event())
            comm.broadcast([(self._buffers[number % _BUFFERS].data_ptr(), chunk.nbytes)])
            if not sending:
                copies.wait_event(comm.stream.record_event())
                self._copy(number, copies, gather=False)
            free.append(emptying.record_event())

    def _copy(self, number: int, stream: torch.cuda.Stream, *, gather: bool) -> None:
        with torch.cuda.stream(stream):
            for pairs in self._copies[number]:
                if pairs.regions and gather:
                    torch._foreach_copy_(pairs.places, pairs.regions)
                elif pairs.regions:
                    torch._foreach_copy_(pairs.regions, pairs.places)

    def _allocate(self) -> bool:
        nbytes = max((chunk.nbytes for chunk in self._plan.chunks), default=0)
        try:
            self._buffers = [
                torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                for _ in self._plan.chunks[:_BUFFERS]
            ]
        except torch.OutOfMemoryError:
            self._buffers = []
            return False
        return True


def _memory(regions: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    return ((region.data_ptr(), region.numel()) for region in regions)
