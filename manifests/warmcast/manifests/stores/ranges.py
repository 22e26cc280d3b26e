"""Reading a range of an object over HTTP: on through broken connections, of one version only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from urllib3 import BaseHTTPResponse

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import PreconditionFailed, StoreError, WarmcastError
from warmcast.manifests.stores.http import Attempts, Http, Transient, read_into

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def read_range(
    http: Http,
    request: Callable[[str | None], tuple[str, Mapping[str, str]]],
    where: str,
    offset: int,
    view: memoryview,
    deadline: Deadline,
    *,
    etag: str | None,
    version_header: str | None,
    error_of: Callable[[BaseHTTPResponse], WarmcastError],
    size: int | None = None,
) -> None:
    """Fill ``view``, which is not empty, with an object's bytes from ``offset``.

    A read that broke goes on where it broke, of the version that it began with. ``request`` gives
    the URL and headers that ask for a version of the object, or for any; it is called for each
    attempt. ``where`` names the object in messages, ``etag`` the version wanted if any, and
    ``version_header`` the header in which an answer tells its own, None if none does; ``size`` is
    the whole object's in bytes, where it is known; ``error_of`` tells what an answer without the
    object means. Raises :class:`PreconditionFailed` for another version or size, and
    :class:`StoreError` if the object ends before the view is full.
    """
    attempts = Attempts(where, deadline)
    done = 0
    while done < len(view):
        first, rest = offset + done, view[done:]
        try:
            url, headers = request(etag)
            headers = {**headers, "Range": f"bytes={first}-{first + len(rest) - 1}"}
            with http.open("GET", url, deadline, headers=headers) as response:
                if response.status not in (200, 206, 416):
                    raise error_of(response)
                _check_range(where, response, first, len(rest), size)
                if version_header is not None:
                    etag = _check_version(where, response.headers.get(version_header), etag)
                for count in read_into(response, rest, deadline, where, idle=http.idle):
                    done += count
        except Transient as failure:
            attempts.wait(failure)


def _check_range(
    where: str, response: BaseHTTPResponse, first: int, length: int, size: int | None
) -> None:
    """Raise :class:`StoreError` unless the body begins with the bytes that were asked for."""
    expected = f"{length} bytes at offset {first}"
    if response.status == 416:
        raise StoreError(where, expected=expected, found="an object that ends before")
    if response.status == 200:  # the whole object, of which we can use the beginning
        whole = int(response.headers.get("Content-Length", length))
        if first or whole < length:
            found = "an answer that ignores the range" if first else f"{whole} bytes"
            raise StoreError(where, expected=expected, found=found)
        return
    text = response.headers.get("Content-Range", "")
    match = _RANGE.fullmatch(text)
    if match is None or (int(match[1]), int(match[2])) != (first, first + length - 1):
        raise StoreError(where, expected=expected, found=text or "no Content-Range")
    if size is not None and match[3] not in ("*", str(size)):
        raise PreconditionFailed(where, expected=f"{size} bytes", found=match[3])


def _check_version(where: str, found: str | None, etag: str | None) -> str | None:
    """The version that the answer is of; no server is believed to heed a condition."""
    if etag is not None and found is not None and found != etag:
        raise PreconditionFailed(where, expected=etag, found=found)
    return etag or found
