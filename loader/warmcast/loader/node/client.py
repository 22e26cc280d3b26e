"""What a worker asks of its node's agent, over its Unix socket."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import NotFound, StoreError, StoreUnreachable
from warmcast.manifests.manifest import Manifest, parse_manifest

_CONNECT = 1.0
_IDLE = 10.0
"""Seconds between two lines of what comes, at most: nodes, origin and disk all have less."""

_MOST = 64 << 20


class NodeGone(StoreUnreachable):
    """The node's agent does not answer."""


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
        except StoreError:
            return False
        return True

    def wait_for(self, deadline: Deadline) -> None:
        """Return when an agent answers. Raises :class:`NodeGone` if none does in time."""
        while not self.there(deadline.within(_CONNECT)):
            if deadline.expired:
                raise NodeGone(
                    self.url, expected="an answer", found="none", do="start `warmcast node`"
                )
            time.sleep(min(0.2, deadline.remaining()))

    def resolve(self, name: str, deadline: Deadline) -> str:
        """The digest that a ref names, as the agent knows it."""
        from urllib.parse import quote

        return self._read(f"/refs/{quote(name, safe='@/')}", deadline).decode("ascii")

    def manifest(self, digest: str, deadline: Deadline) -> Manifest:
        """The manifest of a digest."""
        return parse_manifest(self._read(f"/manifests/{digest}", deadline), digest, self.url)

    @contextmanager
    def blob(self, digest: str, sha256: str, deadline: Deadline) -> Iterator[Iterator[str]]:
        """A manifest's blob, wanted while the context is open: the agent's lines about it."""
        with self._lines(f"/blobs/{digest}/{sha256}", deadline) as lines:
            yield lines

    def prefetch(self, digest: str, deadline: Deadline) -> Iterator[tuple[int, int]]:
        """Have all of a manifest brought; (bytes there, bytes in all), as they come.

        Raises :class:`StoreError` if it cannot be.
        """
        with self._lines(f"/prefetch/{digest}", deadline) as lines:
            for line in lines:
                done, _, total = line.partition(" ")
                yield int(done), int(total)

    @contextmanager
    def _lines(self, path: str, deadline: Deadline) -> Iterator[Iterator[str]]:
        with self._asked(path, deadline) as response:
            yield self._until_end(response, deadline)

    def _until_end(self, response: http.client.HTTPResponse, deadline: Deadline) -> Iterator[str]:
        while True:
            deadline.check(f"waiting for the {self.url}")
            with self._explained():
                line = response.readline(1 << 16).decode().rstrip("\n")
            if line == "end":
                return
            kind, _, why = line.partition(" ")
            if kind == "failed":
                raise StoreError(self.url, expected="all chunks", found=why)
            if not line:
                raise NodeGone(self.url, expected="an answer to its end", found="a part")
            yield line

    def _read(self, path: str, deadline: Deadline) -> bytes:
        with self._asked(path, deadline) as response, self._explained():
            data = response.read(_MOST + 1)
        if len(data) > _MOST:
            raise StoreError(self.url, expected=f"{_MOST} bytes at most", found="more")
        return data

    @contextmanager
    def _asked(self, path: str, deadline: Deadline) -> Iterator[http.client.HTTPResponse]:
        deadline.check(f"asking the {self.url}")
        connection = _Connection(self.path, min(_IDLE, deadline.remaining()))
        try:
            with self._explained():
                connection.request("GET", path)
                response = connection.getresponse()
                said = "" if response.status == 200 else response.read(4096).decode().strip()
            if response.status == 404:
                raise NotFound(f"{self.url}: {path}", found=said)
            if response.status != 200:
                raise StoreError(f"{self.url}: {path}", found=f"{response.status}: {said}")
            yield response
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


def names_of(line: str) -> tuple[list[Path], int]:
    """What the first line about a blob says: its file's names, and the number of its chunks."""
    told = json.loads(line)
    return [Path(name) for name in told["names"]], int(told["chunks"])


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
