"""Gloo: TCP between the CPUs of two workers, for models that are not on a GPU.

A process group of two, made for one transfer and gone after it. The two find each other through
the registry instead of a store of torch's own: no port is opened but the pair's, on the address by
which the registry is reached.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from warmcast.loader.errors import RegistryUnavailable, TransferFailed
from warmcast.loader.registry import BEAT, mailbox
from warmcast.loader.transports import Endpoint, Receiving, Sending, Span, Transfer

_PIECE = 16 << 20
_NO_PROGRESS = 10.0
"""Seconds that one piece may take before the peer counts as gone."""

_GLOO_PATIENCE = 5
"""Gloo waits this many times its timeout for a connection (``Pair::waitUntilConnected``)."""

_SENDER, _RECEIVER = 0, 1
_VERSION = torch.__version__.partition("+")[0]
_SEAL = hashlib.sha256().digest_size


class Gloo:
    """Send and receive over a gloo pair."""

    name = "gloo"

    def usable(self, device: torch.device) -> bool:
        """On the CPU, where torch has gloo."""
        return device.type == "cpu" and dist.is_available() and dist.is_gloo_available()

    def objection(self, mine: Endpoint, theirs: Endpoint) -> str | None:
        """Both have to be on their CPU."""
        return None if theirs.device == "cpu" else f"the peer's weights are on {theirs.device}"

    def unfit(self, regions: Sequence[torch.Tensor]) -> str | None:
        """All memory can be sent."""
        return None

    @contextmanager
    def sending(self, transfer: Transfer) -> Iterator[Sending]:
        """Nothing to offer: both know the request, under which they find each other."""

        def send(_ticket: str) -> None:
            self._run(transfer, _SENDER, lambda pair, piece: pair.send([piece], _RECEIVER, 0))

        yield Sending("", send)

    @contextmanager
    def receiving(self, transfer: Transfer, offer: str) -> Iterator[Receiving]:
        """Nothing to hand over."""

        def receive() -> Span:
            began = time.monotonic()
            self._run(transfer, _RECEIVER, lambda pair, piece: pair.recv([piece], _SENDER, 0))
            return began, time.monotonic()

        yield Receiving("", receive)

    def _run(self, transfer: Transfer, rank: int, move: Callable[[Any, torch.Tensor], Any]) -> None:
        store = _RegistryStore(transfer)
        try:
            pair = dist.ProcessGroupGloo(store, rank, 2, _options(transfer))
            for region in transfer.regions:
                for begin in range(0, region.numel(), _PIECE):
                    transfer.deadline.check("transferring weights")
                    transfer.alive()
                    work = move(pair, region[begin : begin + _PIECE])
                    patience = min(_NO_PROGRESS, transfer.deadline.remaining())
                    work.wait(timedelta(seconds=max(patience, 0.001)))
        except RegistryUnavailable as cause:
            raise TransferFailed(f"gloo: {cause}") from cause
        except RuntimeError as cause:
            raise TransferFailed(
                "gloo",
                expected="the peer to go on",
                found=str(cause).split("\n", 1)[0].rpartition("] ")[2],
            ) from cause


def _options(transfer: Transfer) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs know less of it than it has
    options = gloo._Options()
    options._threads = 1
    patience = min(_NO_PROGRESS, transfer.deadline.remaining())
    options._timeout = timedelta(seconds=max(patience / _GLOO_PATIENCE, 0.001))
    options._devices = [gloo.create_device(hostname=transfer.address)]
    return options


def _seal(data: bytes) -> bytes:
    return hashlib.sha256(f"torch {_VERSION}\n".encode() + data).digest()


class _RegistryStore(Store):
    """The store through which gloo's pair exchanges addresses, kept in the registry.

    Addresses are sealed: gloo reads them unchecked, and damaged ones, or those of another
    version, can end the process.
    """

    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self._registry = transfer.registry
        self._request = transfer.request
        self._alive = transfer.alive
        self._deadline = transfer.deadline.within(_NO_PROGRESS)

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._registry.push(self._box(key), _seal(data) + data, self._deadline)

    def get(self, key: str) -> bytes:
        box = self._box(key)
        while (value := self._registry.peek(box, self._deadline.within(BEAT))) is None:
            self._alive()
            if self._deadline.expired:
                raise TransferFailed("gloo", expected="the peer's address in time", found="none")
        data = value[_SEAL:]
        if value[:_SEAL] != _seal(data):
            raise TransferFailed(
                "gloo", expected=f"an address as torch {_VERSION} writes it", found="another"
            )
        return data

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def _box(self, key: str) -> str:
        return mailbox(f"{self._request}/{key}")
