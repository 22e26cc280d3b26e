"""What a worker asks of its node's agent, over its Unix socket."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from urllib.parse import quote

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    DeadlineExceeded,
    NotFound,
    StoreError,
    StoreUnreachable,
)
from warmcast.manifests.manifest import Manifest, parse_manifest

_CONNECT = 1.0
_IDLE = 10.0
"""Seconds between two lines, at most: an agent that waits for a chunk says so more often."""

_MOST = 64 << 20


class NodeGone(StoreUnreachable):
    """The node's agent does not answer."""


class Arrival(NamedTuple):
    """A chunk that is there: of the manifest's file of a number, and where it came from."""

    file: int
    chunk: int
    tier: str


class _Answer(NamedTuple):
    sock: socket.socket
    response: http.client.HTTPResponse


class Files:
    """What an agent says of files that are wanted: where they are, and chunks as they come."""

    def __init__(self, answer: _Answer, lines: Iterator[str]) -> None:
        self._sock = answer.sock
        self._lines = lines
        told = json.loads(next(lines, "{}"))
        self.names: Mapping[int, Sequence[Path]] = {
            int(number): [Path(name) for name in names] for number, names in told.items()
        }
        """By a file's number, the names that its blob may have."""

    def __iter__(self) -> Iterator[Arrival]:
        for line in self._lines:
            file, chunk, tier = line.split(" ")
            yield Arrival(int(file), int(chunk), tier)

    def end(self) -> None:
        """Want no more; whoever waits for the next chunk, in another thread, gets an error."""
        with suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("node", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(min(_CONNECT, self.timeout or _CONNECT))
        self.sock.connect(str(self._path))
        self.sock.settimeout(self.timeout)


class NodeClient:
    """Calls to the agent at a socket; each has a connection of its own. Safe between threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"node agent at {path}"

    def there(self, deadline: Deadline) -> bool:
        """Whether an agent answers."""
        try:
            self._read("/healthz", deadline)
        except (StoreError, DeadlineExceeded):
            return False
        return True

    def wait_for(self, deadline: Deadline) -> None:
        """Return when an agent answers. Raises :class:`NodeGone` if none does in time."""
        while not deadline.expired:
            if self.there(deadline.within(_CONNECT)):
                return
            time.sleep(min(0.2, deadline.remaining()))
        raise NodeGone(self.url, expected="an answer", found="none", do="start `warmcast node`")

    def resolve(self, name: str, deadline: Deadline) -> str:
        """The digest that a ref names, as the agent knows it."""
        return self._read(f"/refs/{quote(name, safe='@/')}", deadline).decode("ascii")

    def manifest(self, digest: str, deadline: Deadline) -> Manifest:
        """The manifest of a digest."""
        return parse_manifest(self._read(f"/manifests/{digest}", deadline), digest, self.url)

    def signatures(self, digest: str, deadline: Deadline) -> Mapping[str, bytes]:
        """A manifest's signatures as the agent has seen them, by the names of their keys."""
        told = json.loads(self._read(f"/signatures/{digest}", deadline))
        return {str(name): bytes.fromhex(text) for name, text in told.items()}

    @contextmanager
    def files(self, digest: str, wanted: Iterable[int], deadline: Deadline) -> Iterator[Files]:
        """Files of a manifest, wanted while the context is open."""
        numbers = ",".join(map(str, wanted))
        with self._asked(f"/files/{digest}?wanted={numbers}", deadline) as answer:
            yield Files(answer, self._lines(answer, deadline))

    def others(self, digest: str, deadline: Deadline, ref: str = "") -> Mapping[str, Any]:
        """Agents to ask for chunks should this one go: ``addresses``, and a ``token`` for them.

        The agent looks up what ``ref`` names, to know it when the origin does not answer.
        """
        query = f"?ref={quote(ref, safe='')}" if "@" in ref else ""
        told: Mapping[str, Any] = json.loads(self._read(f"/others/{digest}{query}", deadline))
        return told

    def check(self, digest: str, deadline: Deadline) -> None:
        """Have the agent look whether the bytes of a manifest's files are what they should be."""
        self._read(f"/check/{digest}", deadline)

    def prefetch(self, digest: str, deadline: Deadline) -> Iterator[tuple[int, int]]:
        """Have all of a manifest brought; (bytes there, bytes in all), as they come.

        Raises :class:`StoreError` if it cannot be.
        """
        with self._asked(f"/prefetch/{digest}", deadline) as answer:
            for line in self._lines(answer, deadline):
                done, _, total = line.partition(" ")
                yield int(done), int(total)

    def _lines(self, answer: _Answer, deadline: Deadline) -> Iterator[str]:
        while True:
            deadline.check(f"waiting for the {self.url}")
            with self._explained():
                line = answer.response.readline(1 << 16).decode().rstrip("\n")
            if line == "end":
                return
            if line == ".":
                continue
            kind, _, why = line.partition(" ")
            if kind == "failed":
                raise StoreError(self.url, expected="all chunks", found=why)
            if not line:
                raise NodeGone(self.url, expected="an answer to its end", found="a part")
            yield line

    def _read(self, path: str, deadline: Deadline) -> bytes:
        with self._asked(path, deadline) as answer, self._explained():
            data = answer.response.read(_MOST + 1)
        if len(data) > _MOST:
            raise StoreError(self.url, expected=f"{_MOST} bytes at most", found="more")
        return data

    @contextmanager
    def _asked(self, path: str, deadline: Deadline) -> Iterator[_Answer]:
        deadline.check(f"asking the {self.url}")
        connection = _Connection(self.path, min(_IDLE, deadline.remaining()))
        try:
            with self._explained():
                connection.request("GET", path)
                response = connection.getresponse()
                said = "" if response.status in (200, 202) else response.read(4096).decode().strip()
            if response.status == 404:
                raise NotFound(f"{self.url}: {path}", found=said)
            if response.status not in (200, 202):
                raise StoreError(f"{self.url}: {path}", found=f"{response.status}: {said}")
            yield _Answer(connection.sock, response)
        finally:
            connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as cause:
            raise NodeGone(
                self.url, expected="an answer", found=str(cause) or type(cause).__name__
            ) from cause


class Progress:
    """A line that tells how far it is, on a terminal; now and then one, elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._began = time.monotonic()
        self._next = 0.0
        self._last = ""

    def show(self, done: int, total: int) -> None:
        """So much is there."""
        now = time.monotonic()
        rate = done / max(now - self._began, 1e-6)
        left = (total - done) / max(rate, 1.0)
        self._last = (
            f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, {left:.0f} s left"
        )
        if now >= self._next:
            self._next = now + (0.2 if self._out.isatty() else 10.0)
            self._write()

    def end(self) -> None:
        """No more is shown."""
        if self._last:
            self._write()
            if self._out.isatty():
                self._out.write("\n")

    def _write(self) -> None:
        self._out.write(f"\r{self._last}\x1b[K" if self._out.isatty() else f"{self._last}\n")
        self._out.flush()
