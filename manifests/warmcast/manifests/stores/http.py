"""HTTP under a deadline, for stores that speak it.

A connection has ``CONNECT`` seconds to be made and ``IDLE`` seconds between two signs of progress,
in either direction, and less where the deadline is nearer; nothing is retried here but by
:class:`Attempts`, of which each call has one. What may be tried again is raised as
:class:`Transient`. Bodies are read as they were stored: no decoding, no following of redirects.

botocore cannot do this itself: its timeouts belong to the client and not to the call, a body is
sent under the connect timeout, and what it reads it buffers.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ReadTimeoutError,
    SSLError,
)

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, StoreError, StoreUnreachable, WarmcastError

CONNECT = 3.0
IDLE = 10.0
_CHUNK = 1 << 18  # bytes between two looks at the clock
_TRIES = 5
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_NAP = 0.5  # seconds between two looks at the deadline, while there is nothing else to do


Body = bytes | memoryview | tuple[bytes | memoryview, ...]
"""What is sent: a buffer, or several after each other."""


class Transient(StoreUnreachable):
    """A failure that may not happen again; ``retry_after`` seconds, if the server said so."""

    def __init__(self, what: str, found: object, retry_after: float | None = None) -> None:
        super().__init__(what, expected="an answer", found=found)
        self.found = found
        self.retry_after = retry_after


class Cancelled(WarmcastError):
    """The work that a request was part of has failed elsewhere."""


class Attempts:
    """The attempts of one call: bounded in number, spaced by backoff with jitter, under a deadline.

    ``cancelled`` ends the waiting with :class:`Cancelled` when it is set.
    """

    def __init__(
        self, what: str, deadline: Deadline, cancelled: threading.Event | None = None
    ) -> None:
        self.failures = 0
        self._what = what
        self._deadline = deadline
        self._cancelled = cancelled

    def wait(self, failure: Transient) -> None:
        """Wait before the next attempt.

        Raises :class:`DeadlineExceeded` if it could not begin in time, and
        :class:`StoreUnreachable` if there were enough of them.
        """
        self.failures += 1
        if self._deadline.expired:
            raise self._late(failure) from failure
        if self.failures == _TRIES:
            raise StoreUnreachable(
                self._what,
                expected="an answer",
                found=f"{failure.found}, {_TRIES} times",
                do="check the endpoint and the network",
            ) from failure
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**self.failures)
        pause = max(random.uniform(0, longest), failure.retry_after or 0)  # noqa: S311
        if pause >= self._deadline.remaining():
            raise self._late(failure) from failure
        if self._cancelled is not None:
            if self._cancelled.wait(pause):
                raise Cancelled(self._what)
            return
        end = time.monotonic() + pause
        while (left := end - time.monotonic()) > 0:
            if self._deadline.expired:  # it may be taken back
                raise self._late(failure) from failure
            time.sleep(min(left, _NAP))

    def _late(self, failure: Transient) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"no time left for {self._what}: {failure.found}", do="give it a longer deadline"
        )


class _Kept:
    """Keeps the socket: ``sock`` is None once a response said that it is the connection's last."""

    transport: socket.socket | None = None

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self.transport = self.sock  # type: ignore[attr-defined]


class _Connection(_Kept, HTTPConnection):
    pass


