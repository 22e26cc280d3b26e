"""One thread that keeps alive what expires: presences and leases in the registry."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from warmcast.loader.errors import RegistryUnavailable
from warmcast.loader.registry import BEAT
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded

log = logging.getLogger("warmcast")

Beat = Callable[[Deadline], bool]
"""Renews something; False when there is nothing left to renew."""


class Heartbeat:
    """Runs every beat once a second, until it is removed or the heartbeat is closed.

    A registry that does not answer is asked again at the next beat. The thread runs only while
    there is something to keep.
    """

    def __init__(self) -> None:
        self._beats: dict[str, Beat] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def keep(self, name: str, beat: Beat) -> None:
        """Renew something from now on, under a name."""
        with self._changed:
            self._beats[name] = beat
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="warmcast-heartbeat", daemon=True
                )
                self._thread.start()

    def drop(self, name: str) -> None:
        """Stop renewing what was kept under a name; the thread ends with the last."""
        with self._changed:
            self._beats.pop(name, None)
            self._changed.notify_all()
            thread = self._thread if not self._beats else None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def close(self) -> None:
        """Stop renewing everything, and end the thread."""
        for name in list(self._beats):
            self.drop(name)

    def _run(self) -> None:
        while self._beat_all():
            with self._changed:
                if self._beats:
                    self._changed.wait(BEAT)

    def _beat_all(self) -> bool:
        """One beat of each; whether there was any. Between the rounds the thread holds none."""
        with self._changed:
            beats = dict(self._beats)
            if not beats:
                self._thread = None
                return False
        for name, beat in beats.items():
            try:
                kept = beat(Deadline.after(BEAT))
            except (RegistryUnavailable, DeadlineExceeded) as cause:
                log.warning("%s not renewed: %s", name, cause)
                continue
            if not kept:
                with self._changed:
                    if self._beats.get(name) is beat:
                        del self._beats[name]
        return True
