"""Asking other nodes for chunks.

A node that does not answer within ``CONNECT`` seconds, makes no progress for ``IDLE``, refuses, or
sends wrong bytes is passed by for ``REMEMBERED`` seconds. One that is still fetching the chunk says
so, and is asked again: waiting there costs the origin nothing.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from warmcast.loader.errors import PeerError
from warmcast.loader.node.cache import Spec
from warmcast.loader.node.tokens import Fleet
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import StoreError, UsageError, WarmcastError
from warmcast.manifests.stores.http import Http, Transient, read_all, read_into

log = logging.getLogger("warmcast")

CONNECT = 1.0
IDLE = 3.0
REMEMBERED = 30.0

COMING = 20.0
"""Seconds for which a node may say that a chunk is on its way, before another is asked."""

_CONNECTIONS = 64


class NodeFailed(PeerError):
    """A node did not give a chunk."""


class NodeBusy(NodeFailed):
    """A node has enough to do, which is not its fault. ``instead`` names one that has the chunk."""

    instead = ""


class NodeAsks(NodeFailed):
    """A node asks the ring for the chunk itself, perhaps the one that asks it."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files for TLS between nodes: this node's certificate and key, and whom to trust."""

    certificate: Path
    key: Path
    authority: Path

    def stamp(self) -> tuple[int, ...]:
        """Changes when a file changes."""
        files = (self.certificate, self.key, self.authority)
        return tuple(path.stat().st_mtime_ns for path in files)

    def load(self, context: ssl.SSLContext) -> None:
        """Have a context trust the authority, and show the certificate. Raises UsageError."""
        try:
            context.load_verify_locations(self.authority)
            context.load_cert_chain(self.certificate, self.key)
        except OSError as cause:
            raise UsageError(
                "certificates",
                expected=f"PEM files {self.certificate}, {self.key} and {self.authority}",
                found=cause,
            ) from None


class Peers:
    """Connections to the other nodes. Safe between threads; the owner closes it."""

    def __init__(self, node: str, fleet: Fleet, certificates: Certificates | None = None) -> None:
        """``node`` is the name of the one that asks."""
        self._node = node
        self._fleet = fleet
        self._certificates = certificates
        self._lock = threading.Lock()
        self._blamed: dict[str, float] = {}
        self._stamp: tuple[int, ...] = ()
        self._refused: tuple[int, ...] = ()
        self._http = self._connect()

    def passed_by(self, node: str) -> bool:
        """Whether a node has failed of late."""
        with self._lock:
            until = self._blamed.get(node)
            if until is not None and until < time.monotonic():
                del self._blamed[node]
                until = None
            return until is not None

    def blame(self, node: str, cause: Exception) -> None:
        """Pass a node by for a while."""
        with self._lock:
            self._blamed[node] = time.monotonic() + REMEMBERED
        log.warning("%s is passed by for %d s: %s", node, REMEMBERED, cause)

    def fetch(
        self,
        address: str,
        manifest: str,
        spec: Spec,
        number: int,
        buffer: memoryview,
        deadline: Deadline,
        count: Callable[[int], None],
        *,
        if_there: bool = False,
    ) -> None:
        """Fill ``buffer`` with a chunk from the node at ``address``, checked.

        ``count`` is told of bytes as they come; with ``if_there`` the node does not fetch what it
        has not. Raises :class:`NodeFailed`.
        """
        url = f"{address}/chunks/{spec.sha256}/{number}"
        limit = deadline.within(COMING)
        check = False
        while True:
            headers = {"Warmcast-Node": self._node}
            headers |= {"Warmcast-Check": "1"} if check else {}
            headers |= {"Warmcast-If-There": "1"} if if_there else {}
            try:
                there = self._once(url, manifest, headers, buffer, limit, count)
            except (Transient, WarmcastError) as cause:
                if isinstance(cause, NodeFailed):
                    raise
                raise NodeFailed(url, expected="the chunk", found=cause) from cause
            if there:
                found = to_hex(crc32c(buffer))
                if found == spec.crcs[number]:
                    return
                if check:
                    raise NodeFailed(
                        url, expected=f"CRC32C {spec.crcs[number]}", found=f"{found}, twice"
                    )
                check = True  # its disk may have changed under it: it looks, and fetches anew
            elif limit.expired:
                raise NodeFailed(url, expected="the chunk", found=f"nothing in {COMING:.0f} s")

    def _once(
        self,
        url: str,
        manifest: str,
        headers: Mapping[str, str],
        buffer: memoryview,
        deadline: Deadline,
        count: Callable[[int], None],
    ) -> bool:
        """Ask once; whether the chunk came, for it may still be on its way there."""
        headers = {**headers, "Authorization": f"Bearer {self._fleet.token(manifest)}"}
        with self._connected().open("GET", url, deadline, headers=headers) as response:
            if response.status == 202:
                return False
            if response.status == 503:
                busy = NodeBusy(url, expected="the chunk", found="a node that is busy")
                busy.instead = response.headers.get("Warmcast-Try", "")
                raise busy
            if response.status == 409:
                raise NodeAsks(url, expected="the chunk", found="a node that asks for it, too")
            if response.status != 200:
                said = response.read(512).decode(errors="replace")
                raise NodeFailed(url, expected="the chunk", found=f"{response.status} {said}")
            if response.headers.get("Content-Length") != str(len(buffer)):
                raise NodeFailed(
                    url,
                    expected=f"{len(buffer)} bytes",
                    found=response.headers.get("Content-Length"),
                )
            for nbytes in read_into(response, buffer, deadline, url, idle=IDLE):
                count(nbytes)
        return True

    def read(self, url: str, manifest: str, limit: int, deadline: Deadline) -> bytes:
        """What a node has under a URL, ``limit`` bytes at most; raises :class:`NodeFailed`."""
        headers = {"Authorization": f"Bearer {self._fleet.token(manifest)}"}
        try:
            with self._connected().open("GET", url, deadline, headers=headers) as response:
                if response.status != 200:
                    raise NodeFailed(url, expected="an answer", found=response.status)
                return read_all(response, limit, deadline, url)
        except (Transient, StoreError) as cause:
            raise NodeFailed(url, expected="an answer", found=cause) from cause

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def _connected(self) -> Http:
        """The pool; a new one when the certificates have changed."""
        if self._certificates is not None:
            with self._lock:
                self._renew(self._certificates)
        return self._http

    def _renew(self, files: Certificates) -> None:
        stamp: tuple[int, ...] = ()
        try:
            stamp = files.stamp()
            if stamp == self._stamp:
                return
            http = self._connect()
        except (OSError, UsageError) as cause:  # half-written, say: those there are stay
            if stamp != self._refused:
                log.info("the certificates that there are stay: %s", cause)
            self._refused = stamp
            return
        self._http.close()
        self._http, self._stamp = http, stamp

    def _connect(self) -> Http:
        context = None
        if (files := self._certificates) is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            files.load(context)
        return Http(
            None,
            _CONNECTIONS,
            connect=CONNECT,
            idle=IDLE,
            context=context,
            any_name=True,
            direct=True,
        )
