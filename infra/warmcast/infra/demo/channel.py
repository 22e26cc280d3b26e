"""The pipe between the demo and a process of its own; both ends.

    demo -> process, standard input     one word a line: what to do next
    process -> demo, standard output    one JSON object a line; {"error": line} is its last

A process ends with the demo, however that ends: it reads the end of its input. What libraries
print in it goes to its log, and the log's last line tells why it ended before its time.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, UsageError, WarmcastError, one_line

_CHUNK = 1 << 16
_END = 10.0
"""Seconds that a process has to end by itself when it is asked to."""


class Ended(WarmcastError):
    """A process of the demo failed, or ended before its time."""


class Child:
    """The demo's end: a process, which ends with this context at the latest."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
    ) -> None:
        """Start a Python ``module``; its log and its temporary files go to ``folder``."""
        self.name = name
        self._log = folder / "log"
        self._lines = b""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                env={**env, "TMPDIR": str(folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the demo, which ends its processes
            )

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def tell(self, word: str) -> None:
        """Send a word. Raises :class:`Ended` if nobody is there to read it."""
        try:
            os.write(self._process.stdin.fileno(), f"{word}\n".encode())  # type: ignore[union-attr]
        except BrokenPipeError:
            raise self._gone() from None

    def answer(self, deadline: Deadline) -> dict[str, Any]:
        """The next record. Raises :class:`Ended`, :class:`DeadlineExceeded`."""
        stdout = self._process.stdout.fileno()  # type: ignore[union-attr]
        while b"\n" not in self._lines:
            if not select.select([stdout], [], [], min(deadline.remaining(), _LONG))[0]:
                deadline.check(f"waiting for {self.name}")
                continue
            data = os.read(stdout, _CHUNK)
            if not data:
                raise self._gone()
            self._lines += data
        line, _, self._lines = self._lines.partition(b"\n")
        record: dict[str, Any] = json.loads(line)
        if "error" in record:
            raise Ended(f"{self.name}: {record['error']}")
        return record

    def end(self) -> None:
        """Ask the process to end, which lets it take leave of its peers; returns when it has."""
        self.tell("end")
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"{self.name} did not end in {_END:.0f} s") from None

    def kill(self) -> None:
        """SIGKILL: the process cannot take leave. Returns when it is gone."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _gone(self) -> Ended:
        code = self._process.wait()
        words = self._log.read_text(errors="replace").strip().splitlines()
        found = words[-1] if words else f"exit code {code} and no word"
        return Ended(self.name, expected="an answer", found=found)


_LONG = 60.0
"""Seconds of one look at a pipe, where the deadline is farther away or never."""


class Channel:
    """The process's end."""

    def __init__(self) -> None:
        # Whatever else writes to standard output writes to the log instead.
        self._out = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="demo-channel", daemon=True).start()

    def tell(self, record: Mapping[str, Any]) -> None:
        """Send a record."""
        os.write(self._out, json.dumps(record).encode() + b"\n")

    def next_word(self) -> str:
        """The next word that the demo says."""
        return self._words.get()

    def wait_for(self, word: str) -> None:
        """Return when the demo says ``word``, the next that it has to say."""
        heard = self.next_word()
        if heard != word:
            raise UsageError("the demo", expected=f"to say {word!r}", found=repr(heard))

    def _listen(self) -> None:
        # Not through sys.stdin: a thread that sleeps in it would hold its lock at the end.
        text = b""
        while data := os.read(0, _CHUNK):
            *words, text = (text + data).split(b"\n")
            for word in words:
                self._words.put(word.decode())
        os._exit(1)


def serve(act: Callable[[Channel], None]) -> None:
    """Be a process of the demo: run ``act``, and tell the demo of an error."""
    channel = Channel()
    try:
        act(channel)
    except Exception as cause:  # noqa: BLE001 - the last handler of a process
        traceback.print_exc()
        known = isinstance(cause, WarmcastError)
        channel.tell({"error": one_line(cause if known else f"{type(cause).__name__}: {cause}")})
        sys.exit(1)
