"""A GPU's context in the thread at hand, which calls of the driver need."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from warmcast.loader import driver


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make a GPU's context the thread's current one.

    Torch does so only for another device than the thread's; and a call of the runtime that would
    do it in a new thread takes longer than all else that a thread needs to begin.
    """
    with torch.cuda.device(device):
        context = _context(torch.cuda.current_device())
        driver.check("cuCtxSetCurrent", driver.prompt().cuCtxSetCurrent(context))
        yield


@cache
def _context(index: int) -> driver.Handle:
    """A GPU's primary context, which is torch's; kept as long as the process lives, as torch does.

    Source: CUDA driver API, primary context management.
    """
    number, context = ctypes.c_int(), driver.Handle()
    driver.check("cuDeviceGet", driver.prompt().cuDeviceGet(ctypes.byref(number), index))
    retained = driver.waiting().cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
    driver.check("cuDevicePrimaryCtxRetain", retained)
    return context
