"""Progress: bars on a terminal, a line now and then elsewhere, nothing in a library call.

Steps tell a :class:`Progress` what they do; they do not know who looks on.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

_EVERY = 5.0
"""Seconds between two lines about one stage."""


class Progress(Protocol):
    """What a deploy tells as it goes. ``advance`` is called from several threads."""

    def stage(self, what: str, total: int) -> AbstractContextManager[None]:
        """A stage over ``total`` bytes; stages do not overlap."""

    def advance(self, nbytes: int) -> None:
        """``nbytes`` of the present stage are done."""

    def note(self, line: str) -> None:
        """Something that a person should know."""


class Halved:
    """Told each byte twice, once read and once sent; tells each once. Safe between threads."""

    def __init__(self, tick: Callable[[int], None]) -> None:
        self._tick = tick
        self._lock = threading.Lock()
        self._odd = 0

    def __call__(self, nbytes: int) -> None:
        """Tell half of ``nbytes``."""
        with self._lock:
            whole, self._odd = divmod(nbytes + self._odd, 2)
        self._tick(whole)


class Silent:
    """Tells nobody."""

    @contextmanager
    def stage(self, what: str, total: int) -> Iterator[None]:
        """Nothing."""
        yield

    def advance(self, nbytes: int) -> None:
        """Nothing."""

    def note(self, line: str) -> None:
        """Nothing."""


class Lines:
    """Plain lines, for logs: a stage's beginning and end, and how far it is every 5 s."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or _to_stderr
        self._lock = threading.Lock()
        self._what = ""
        self._done = self._total = 0
        self._next = 0.0
        self._last = (0.0, 0)  # when the last line was written, and what was done by then

    @contextmanager
    def stage(self, what: str, total: int) -> Iterator[None]:
        """Write a line when the stage begins, and one when it ended well."""
        began = time.monotonic()
        with self._lock:
            self._what, self._done, self._total = what, 0, total
            self._next = began + _EVERY
            self._last = (began, 0)
        self.note(f"{what}: {nbytes_text(total)}")
        yield
        seconds = time.monotonic() - began
        rate = f", {nbytes_text(total / seconds)}/s" if total and seconds >= _EVERY else ""
        self.note(f"{what}: done in {seconds:.1f} s{rate}")

    def advance(self, nbytes: int) -> None:
        """Count, and write a line if the last is 5 s old."""
        with self._lock:
            self._done += nbytes
            if time.monotonic() < self._next:
                return
            present = time.monotonic()
            self._next = present + _EVERY
            done, total, what = self._done, self._total, self._what
            since, before = self._last
            self._last = (present, done)
        rate = (done - before) / (present - since)
        left = f", {(total - done) / rate:.0f} s left" if rate else ""
        self.note(
            f"{what}: {nbytes_text(done)} of {nbytes_text(total)}, {nbytes_text(rate)}/s{left}"
        )

    def note(self, line: str) -> None:
        """Write a line."""
        self._write(line)


class Bars:
    """Bars, for a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bars.add_task("", total=0, visible=False)

    @contextmanager
    def stage(self, what: str, total: int) -> Iterator[None]:
        """Show a bar while the stage lasts."""
        self._task = self._bars.add_task(what, total=total)
        with self._bars:
            yield

    def advance(self, nbytes: int) -> None:
        """Move the bar."""
        self._bars.advance(self._task, nbytes)

    def note(self, line: str) -> None:
        """Print a line above the bars."""
        self._console.print(line, markup=False, highlight=False)


def for_terminal() -> Progress:
    """Bars if standard error is a terminal, lines if not."""
    return Bars() if sys.stderr.isatty() else Lines()


def printable(text: str) -> str:
    """Text from outside without what a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def nbytes_text(nbytes: float) -> str:
    """A number of bytes for people: ``1.5 GB`` (1 GB is 1e9 bytes)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
