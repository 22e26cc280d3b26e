"""Ranges of a file at a URL, which may lie behind redirects and be moved, sign and expire.

A server says where a file's bytes are by redirecting; that URL is kept, because each question may
cost a request of a limited number, and asked for again when it is refused there: signed URLs are
good for minutes. Each request carries what its own host may see (``headers``), and HTTPS never
leads to HTTP. A server that reads no ranges is read once, front to back (see :mod:`spool`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from urllib3 import BaseHTTPResponse

from warmcast.flows.errors import SourceError
from warmcast.flows.upstreams.failures import explained, persist
from warmcast.flows.upstreams.locks import held
from warmcast.flows.upstreams.spool import Spool
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import PreconditionFailed, WarmcastError
from warmcast.manifests.stores.http import Http, Transient, read_all
from warmcast.manifests.stores.ranges import read_range

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_MOVED = (400, 401, 403, 404, 410)  # how signed URLs that have expired are refused
_SMALL = 1 << 20  # bytes of a file that is read in one request, not looked for first
_MOST_DRAINED = 1 << 16  # bytes that are read to keep a connection
_TOTAL = re.compile(r"bytes 0-0/(\d+)")

Headers = Callable[[str], Mapping[str, str]]
"""The headers that a URL's host may see."""

ErrorOf = Callable[[str, BaseHTTPResponse], WarmcastError]
"""What an answer of a URL means that is not the file."""


@dataclass(frozen=True, slots=True)
class Validator:
    """What holds answers to one state of a file: a condition, and the header that tells a state."""

    condition: str
    header: str
    value: str

    def headers(self) -> dict[str, str]:
        """The request's."""
        return {self.condition: self.value}


@dataclass(frozen=True, slots=True)
class Location:
    """Where a file's bytes are, whether ranges can be read there, and if it was redirected to."""

    url: str
    ranged: bool
    moved: bool


@contextmanager
def followed(
    http: Http,
    method: str,
    url: str,
    deadline: Deadline,
    *,
    where: str,
    headers: Headers,
    passing: Callable[[BaseHTTPResponse], None] = lambda _: None,
) -> Iterator[tuple[str, BaseHTTPResponse]]:
    """The answer behind redirects, and the URL that gave it; ``passing`` is shown every answer.

    Raises :class:`Transient`, and :class:`SourceError` for redirects that do not end or would
    leave HTTPS.
    """
    for _ in range(_MOST_REDIRECTS + 1):
        with http.open(method, url, deadline, headers=headers(url)) as response:
            passing(response)
            if method == "HEAD":
                read_all(response, 0, deadline, where)  # else the connection would be closed
            if response.status not in _REDIRECTS:
                yield url, response
                return
            if _is_short(response):
                read_all(response, _MOST_DRAINED, deadline, where)
            url = _redirected(where, url, response.headers.get("Location", ""))
    raise SourceError(where, expected=f"{_MOST_REDIRECTS} redirects at most", found="more")


