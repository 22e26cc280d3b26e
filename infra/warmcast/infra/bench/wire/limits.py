"""What the wire allows, and what the naive ways make of it.

    python -m warmcast.infra.bench.wire.limits copy NBYTES
    python -m warmcast.infra.bench.wire.limits broadcast RANK SIZE STORE NBYTES MODEL

``copy`` measures one copy from GPU 0 to GPU 1, in one process. ``broadcast`` is one rank of
several: one flat buffer, then the tensors of MODEL one by one as
``torch.distributed.broadcast`` and as raw ``ncclBroadcast`` do it. STORE is a file that the ranks
meet at. Each tells the seconds that the slowest rank took, the median of some tries.
"""

from __future__ import annotations

import ctypes
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from warmcast.infra.bench.wire.models import Shape
from warmcast.infra.demo.channel import Channel, serve
from warmcast.loader.transports import nccl_library as nccl

_TRIES = 5


def main(channel: Channel) -> None:
    """Measure what the first argument names."""
    what, *words = sys.argv[1:]
    if what == "copy":
        channel.tell({"seconds": _copy(int(words[0]))})
    else:
        channel.tell(_broadcasts(int(words[0]), int(words[1]), words[2], int(words[3]), words[4]))


def _copy(nbytes: int) -> float:
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1")
    torch.cuda.set_device(1)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)

    return _median(copy, lambda: None)


def _broadcasts(rank: int, size: int, store: str, nbytes: int, model: str) -> dict[str, float]:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    flat = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    shape = Shape(**json.loads(model))
    tensors = [
        torch.empty(math.prod(size), dtype=torch.bfloat16, device="cuda")
        for _ in range(shape.layers)
        for size in shape.layer.values()
    ]
    comm = _communicator(rank, size)
    stream = torch.cuda.Stream()

    def raw(each: list[Tensor]) -> None:
        for tensor in each:
            pointer, length = tensor.data_ptr(), tensor.nbytes
            handle = stream.cuda_stream
            nccl.check(
                nccl.loaded().ncclBroadcast(pointer, pointer, length, nccl.UINT8, 0, comm, handle),
                "ncclBroadcast",
            )
        stream.synchronize()

    def by_torch() -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        torch.cuda.synchronize()

    taken = {
        "flat": _slowest(lambda: raw([flat])),
        "raw": _slowest(lambda: raw(tensors)),
        "torch": _slowest(by_torch),
    }
    nccl.check(nccl.loaded().ncclCommDestroy(comm), "ncclCommDestroy")
    dist.destroy_process_group()
    return taken


def _communicator(rank: int, size: int) -> ctypes.c_void_p:
    """A communicator as one makes it who has all the time in the world: blocking."""
    unique: list[object] = [nccl.unique_id() if rank == 0 else None]
    dist.broadcast_object_list(unique, 0, device=torch.device("cpu"))
    identity = nccl.UniqueId.from_buffer_copy(unique[0])  # type: ignore[arg-type]
    library, comm = nccl.loaded(), ctypes.c_void_p()
    library.ncclCommInitRank.argtypes = (
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        nccl.UniqueId,
        ctypes.c_int,
    )
    nccl.check(
        library.ncclCommInitRank(ctypes.byref(comm), size, identity, rank), "ncclCommInitRank"
    )
    return comm


def _slowest(action: Callable[[], None]) -> float:
    """The median of the slowest rank's seconds."""

    def together() -> None:
        dist.barrier(group=None, device_ids=[torch.cuda.current_device()])
        torch.cuda.synchronize()

    seconds = torch.tensor(_median(action, together), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _median(action: Callable[[], None], before: Callable[[], None]) -> float:
    taken = []
    for _ in range(1 + _TRIES):
        before()
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    serve(main)
