"""The bound on the converting process's memory, by RLIMIT_DATA, and torch, which it does not count.

Importing torch takes most of a second and some memory of its own. Most checkpoints need nothing of
it: their bytes are copied as they lie. So it is imported where it is first used, and the bound is
moved by what that took. Where no bound was set, as in other processes, none is.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def set_bound(nbytes: int) -> None:
    """Bound what the process may take beyond what it held when this was first called.

    A soft limit, because nothing that comes in runs here, and it is moved.
    """
    if _state.held is None:
        _state.held = _data_nbytes()
    _state.allowed = nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (_state.held + nbytes, resource.RLIM_INFINITY))


def import_torch() -> None:
    """Import torch, if that has not been done, and move the bound by what it takes."""
    if "torch" in sys.modules:
        return
    # One thread: stacks and arenas of a pool would count against the bound.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = _data_nbytes()
    if _state.held is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    import torch

    torch.set_num_threads(1)
    if _state.held is not None:
        _state.held += _data_nbytes() - before
        set_bound(_state.allowed)


class _State:
    held: int | None = None
    allowed = 0


_state = _State()


def _data_nbytes() -> int:
    """The bytes that RLIMIT_DATA counts, as they are now."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:")
    )
