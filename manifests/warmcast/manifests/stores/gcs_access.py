"""The tokens that requests to Google Cloud Storage carry, got under the deadline of who asks.

Credentials are looked for where ``google.auth.default`` looks: the file that
``GOOGLE_APPLICATION_CREDENTIALS`` names, that of ``gcloud auth application-default login``, the
metadata server of the machine (unless ``NO_GCE_CHECK=true``). None is looked for nor sent with
``STORAGE_EMULATOR_HOST``, or with ``CLOUDSDK_AUTH_DISABLE_CREDENTIALS=true`` (public buckets).

``google.auth.default`` itself waits by its own clock, and may run ``gcloud`` to learn of a project
that nobody here needs; ``before_request`` may start threads. So only the parts that read, renew
and apply credentials are used, and their requests go through :mod:`http`.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google.auth
from google.auth.compute_engine import Credentials as MachineCredentials
from google.auth.credentials import Credentials, TokenState
from google.auth.exceptions import GoogleAuthError, RefreshError
from google.auth.transport import DEFAULT_RETRYABLE_STATUS_CODES, Request

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import CredentialsMissing, CredentialsRefused, StoreUnreachable
from warmcast.manifests.stores.http import Attempts, Http, Transient, read_all

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_LIMIT = 1 << 20  # bytes of an answer about a token


@dataclass(frozen=True, slots=True)
class GcsAccess:
    """Where the server is and who asks, where that is not as Google's libraries find it.

    ``credentials`` is a file. A server at ``http://`` is one on this machine, and gets none.
    """

    endpoint: str | None = None
    credentials: str | None = None
    anonymous: bool = False


class Access:
    """What authorizes requests. Safe between threads; one of them renews a token for all."""

    def __init__(self, http: Http, access: GcsAccess) -> None:
        emulated = (
            access.endpoint.startswith("http:")
            if access.endpoint
            else bool(os.environ.get("STORAGE_EMULATOR_HOST"))
        )
        self.anonymous = (
            emulated or access.anonymous or _is_true("CLOUDSDK_AUTH_DISABLE_CREDENTIALS")
        )
        self._file = access.credentials
        self._http = http
        self._direct = Http(None, 2, direct=True)  # the metadata server is behind no proxy
        self._lock = threading.Lock()
        self._credentials: Credentials | None = None

    def headers(
        self, where: str, deadline: Deadline, *, refused: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """The headers that authorize a request; others than those that were ``refused``.

        Raises :class:`CredentialsMissing`, :class:`CredentialsRefused`, and :class:`Transient` if
        no token came that may come yet.
        """
        if self.anonymous:
            return {}
        with self._locked(where, deadline):
            if self._credentials is None:
                self._credentials = self._find(where, deadline)
            credentials = self._credentials
            state = credentials.token_state
            # Whoever waited for the lock may find the token renewed.
            if state is TokenState.INVALID or (refused and refused == _applied(credentials)):
                self._renew(where, credentials, deadline)
            elif state is TokenState.STALE:
                with suppress(Transient):  # it is good for some minutes yet
                    self._renew(where, credentials, deadline)
            return _applied(credentials)

    def close(self) -> None:
        """Close the connections to the metadata server."""
        self._direct.close()

    @contextmanager
    def _locked(self, where: str, deadline: Deadline) -> Iterator[None]:
        if not self._lock.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX)):
            deadline.check(f"waiting for a token for {where}")
            raise Transient(where, "no token in time")
        try:
            yield
        finally:
            self._lock.release()

    def _find(self, where: str, deadline: Deadline) -> Credentials:
        """The credentials of this process; they have no token yet."""
        named = self._file or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        path = Path(named) if named else _login_file()
        if named or path.is_file():
            return _from_file(where, path, _Requests(self._http, deadline))
        if not _is_true("NO_GCE_CHECK") and self._on_google(where, deadline):
            return MachineCredentials()  # type: ignore[no-untyped-call]
        raise _missing(where, "none")

    def _on_google(self, where: str, deadline: Deadline) -> bool:
        """Whether there is a metadata server, which is asked by address: names may take long."""
        address = os.environ.get("GCE_METADATA_IP", "169.254.169.254")
        attempts = Attempts(where, deadline)
        request = _Requests(self._direct, deadline)
        while True:
            try:
                answer = request(f"http://{address}/", headers={"Metadata-Flavor": "Google"})
                return answer.headers.get("Metadata-Flavor") == "Google"
            except Transient as failure:
                try:
                    attempts.wait(failure)
                except StoreUnreachable:
                    return False

    def _renew(self, where: str, credentials: Credentials, deadline: Deadline) -> None:
        of_machine = isinstance(credentials, MachineCredentials)
        http = self._direct if of_machine else self._http
        try:
            credentials.refresh(_Requests(http, deadline))  # type: ignore[no-untyped-call]
        except RefreshError as cause:
            raise CredentialsRefused(
                where,
                expected="a token",
                found=cause.args[0] if cause.args else cause,
                do="check GOOGLE_APPLICATION_CREDENTIALS, or the account of this machine",
            ) from cause
        except GoogleAuthError as cause:
            raise _missing(where, cause) from cause


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer, as google-auth takes it."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class _Requests(Request):
    """How google-auth asks for tokens.

    A failure that may not happen again is raised, for google-auth would wait by its own clock.
    """

    def __init__(self, http: Http, deadline: Deadline) -> None:
        self._http = http
        self._deadline = deadline

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> _Answer:
        deadline = self._deadline if timeout is None else self._deadline.within(timeout)
        data = (body.encode() if isinstance(body, str) else body) or b""
        sent = {**(headers or {}), **({"Content-Length": str(len(data))} if data else {})}
        with self._http.open(method, url, deadline, headers=sent, body=data) as response:
            if response.status in DEFAULT_RETRYABLE_STATUS_CODES:
                raise Transient(url, f"{response.status} where a token was asked for")
            answer = read_all(response, _LIMIT, deadline, url)
            return _Answer(response.status, response.headers, answer)


def _from_file(where: str, path: Path, request: _Requests) -> Credentials:
    try:
        with warnings.catch_warnings():
            # What it warns of is a file from others; this one is the operator's.
            warnings.simplefilter("ignore", DeprecationWarning)
            credentials, _ = google.auth.load_credentials_from_file(  # type: ignore[no-untyped-call]
                str(path), scopes=[_SCOPE], request=request
            )
    except (GoogleAuthError, OSError, ValueError) as cause:
        raise _missing(where, cause) from cause
    found: Credentials = credentials
    return found


def _login_file() -> Path:
    """Where ``gcloud auth application-default login`` leaves its credentials."""
    folder = os.environ.get("CLOUDSDK_CONFIG")
    base = Path(folder) if folder else Path.home() / ".config" / "gcloud"
    return base / "application_default_credentials.json"


def _applied(credentials: Credentials) -> dict[str, str]:
    headers: dict[str, str] = {}
    credentials.apply(headers)  # type: ignore[no-untyped-call]
    return headers


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")


def _missing(where: str, found: object) -> CredentialsMissing:
    return CredentialsMissing(
        where,
        expected="credentials",
        found=found,
        do="set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    )
