"""One rank of an NCCL communicator: nonblocking, polled, and ended in any case.

NCCL offers nothing to wait on: whatever was asked is polled, and a ``check`` that the owner gives
raises when the waiting has to end. A communicator is used by one thread. It ends by :meth:`close`
or :meth:`abort`, in a thread that is then the only one to call anything on it: NCCL joins threads
of its own there, which sleep for up to half a second.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from warmcast.loader.transports import nccl_library as nccl
from warmcast.loader.transports import nccl_sockets
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError

log = logging.getLogger("warmcast")

_SPIN = 0.0005
"""Seconds for which a poll does not sleep: a group of known connections is launched in 0.1 ms."""

_POLL = 0.0001
"""Seconds between looks at what takes longer."""

_ABORT = 5.0
"""Seconds that an abort may take before its thread is left to end by itself."""

_CLOSE = 5.0
"""Seconds that the other ranks may take to close, too; then they are taken for dead."""

_KERNELS = 60.0
"""Seconds after an abort in which kernels that do not end keep the memory that they may use."""


class Communicator:
    """A rank, and the stream on which its broadcasts run."""

    def __init__(self, device: torch.device, check: Callable[[str], None]) -> None:
        """``check`` is called with what is being done, and raises when that has to end."""
        self._device = device
        self._check = check
        self._handle = ctypes.c_void_p()
        self._size = 0
        self._bytes: torch.Tensor | None = None
        self._ports: frozenset[int] = frozenset()  # until the ranks have met: not NCCL's
        self._met = False
        self.connected = False
        # Before copies, and whatever else is ready to run: the other ranks wait for this one.
        self.stream = torch.cuda.Stream(device, priority=-1)

    def create(self, unique: bytes, rank: int, size: int, max_ctas: int | None) -> None:
        """Begin to join the communicator of an id. All ranks need the same ``max_ctas``.

        An id that not every rank joins is its maker's to release.
        """
        nccl.prepare()
        configuration = nccl.config(max_ctas)
        self._size = size
        self._ports = nccl_sockets.listening()
        with torch.cuda.device(self._device):
            result = nccl.loaded().ncclCommInitRankConfig(
                ctypes.byref(self._handle),
                size,
                nccl.UniqueId.from_buffer_copy(unique),
                rank,
                ctypes.byref(configuration),
            )
            nccl.check(result, "ncclCommInitRankConfig")

    def connect(self) -> None:
        """Wait for the communicator, connect, and wait until every rank has done so.

        Raises :class:`TransferFailed` and what ``check`` raises.
        """
        self._settle("creating the communicator")
        self._ports = nccl_sockets.listening() - self._ports
        self._met = True
        # Connections are made by the first broadcast, which takes longer than most weights do. A
        # byte from each rank to all others makes them, and says that this rank has.
        self._bytes = torch.zeros(self._size, dtype=torch.uint8, device=self._device)
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        self._launch((self._bytes.data_ptr() + rank, 1, rank) for rank in range(self._size))
        self.wait(self.stream.record_event(), "connecting")
        self.connected = True

    def broadcast(self, memory: Iterable[tuple[int, int]]) -> None:
        """Launch a group: (address, bytes) each from rank 0 to the same place of the others.

        Returns when the launch is done, so that events can be recorded behind it.
        """
        self._launch((address, nbytes, 0) for address, nbytes in memory)

    def wait(self, event: torch.cuda.Event, doing: str) -> None:
        """Wait until the GPU has come to an event."""
        self._poll(event.query, doing)

    def close(self) -> None:
        """End, in the background, what has done its work."""
        self._end(self._close, ())

    def abort(self, held: Sequence[torch.Tensor] = ()) -> bool:
        """End what has not; whether that was done within ``_ABORT`` seconds.

        ``held`` is what the GPU may be reading or writing: it is kept until it no longer does.
        A communicator whose ranks have not met yet is not freed: NCCL (2.28) keeps three files of
        it, and some memory.
        """
        if not self._handle.value:
            return True
        thread = self._end(self._abort, (held,))
        thread.join(_ABORT)
        return not thread.is_alive()

    def _launch(self, broadcasts: Iterable[tuple[int, int, int]]) -> None:
        """Launch broadcasts, (address, bytes, root) each, in one group."""
        library = nccl.loaded()
        stream = self.stream.cuda_stream
        nccl.check(library.ncclGroupStart(), "ncclGroupStart")
        try:
            for address, nbytes, root in broadcasts:
                result = library.ncclBroadcast(
                    address, address, nbytes, nccl.UINT8, root, self._handle, stream
                )
                nccl.check(result, "ncclBroadcast")
        finally:
            ended = library.ncclGroupEnd()
        nccl.check(ended, "ncclGroupEnd")
        self._settle("starting the transfer")

    def _end(self, how: Callable[..., None], arguments: tuple[object, ...]) -> threading.Thread:
        def end() -> None:
            with self._without_the_stopped():
                how(*arguments)

        thread = threading.Thread(target=end, name="warmcast-nccl-end", daemon=True)
        thread.start()
        return thread

    @contextmanager
    def _without_the_stopped(self) -> Iterator[None]:
        """Cut off the processes for which NCCL waits too long; see :mod:`nccl_sockets`."""
        ports = self._ports if self._met else frozenset()
        timer = threading.Timer(_CLOSE, nccl_sockets.cut, (ports,))
        timer.name, timer.daemon = "warmcast-nccl-cut", True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _close(self) -> None:
        library = nccl.loaded()
        limit = Deadline.after(_CLOSE)
        self._check = limit.check
        try:
            nccl.check(library.ncclCommFinalize(self._handle), "ncclCommFinalize")
            self._settle("closing the communicator")
        except WarmcastError as cause:
            log.info("a communicator is aborted, having done its work: %s", cause)
            library.ncclCommAbort(self._handle)
        else:
            library.ncclCommDestroy(self._handle)
        self._bytes = None

    def _abort(self, _held: Sequence[torch.Tensor]) -> None:
        nccl.loaded().ncclCommAbort(self._handle)
        limit = Deadline.after(_KERNELS)
        while not self.stream.query() and not limit.expired:
            time.sleep(_POLL)
        self._bytes = None

    def _settle(self, doing: str) -> None:
        """Wait until the communicator has done what was last asked of it."""
        self._poll(lambda: self._state() == nccl.SUCCESS, doing)

    def _poll(self, done: Callable[[], bool], doing: str) -> None:
        spinning = time.monotonic() + _SPIN
        while not done():
            nccl.check(self._state(), doing)
            if time.monotonic() > spinning:
                self._check(doing)
                time.sleep(_POLL)
        nccl.check(self._state(), doing)

    def _state(self) -> int:
        state = ctypes.c_int()
        result = nccl.loaded().ncclCommGetAsyncError(self._handle, ctypes.byref(state))
        nccl.check(result, "ncclCommGetAsyncError")
        return state.value
