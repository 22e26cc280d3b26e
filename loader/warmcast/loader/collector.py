"""Python's garbage collector during a load, which makes many objects and drops few.

A full collection of a process that has imported torch takes a tenth of a second, as long as a load
from a peer, and a load of some thousand tensors would set off several.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_FEW = 10_000
"""Objects that CPython may have frozen itself (3.12 does, some hundreds, when it starts)."""


@contextmanager
def frozen() -> Iterator[None]:
    """Have the collector look at nothing older than the context; it goes on with what is newer.

    Nothing happens in a process that has frozen objects of its own: to thaw them is not ours.
    """
    if gc.get_freeze_count() > _FEW:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