class _SecureConnection(_Kept, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class Http:
    """A pool of connections. Safe between threads."""

    def __init__(
        self,
        ca_certs: str | None,
        connections: int = 64,
        *,
        connect: float = CONNECT,
        idle: float = IDLE,
        context: ssl.SSLContext | None = None,
        any_name: bool = False,
        direct: bool = False,
    ) -> None:
        """``ca_certs``: the file of certificates to trust; None for the system's.

        ``context`` says whom to trust and what to show instead, as it is now: its files may change.
        ``any_name`` takes every server that the authority vouches for, whatever its name;
        ``direct`` takes no proxy.
        """
        self._options: dict[str, Any] = {"maxsize": connections, "ca_certs": ca_certs}
        if context is not None:
            self._options["ssl_context"] = context
        if any_name:
            self._options["assert_hostname"] = False
        self.idle = idle
        """Seconds without progress that are too many."""
        self._connect = connect
        self._direct = direct
        self._managers: dict[str | None, urllib3.PoolManager] = {}
        self._lock = threading.Lock()

    @contextmanager
    def open(
        self,
        method: str,
        url: str,
        deadline: Deadline,
        *,
        headers: Mapping[str, str],
        body: Body | None = None,
        cancelled: threading.Event | None = None,
        idle: float | None = None,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """The response to one request, its body unread; what is left of it is dropped at the end.

        ``idle``: seconds that the answer may take to begin, where that is not what all take.
        Raises :class:`Transient` if no response came, and whatever status is the caller's matter.
        """
        with _transient(url):
            response = self._manager(url).urlopen(
                method,
                url,
                headers=dict(headers),
                body=_chunks(body, deadline, cancelled) if body else None,
                timeout=urllib3.Timeout(
                    connect=_seconds(self._connect, deadline), read=_seconds(self.idle, deadline)
                ),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        try:
            yield response
        finally:
            response.close()

    def close(self) -> None:
        """Close the connections that no response holds."""
        with self._lock:
            for manager in self._managers.values():
                manager.clear()

    def _manager(self, url: str) -> urllib3.PoolManager:
        parts = urlsplit(url)
        direct = self._direct or proxy_bypass(parts.hostname or "")
        proxy = None if direct else getproxies().get(parts.scheme)
        with self._lock:
            if proxy not in self._managers:
                manager = (
                    urllib3.ProxyManager(proxy, **self._options)
                    if proxy
                    else urllib3.PoolManager(**self._options)
                )
                manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
                self._managers[proxy] = manager
            return self._managers[proxy]


def read_into(
    response: urllib3.BaseHTTPResponse,
    view: memoryview,
    deadline: Deadline,
    what: str,
    *,
    idle: float = IDLE,
) -> Iterator[int]:
    """Fill ``view`` from a response's body; the bytes that came, each time that some have come.

    ``idle``: seconds without progress that are too many. Raises :class:`Transient` if the
    connection breaks, or the body ends before ``view`` is full.
    """
    done = 0
    while done < len(view):
        with _transient(what):
            _limit(response, deadline, idle)
            piece = response.read1(min(_CHUNK, len(view) - done))
        if not piece:
            raise Transient(what, f"{done} of {len(view)} bytes")
        view[done : done + len(piece)] = piece
        done += len(piece)
        yield len(piece)


def read_all(
    response: urllib3.BaseHTTPResponse,
    limit: int,
    deadline: Deadline,
    what: str,
    *,
    idle: float = IDLE,
) -> bytes:
    """A response's whole body; :class:`StoreError` if it is longer than ``limit`` bytes."""
    data = bytearray()
    while True:
        with _transient(what):
            _limit(response, deadline, idle)
            piece = response.read1(_CHUNK)
        if not piece:
            return bytes(data)
        data += piece
        if len(data) > limit:
            raise StoreError(what, expected=f"{limit} bytes at most", found="more")


def _limit(response: urllib3.BaseHTTPResponse, deadline: Deadline, idle: float) -> None:
    """Let the next bytes take no longer than the deadline allows.

    This binds one ``recv``, so bodies are read by ``read1``: ``read`` and ``readinto`` go on until
    they have all that was asked for, however slowly it drips.
    """
    transport = getattr(response.connection, "transport", None)
    if transport is not None:
        transport.settimeout(_seconds(idle, deadline))


def _seconds(most: float, deadline: Deadline) -> float:
    left = min(most, deadline.remaining())
    if left <= 0:
        raise Transient("the request", found="no answer in time")
    return left


def _chunks(
    body: Body, deadline: Deadline, cancelled: threading.Event | None
) -> Iterator[memoryview]:
    """A body in pieces, so that each has its own time to be sent, and none follows a deadline."""
    for part in body if isinstance(body, tuple) else (body,):
        view = memoryview(part)
        for start in range(0, len(view), _CHUNK):
            if cancelled is not None and cancelled.is_set():
                raise Cancelled("upload")
            deadline.check("sending a request")
            yield view[start : start + _CHUNK]


@contextmanager
def _transient(what: str) -> Iterator[None]:
    """Turn the failures of connections into :class:`Transient`."""
    where = what.partition("?")[0]  # a signed URL's query is a credential
    try:
        yield
    except SSLError as cause:
        raise StoreUnreachable(
            where,
            found=_reason(cause),
            do="name the certificates to trust in AWS_CA_BUNDLE (S3) or SSL_CERT_FILE",
        ) from cause
    except HTTPError as cause:
        raise Transient(where, _reason(cause)) from cause


def _reason(cause: HTTPError) -> str:
    """What broke, without the object addresses and wrappings of urllib3's messages."""
    if isinstance(cause, NewConnectionError):
        return str(cause).rpartition(": ")[2]
    if isinstance(cause, ConnectTimeoutError):
        return "no connection in time"
    if isinstance(cause, ReadTimeoutError):
        return "no answer in time"
    inner = next((a for a in cause.args if isinstance(a, Exception)), None)
    return str(inner or cause)
