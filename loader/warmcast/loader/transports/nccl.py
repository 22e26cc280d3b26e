"""NCCL: between two GPUs, of one host or of two.

One communicator of two ranks, made for one transfer: nonblocking, polled under the deadline, and
aborted when it is late. All regions go in one group call, as bytes, on a stream of their own.
Connections are made lazily, so progress is polled after the group's end too, and events are
recorded only then.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from warmcast.loader.errors import TransferFailed
from warmcast.loader.transports import Endpoint, Receiving, Sending, Span, Transfer
from warmcast.loader.transports import nccl_library as nccl

_SENDER, _RECEIVER = 0, 1
_POLL = 0.0002
"""Seconds between looks at a communicator or event: NCCL offers nothing to wait on."""

_ABORT = 5.0
"""Seconds that an abort may take before its thread is left to end by itself."""


class Nccl:
    """Broadcast from the sender to the receiver."""

    name = "nccl"

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
        """Nothing to offer: the receiver makes what both need."""
        yield Sending("", lambda ticket: _run(transfer, _unique(ticket), _SENDER))

    @contextmanager
    def receiving(self, transfer: Transfer, offer: str) -> Iterator[Receiving]:
        """The ticket is a unique id, made by the receiver: one that nobody joins leaks a thread."""
        unique = nccl.unique_id()
        joined = False

        def receive() -> Span:
            nonlocal joined
            began = time.monotonic()
            _run(transfer, unique, _RECEIVER)
            joined = True
            return began, time.monotonic()

        try:
            yield Receiving(unique.hex(), receive)
        finally:
            if not joined:
                nccl.release(unique)


def _unique(ticket: str) -> bytes:
    try:
        unique = bytes.fromhex(ticket)
    except ValueError:
        unique = b""
    if len(unique) != nccl.UNIQUE_ID_NBYTES:
        raise TransferFailed("nccl", expected="a unique id of 128 bytes", found=repr(ticket[:16]))
    return unique


def _run(transfer: Transfer, unique: bytes, rank: int) -> None:
    library = nccl.loaded()
    device = transfer.device
    with torch.cuda.device(device):
        comm = ctypes.c_void_p()
        configuration = nccl.config()
        result = library.ncclCommInitRankConfig(
            ctypes.byref(comm),
            2,
            nccl.UniqueId.from_buffer_copy(unique),
            rank,
            ctypes.byref(configuration),
        )
        try:
            nccl.check(result, "ncclCommInitRankConfig")
            _settle(transfer, comm, "creating the communicator")
            _broadcast(transfer, comm)
            nccl.check(library.ncclCommFinalize(comm), "ncclCommFinalize")
            _settle(transfer, comm, "closing the communicator")
        except BaseException:
            _abort(comm)
            raise
        nccl.check(library.ncclCommDestroy(comm), "ncclCommDestroy")


def _broadcast(transfer: Transfer, comm: ctypes.c_void_p) -> None:
    library = nccl.loaded()
    stream = torch.cuda.Stream(transfer.device)
    # The memory may have been in use, by work that the current stream has yet to do.
    stream.wait_stream(torch.cuda.current_stream(transfer.device))
    nccl.check(library.ncclGroupStart(), "ncclGroupStart")
    try:
        for region in transfer.regions:
            pointer = region.data_ptr()
            result = library.ncclBroadcast(
                pointer, pointer, region.numel(), nccl.UINT8, _SENDER, comm, stream.cuda_stream
            )
            nccl.check(result, "ncclBroadcast")
    finally:
        ended = library.ncclGroupEnd()
    nccl.check(ended, "ncclGroupEnd")
    _settle(transfer, comm, "starting the transfer")
    done = torch.cuda.Event()
    done.record(stream)
    _poll(transfer, comm, done.query, "transferring weights")


def _settle(transfer: Transfer, comm: ctypes.c_void_p, doing: str) -> None:
    """Wait until the communicator has done what was last asked of it."""
    _poll(transfer, comm, lambda: _state(comm) == nccl.SUCCESS, doing)


def _poll(transfer: Transfer, comm: ctypes.c_void_p, done: Callable[[], bool], doing: str) -> None:
    while not done():
        nccl.check(_state(comm), doing)
        transfer.deadline.check(doing)
        transfer.alive()
        time.sleep(_POLL)
    nccl.check(_state(comm), doing)


def _state(comm: ctypes.c_void_p) -> int:
    state = ctypes.c_int()
    nccl.check(
        nccl.loaded().ncclCommGetAsyncError(comm, ctypes.byref(state)), "ncclCommGetAsyncError"
    )
    return state.value


def _abort(comm: ctypes.c_void_p) -> None:
    """Abort in a thread: NCCL joins its own threads there, which may take seconds."""
    if not comm.value:
        return
    thread = threading.Thread(
        target=nccl.loaded().ncclCommAbort, args=(comm,), name="warmcast-abort", daemon=True
    )
    thread.start()
    thread.join(_ABORT)