def server_of(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port: who sees what is sent to a URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


class RemoteReader:
    """An ``ObjectReader`` of a file at a URL. Safe between threads."""

    local = False
    cached = None
    step = 16 << 20

    def __init__(
        self,
        http: Http,
        url: str,
        size: int,
        *,
        where: str,
        headers: Headers,
        error_of: ErrorOf,
        validator: Validator | None = None,
        passing: Callable[[BaseHTTPResponse], None] = lambda _: None,
    ) -> None:
        """``where`` names the file in messages; ``passing`` sees each answer on the way to it."""
        self.size = size
        self._http = http
        self._url = url
        self._where = where
        self._headers = headers
        self._error_of = error_of
        self._validator = validator
        self._passing = passing
        self._lock = threading.Lock()
        self._location: Location | None = None
        self._spool: Spool | None = None

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` from ``offset``; :class:`SourceChanged` if it is another file by now."""
        view = buffer.cast("B")
        if offset < 0 or offset + len(view) > self.size:
            raise SourceError(
                self._where,
                expected=f"{len(view)} bytes at offset {offset}",
                found=f"{self.size} in all",
            )
        if not view:
            return
        with explained(listed=True):
            if len(view) == self.size <= _SMALL and self._location is None:
                view[:] = persist(self._where, deadline, lambda: self._read_small(deadline))
            elif self._found(deadline).ranged:
                self._read_range(offset, view, deadline)
            else:
                self._whole().read_into(offset, view, deadline)

    def close(self) -> None:
        """Give back what was read ahead; the connections are the upstream's."""
        with self._lock:
            spool, self._spool = self._spool, None
        if spool is not None:
            spool.close()

    def _read_small(self, deadline: Deadline) -> bytes:
        """All of it, in one request."""
        with self._opened(deadline) as response:
            data = read_all(response, self.size, deadline, self._where)
        if len(data) != self.size:
            raise PreconditionFailed(
                self._where, expected=f"{self.size} bytes", found=f"{len(data)}"
            )
        return data

    def _read_range(self, offset: int, view: memoryview, deadline: Deadline) -> None:
        validator = self._validator
        location = self._found(deadline)
        again = location.moved  # whether to ask once more where it is, should it be refused there

        def request(_: str | None) -> tuple[str, Mapping[str, str]]:
            nonlocal location
            location = self._found(deadline)
            return location.url, self._request_headers(location.url)

        def error(response: BaseHTTPResponse) -> WarmcastError:
            nonlocal again
            if again and response.status in (*_MOVED, *_REDIRECTS):
                again = False
                self._forget(location)
                return Transient(self._where, f"{response.status} where it was redirected to")
            return self._error_of(location.url, response)

        read_range(
            self._http,
            request,
            self._where,
            offset,
            view,
            deadline,
            etag=validator.value if validator else None,
            version_header=validator.header if validator else None,
            error_of=error,
            size=self.size,
        )

    def _found(self, deadline: Deadline) -> Location:
        """Where the bytes are; whoever finds it out does so for all."""
        if (location := self._location) is not None:
            return location
        with held(self._lock, deadline, f"looking for {self._where}"):
            if self._location is None:
                self._location = persist(self._where, deadline, lambda: self._find(deadline))
            return self._location

    def _forget(self, location: Location) -> None:
        with self._lock:
            if self._location == location:
                self._location = None

    def _find(self, deadline: Deadline) -> Location:
        """Ask for the first byte: it tells where all are, and if a range of them can be had."""
        with followed(
            self._http,
            "GET",
            self._url,
            deadline,
            where=self._where,
            headers=lambda url: {**self._request_headers(url), "Range": "bytes=0-0"},
            passing=self._passing,
        ) as (url, response):
            if response.status == 416:
                raise PreconditionFailed(self._where, expected=f"{self.size} bytes", found="none")
            if response.status not in (200, 206):
                raise self._error_of(url, response)
            check_encoding(self._where, response)
            self._check_size(response)
            if response.status == 206:
                read_all(response, 1, deadline, self._where)
            return Location(url, response.status == 206, url != self._url)

    def _check_size(self, response: BaseHTTPResponse) -> None:
        found = size_of(response)
        if found is not None and found != self.size:
            raise PreconditionFailed(self._where, expected=f"{self.size} bytes", found=found)

    def _whole(self) -> Spool:
        with self._lock:
            if self._spool is None:
                self._spool = Spool(self._opened, self.size, self._where, idle=self._http.idle)
            return self._spool

    @contextmanager
    def _opened(self, deadline: Deadline) -> Iterator[BaseHTTPResponse]:
        """The whole file, from its first byte."""
        with followed(
            self._http,
            "GET",
            self._url,
            deadline,
            where=self._where,
            headers=self._request_headers,
            passing=self._passing,
        ) as (url, response):
            if response.status != 200:
                raise self._error_of(url, response)
            check_encoding(self._where, response)
            self._check_size(response)
            validator = self._validator
            found = response.headers.get(validator.header) if validator else None
            if validator is not None and found not in (None, validator.value):
                raise PreconditionFailed(self._where, expected=validator.value, found=found)
            yield response

    def _request_headers(self, url: str) -> dict[str, str]:
        condition = self._validator.headers() if self._validator else {}
        return {**self._headers(url), **condition, "Accept-Encoding": "identity"}


def size_of(response: BaseHTTPResponse) -> int | None:
    """A file's size in bytes by an answer to a request for all of it, or for its first byte."""
    if response.status == 206:
        match = _TOTAL.fullmatch(response.headers.get("Content-Range", ""))
        return int(match[1]) if match else None
    text = response.headers.get("Content-Length", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _is_short(response: BaseHTTPResponse) -> bool:
    """Whether reading an answer to its end is cheaper than another connection."""
    size = size_of(response)
    return size is not None and size <= _MOST_DRAINED


def check_encoding(where: str, response: BaseHTTPResponse) -> None:
    """Raise :class:`SourceError` if what is sent are not the file's own bytes."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise SourceError(
            where,
            expected="the file's bytes as they are",
            found=f"Content-Encoding: {encoding}",
            do="have the server send it as it is",
        )


def _redirected(where: str, url: str, location: str) -> str:
    try:
        target = urljoin(url, location).partition("#")[0]
        scheme, host, _ = server_of(target)
    except ValueError:
        scheme, host = "", None
    if not location or not host or scheme not in ("http", "https"):
        raise SourceError(where, expected="a redirect to a URL", found="another")
    if scheme == "http" and urlsplit(url).scheme == "https":
        raise SourceError(where, expected="HTTPS all the way", found=f"a redirect to http://{host}")
    return target
