"""A GPU's context in the thread at hand, which calls of the driver need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make a GPU's context the thread's current one."""
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # in a new thread only a call of the runtime does it
        yield
