"""On which devices the demo's workers run: the GPUs, one each, or the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warmcast.loader.address import host_id
from warmcast.loader.transports import Endpoint, choose, transports_for


@dataclass(frozen=True, slots=True)
class Places:
    """Devices, taken in turn. ``shared``: two workers on one device can be each other's peers."""

    devices: tuple[str, ...]
    shared: bool
    why: str

    def of(self, number: int) -> str:
        """The device of worker ``number``, from 0."""
        return self.devices[number % len(self.devices)]


def find() -> Places:
    """The GPUs that torch sees; the CPU without one, or where a single one would have no peer."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return Places(("cpu",), shared=True, why="no GPU: the workers run on the CPU")
    shared = _peers_on_one_gpu()
    if count == 1 and not shared:
        why = "one GPU, on which two workers cannot be peers: they run on the CPU"
        return Places(("cpu",), shared=True, why=why)
    names = tuple(f"cuda:{index}" for index in range(count))
    name = torch.cuda.get_device_name(0)
    return Places(names, shared=shared, why=f"{count} × {name}")


def _peers_on_one_gpu() -> bool:
    transports = transports_for(torch.device("cuda", 0))
    endpoint = Endpoint(
        worker="demo",
        host=host_id(),
        device="cuda",
        gpu="cuda:0",
        nccl="",
        transports=tuple(transport.name for transport in transports),
    )
    return choose(transports, endpoint, endpoint, ())[0] is not None
