"""What is asked of a Hugging Face Hub, of its REST API, under a deadline.

    GET /api/models/<repo>/revision/<revision>            {"sha": commit}
    GET /api/models/<repo>/tree/<commit>?recursive=true   a page of [{type, path, size, oid, lfs}]
    GET /api/models/<repo>/xet-read-token/<commit>        {"casUrl", "accessToken", "exp"}
    GET /<repo>/resolve/<commit>/<path>                   the file, or a redirect to its storage

huggingface_hub finds the token (``HF_TOKEN``, or what ``hf auth login`` left); its own requests
know no deadline. A token goes to the Hub's own host only, and into no message.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urljoin

from urllib3 import BaseHTTPResponse

from warmcast.flows.errors import SourceError, SourceNotFound, SourceRefused
from warmcast.flows.upstreams.failures import answer_error, persist
from warmcast.flows.upstreams.remote import followed, server_of
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError
from warmcast.manifests.stores.http import Http, Transient, read_all

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEXT = re.compile(r'<([^>]*)>\s*;[^,]*\brel="?next"?')
_MOST_ANSWER = 64 << 20  # bytes of one
_MOST_PAGES = 10_000
_ENTRY = "files with path, size and oid"
_CHECK_TOKEN = "set HF_TOKEN to a token that may read it"  # noqa: S105


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the Hub lists it; ``sha256`` and ``xet_hash`` where it publishes them.

    ``blob`` is what git calls these bytes (those of the LFS pointer, where there is one).
    """

    path: str
    size: int
    blob: str
    sha256: str | None
    xet_hash: str | None


@dataclass(frozen=True, slots=True)
class XetAccess:
    """What the storage behind Xet wants: its address, and a token until a time in UNIX seconds."""

    endpoint: str
    token: str
    expires: float


class HubApi:
    """A repository of models on a Hub. Safe between threads."""

    def __init__(
        self, http: Http, endpoint: str, repo: str, token: Callable[[], str | None]
    ) -> None:
        """``token`` looks for the token; it is asked again when the one it gave is refused."""
        self.name = f"hf://{repo}"
        self._http = http
        self._endpoint = endpoint
        self._server = server_of(endpoint)
        self._repo = repo
        self._find_token = token
        self._token = token()
        self._sent = threading.local()

    def commit(self, revision: str, deadline: Deadline) -> str:
        """The commit that a branch, a tag or a commit names.

        Raises :class:`SourceNotFound` and :class:`SourceRefused`.
        """
        where = f"{self.name}@{revision}"
        url = f"{self._models}/revision/{quote(revision, safe='')}"
        found, _ = self._json(url, where, deadline)
        commit = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise SourceError(where, expected="the Hub to tell a commit", found=repr(commit))
        return commit

    def files(self, commit: str, deadline: Deadline) -> Iterator[HubFile]:
        """The files of a commit, as they are listed."""
        url: str | None = f"{self._models}/tree/{commit}?recursive=true"
        for _ in range(_MOST_PAGES):
            if url is None:
                return
            entries, url = self._json(url, self.name, deadline)
            if not isinstance(entries, list):
                raise SourceError(self.name, expected="a list of files", found="another answer")
            for entry in entries:
                if not isinstance(entry, dict) or entry.get("type") != "directory":
                    yield _file(self.name, entry)
        raise SourceError(self.name, expected=f"{_MOST_PAGES} pages at most", found="more")

    def url(self, commit: str, path: str) -> str:
        """Where a file of a commit is read."""
        return f"{self._endpoint}/{self._repo}/resolve/{commit}/{quote(path)}"

    def xet_access(self, commit: str, deadline: Deadline) -> XetAccess:
        """A token for the storage behind Xet, good for some minutes."""
        found, _ = self._json(f"{self._models}/xet-read-token/{commit}", self.name, deadline)
        try:
            return XetAccess(str(found["casUrl"]), str(found["accessToken"]), float(found["exp"]))
        except (KeyError, TypeError, ValueError):
            raise SourceError(
                self.name, expected="a token for Xet", found="another answer"
            ) from None

    def headers(self, url: str) -> dict[str, str]:
        """The headers that the host of a URL may see."""
        headers = {"User-Agent": "warmcast"}
        if self._token is not None and server_of(url) == self._server:
            self._sent.token = self._token
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def error(self, where: str, url: str, response: BaseHTTPResponse) -> WarmcastError:
        """What an answer means that is not what was asked for."""
        if server_of(url) != self._server:
            return answer_error(
                where, response, do="deploy it again: its storage refused the Hub's signature"
            )
        code = response.headers.get("X-Error-Code", "")
        status = response.status
        if code == "GatedRepo":
            return SourceRefused(
                where,
                expected="access to a gated repository",
                found=status,
                do="accept its terms on the Hub, with the account that HF_TOKEN is of",
            )
        if code == "RevisionNotFound":
            return SourceNotFound(where, expected="a branch, tag or commit", found="none such")
        if status == 401 and self._renewed():
            return Transient(where, "401, the token is refused")
        if code == "RepoNotFound" or (status == 401 and self._token is None):
            token = "with the token there is" if self._token else "without a token"
            return SourceNotFound(
                where,
                expected="a repository that can be read",
                found=f"{status} {token}",
                do=f"check its name; if it is private, {_CHECK_TOKEN}",
            )
        if status == 401:
            return SourceRefused(
                where, expected="a token that is good", found=status, do=_CHECK_TOKEN
            )
        return answer_error(where, response, do=_CHECK_TOKEN)

    @property
    def _models(self) -> str:
        return f"{self._endpoint}/api/models/{self._repo}"

    def _renewed(self) -> bool:
        """Whether there is another token by now than this thread's last, which was refused."""
        self._token = self._find_token()
        return self._token is not None and self._token != getattr(self._sent, "token", None)

    def _json(self, url: str, where: str, deadline: Deadline) -> tuple[Any, str | None]:
        """An answer's JSON, and the URL of the next page, on the same server."""
        data, link = persist(where, deadline, lambda: self._get(url, where, deadline))
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise SourceError(where, expected="JSON from the Hub", found="another answer") from None
        match = _NEXT.search(link)
        following = urljoin(url, match[1]) if match else None
        if following is not None and server_of(following) != self._server:
            raise SourceError(where, expected="pages of one server", found="a page of another")
        return value, following

    def _get(self, url: str, where: str, deadline: Deadline) -> tuple[bytes, str]:
        with followed(self._http, "GET", url, deadline, where=where, headers=self.headers) as (
            answered,
            response,
        ):
            if response.status != 200:
                raise self.error(where, answered, response)
            data = read_all(response, _MOST_ANSWER, deadline, where)
            return data, response.headers.get("Link", "")


def _file(name: str, entry: Any) -> HubFile:
    """An entry of the Hub's listing; what it says is checked here."""
    try:
        lfs = entry.get("lfs") or {}
        path, size = entry["path"], lfs.get("size", entry["size"])
        blob, sha256, xet_hash = entry["oid"], lfs.get("oid"), entry.get("xetHash")
    except (KeyError, AttributeError, TypeError):
        raise SourceError(name, expected=_ENTRY, found=repr(entry)) from None
    if not (isinstance(path, str) and isinstance(blob, str) and type(size) is int):
        raise SourceError(name, expected=_ENTRY, found=repr(entry))
    for digest in (sha256, xet_hash):
        if digest is not None and not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
            raise SourceError(f"{name}: {path!r}", expected="64 hex digits", found=repr(digest))
    return HubFile(path, size, blob, sha256, xet_hash)
