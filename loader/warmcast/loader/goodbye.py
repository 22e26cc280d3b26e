"""Giving up presence and leases when the process ends: at exit, and at SIGTERM.

SIGTERM is how schedulers end a worker. Its handler withdraws first and then does what would have
happened without us: the handler that stood before, or the end of the process. It is installed only
in the main thread, where Python allows it; elsewhere presences expire within seconds.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any, Protocol


class Leaver(Protocol):
    """Something that gives up what it holds in the registry."""

    def leave(self) -> None:
        """Give it up now, within a second or so, whatever else is going on."""


_leavers: weakref.WeakSet[Any] = weakref.WeakSet()
_before: list[Any] = []  # the handler that stood before ours, once ours is installed


def on_exit(leaver: Leaver) -> None:
    """Have ``leaver.leave()`` called at exit and at SIGTERM, as long as it exists."""
    if not _leavers:
        atexit.register(_leave_all)
    _leavers.add(leaver)
    if not _before and threading.current_thread() is threading.main_thread():
        _before.append(signal.signal(signal.SIGTERM, _terminated))


def _leave_all() -> None:
    for leaver in list(_leavers):
        leaver.leave()


def _terminated(number: int, frame: FrameType | None) -> None:
    # The interrupted thread may hold a lock that leaving needs; another thread does not.
    leaving = threading.Thread(target=_leave_all, name="warmcast-goodbye", daemon=True)
    leaving.start()
    leaving.join(3.0)
    before = _before[0]
    if callable(before):
        before(number, frame)
    elif before is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
