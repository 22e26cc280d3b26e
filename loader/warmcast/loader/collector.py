"""Python's garbage collector while many objects are made and few are dropped.

A full collection of a process that has imported torch takes a tenth of a second, as long as a load
from a peer. A model of many small tensors makes millions of objects; the collector comes by after
every 700, and looks at all that are new again and again, for half of the time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SELDOM = 1_000_000
"""Objects more than before, after which the youngest are looked at."""

_FEW = 10_000
"""Objects that CPython may have frozen itself (3.12 does, some hundreds, when it starts)."""


@contextmanager
def quiet() -> Iterator[None]:
    """Have the collector look seldom, and at nothing older than the context.

    What a process has set itself stays: frozen objects are not thawed, a rarer collector is not
    made busier. Contexts may overlap, in threads too: the last one to end puts all back.
    """
    _collector.begin()
    try:
        yield
    finally:
        _collector.end()


class _Collector:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts = 0
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        with self._lock:
            self._contexts += 1
            before = gc.get_threshold()
            if 0 < before[0] < _SELDOM:
                self._undo.append(lambda: _restore(before))
                gc.set_threshold(_SELDOM, *before[1:])
            if gc.get_freeze_count() <= _FEW:
                self._undo.append(gc.unfreeze)
                gc.freeze()

    def end(self) -> None:
        with self._lock:
            self._contexts -= 1
            while not self._contexts and self._undo:
                self._undo.pop()()


def _restore(before: tuple[int, int, int]) -> None:
    if gc.get_threshold()[0] == _SELDOM:  # else somebody has set another meanwhile
        gc.set_threshold(*before)


_collector = _Collector()
