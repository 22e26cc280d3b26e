"""Locks that are waited for no longer than the deadline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded


@contextmanager
def held(lock: threading.Lock, deadline: Deadline, doing: str) -> Iterator[None]:
    """Hold a lock; raises ``DeadlineExceeded``, naming what was being done."""
    if not lock.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX)):
        raise DeadlineExceeded(f"no time left while {doing}", do="give the job a longer deadline")
    try:
        yield
    finally:
        lock.release()
