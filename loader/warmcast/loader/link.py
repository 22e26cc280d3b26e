"""The way from host memory to one GPU: a stream that all threads of a load bring their bytes to.

By C, where that was built (:mod:`pump`), else by Python (:mod:`dma`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from warmcast.loader import dma, pump
from warmcast.loader.chunks import Chunk, Copy
from warmcast.manifests.deadline import Deadline


class Sender(Protocol):
    """Brings a file's bytes through some slots, in one thread. Slots are known by their numbers.

    Errors of the driver's are :class:`WarmcastError`.
    """

    def wait(self, slot: int, deadline: Deadline) -> None:
        """Return when the last copy from a slot has ended."""

    def bring(self, slot: int, copies: Sequence[Copy]) -> None:
        """Have a slot's bytes copied to their places."""

    def load(self, chunk: Chunk) -> None:
        """Take note of where the bytes of a chunk go."""

    def pump(self, cached: tuple[int, int], sent: int, turn: int) -> tuple[int, int]:
        """Bring of that chunk what can be read at once, by a descriptor and ``preadv2``'s flags.

        ``sent`` of its bytes were brought before, and ``turn`` is the slot that was used last.
        Gives both as they are then; none may have been sent.
        """

    def mark(self) -> int:
        """What the link reaches when all that was brought so far has been copied."""

    def end(self) -> None:
        """Return when all copies from the slots have ended, or will not be made: they are free."""


class Link(Protocol):
    """What threads have in common; ``slot`` is the length of slots that is best for it."""

    slot: int

    def sender(self, address: int, nbytes: int, slots: int, *, pinned: bool) -> Sender:
        """What one thread brings its bytes with, by slots of ``nbytes`` from an address on."""

    def begin(self, deadline: Deadline) -> None:
        """Return when all that was brought so far stands in the stream."""

    def reach(self, mark: int, deadline: Deadline) -> None:
        """Return when all has been copied that a sender had brought when it gave the mark.

        Until then what is brought to the same place may be copied before it.
        """

    def free(self) -> None:
        """Give everything back; all senders are done."""


@contextmanager
def linked(stream: int) -> Iterator[Link]:
    """A link by a stream, given by its handle, of the GPU whose context is the current one."""
    link: Link = pump.link(stream) or dma.Link(stream)
    try:
        yield link
    finally:
        link.free()
