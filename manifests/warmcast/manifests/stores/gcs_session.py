"""The requests to Google Cloud Storage, ours and its library's: authorized, under a deadline.

A call of the store sets :data:`running` while google-cloud-storage works for it; what that sends
then keeps to the call. Answers that are no success never reach the library: they are raised as our
errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError
from warmcast.manifests.stores.gcs_access import Access
from warmcast.manifests.stores.gcs_errors import error_of
from warmcast.manifests.stores.http import Attempts, Http, Transient, read_all

if TYPE_CHECKING:
    import urllib3

_MOST_SMALL = 1 << 28  # bytes of an answer that is no object


class Call:
    """What the requests of one call share: deadline, attempts, and one renewal of their token."""

    def __init__(self, access: Access, where: str, deadline: Deadline) -> None:
        self.where = where
        self.deadline = deadline
        self.attempts = Attempts(where, deadline)
        self._access = access
        self._refused: Mapping[str, str] | None = None
        self._sent: Mapping[str, str] = {}

    def headers(self) -> dict[str, str]:
        """The headers that authorize the next request."""
        headers = self._access.headers(self.where, self.deadline, refused=self._refused)
        self._sent = headers
        return dict(headers)

    def error(self, response: urllib3.BaseHTTPResponse) -> WarmcastError:
        """What an answer means that is no success; a token may be refused once."""
        body = read_all(response, 1 << 20, self.deadline, self.where)
        if response.status == 401 and self._sent and self._refused is None:
            self._refused = self._sent
            return Transient(self.where, "401, the token is refused")
        return error_of(self.where, response.status, body, response.headers.get("Retry-After"))


running: ContextVar[Call] = ContextVar("running")


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that was read already, as google-cloud-storage takes it."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


class Session:
    """What google-cloud-storage takes for a session of ``requests``; failures are our errors."""

    is_mtls = False

    def __init__(self, http: Http) -> None:
        self._http = http

    def request(
        self,
        method: str,
        url: str,
        data: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        **_: Any,
    ) -> _Answer:
        """Send a request of the call that runs in this thread."""
        call = running.get()
        body = data.encode() if isinstance(data, str) else data or b""
        length = {"Content-Length": str(len(body))} if body or method == "POST" else {}
        sent = {_text(k): _text(v) for k, v in (headers or {}).items()} | length | call.headers()
        with self._http.open(method, url, call.deadline, headers=sent, body=body) as response:
            if not 200 <= response.status < 300:
                raise call.error(response)
            content = read_all(response, _MOST_SMALL, call.deadline, call.where)
            return _Answer(response.status, response.headers, content)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
