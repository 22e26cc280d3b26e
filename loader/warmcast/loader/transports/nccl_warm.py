"""What NCCL does but once in a process, done beside something else.

The first communicator of a process takes 0.4 s more than those that follow: NCCL loads its kernels
into the GPU, and looks around. A communicator of one rank does all that. While it does, other calls
to the GPU wait, so nothing is done beforehand where NCCL may not be needed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from warmcast.loader.transports import Transport
from warmcast.loader.transports import nccl_library as nccl
from warmcast.loader.transports.nccl_communicator import Communicator
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError

log = logging.getLogger("warmcast")

_PATIENCE = 10.0


@contextmanager
def warming(transports: Sequence[Transport], device: torch.device) -> Iterator[None]:
    """Warm NCCL up beside what the context does, where it is the first of the transports."""
    if not transports or transports[0].name != "nccl":
        yield
        return
    thread = threading.Thread(target=_warm, args=(device,), name="warmcast-warm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(_PATIENCE)


@cache
def _warm(device: torch.device) -> None:
    comm = Communicator(device, Deadline.after(_PATIENCE).check)
    try:
        unique = nccl.unique_id()
        comm.create(unique, 0, 1, None)
        comm.connect()
    except WarmcastError as cause:
        log.info("nccl is not warm: %s", cause)
        comm.abort()
    else:
        comm.close()
