"""What has to happen before the process ends: at exit, and at SIGTERM.

Presence and leases are given up. SIGTERM is how schedulers end a worker. Its handler withdraws
first and then does what would have happened without us: the handler that stood before, or the end
of the process. It is installed only in the main thread, where Python allows it; elsewhere presences
expire within seconds.

At exit, threads that call torch are ended. One that comes back from C++ when the interpreter is
being torn down is unwound through frames that allow no unwinding (Python before 3.14): the process
would abort, and its exit code be lost.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from functools import cache
from types import FrameType
from typing import Any, Protocol

from warmcast.manifests.deadline import Deadline

_PATIENCE = 3.0
"""Seconds that leaving, and then the end of threads, may take."""


class Leaver(Protocol):
    """Something that gives up what it holds in the registry."""

    def leave(self) -> None:
        """Give it up now, within a second or so, whatever else is going on."""


class Threaded(Protocol):
    """Something whose threads call torch."""

    def stop(self) -> None:
        """Have them end soon."""

    def join(self, deadline: Deadline) -> None:
        """Wait until they have, or time is over."""


_leavers: weakref.WeakSet[Any] = weakref.WeakSet()
_threaded: weakref.WeakSet[Any] = weakref.WeakSet()
_held: list[object] = []
_before: list[Any] = []  # the handler that stood before ours, once ours is installed


def on_exit(leaver: Leaver) -> None:
    """Have ``leaver.leave()`` called at exit and at SIGTERM, as long as it exists."""
    _at_exit()
    _leavers.add(leaver)
    if not _before and threading.current_thread() is threading.main_thread():
        _before.append(signal.signal(signal.SIGTERM, _terminated))


def ended_at_exit(threaded: Threaded) -> None:
    """Have the threads of ``threaded`` ended at exit, as long as it exists."""
    _at_exit()
    _threaded.add(threaded)


@cache
def _at_exit() -> None:
    atexit.register(_exit)


def _exit() -> None:
    # A thread that lets go of the last of them later would free tensors, which is a call of torch.
    _held.extend([*_leavers, *_threaded])
    _leave_all()
    ending = list(_threaded)
    for threaded in ending:
        threaded.stop()
    deadline = Deadline.after(_PATIENCE)
    for threaded in ending:
        threaded.join(deadline)


def _leave_all() -> None:
    for leaver in list(_leavers):
        leaver.leave()


def _terminated(number: int, frame: FrameType | None) -> None:
    # The interrupted thread may hold a lock that leaving needs; another thread does not.
    leaving = threading.Thread(target=_leave_all, name="warmcast-goodbye", daemon=True)
    leaving.start()
    leaving.join(_PATIENCE)
    before = _before[0]
    if callable(before):
        before(number, frame)
    elif before is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
