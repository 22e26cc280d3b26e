"""A repository of models on the Hugging Face Hub: ``hf://org/repo`` or ``hf://org/repo@revision``.

A branch or tag (``main``, if none is named) becomes a commit when the upstream is opened, and all
that is read is of this commit. Of files in LFS the Hub publishes the SHA-256. A file's ``version``
is its blob's id in git, so that it stays the same over the commits that do not change the file.

The token is found as huggingface_hub finds it; ``?token_env=NAME`` names another variable than
``HF_TOKEN``. ``?folder=sub`` takes a folder of the repository for the whole. ``HF_ENDPOINT`` or
``?endpoint=https://…`` names another Hub. Large files are read through Xet where it is installed
(see :mod:`xet`): ``?xet=no`` or ``HF_HUB_DISABLE_XET=1`` turns it off, ``?xet_patience=30`` are
the seconds that it may bring nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading

from urllib3 import BaseHTTPResponse

from warmcast.flows.errors import SourceError, SourceNotFound
from warmcast.flows.local import LocalFile
from warmcast.flows.upstreams import UpstreamFile
from warmcast.flows.upstreams.failures import explained
from warmcast.flows.upstreams.hub_api import HubApi, HubFile, XetAccess
from warmcast.flows.upstreams.listing import listing
from warmcast.flows.upstreams.locks import held
from warmcast.flows.upstreams.options import endpoint, flag, parse_options, seconds
from warmcast.flows.upstreams.remote import RemoteReader
from warmcast.flows.upstreams.xet import ON, Xet
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import PreconditionFailed, UsageError
from warmcast.manifests.rules import unsafe_path
from warmcast.manifests.stores import ObjectReader
from warmcast.manifests.stores.http import Http

_HUB = "https://huggingface.co"
_REPO = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_OPTIONS = ("folder", "endpoint", "token_env", "xet", "xet_patience")
_PATIENCE = 30.0
_LARGE = 64 << 20
"""Bytes from which a file is read through Xet."""

_SMALL = 16 << 20
"""Bytes up to which a file without a SHA-256 is read whole, and held to its id in git."""


class HfUpstream:
    """An :class:`Upstream` over one commit of a repository."""

    def __init__(
        self, source: str, deadline: Deadline, *, http: Http | None = None, xet_from: int = _LARGE
    ) -> None:
        """``http`` is closed with the upstream; ``xet_from``: bytes of the files read by Xet."""
        repo, revision, options = _parse(source)
        self.name = f"hf://{repo}"
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ON:
            raise UsageError(self.name, expected="to be asked for", found="HF_HUB_OFFLINE is set")
        hub = options.get("endpoint") or os.environ.get("HF_ENDPOINT") or _HUB
        patience = seconds(self.name, options, "xet_patience", _PATIENCE)
        xet = flag(self.name, options, "xet", default=True) and Xet.installed()
        variable = options.get("token_env")
        self._http = http or Http(None)
        self._hub = HubApi(
            self._http, endpoint(self.name, hub), repo, lambda: _token(self.name, variable)
        )
        try:
            with explained(listed=False):
                self.revision = self._hub.commit(revision or "main", deadline)
        except BaseException:
            self._http.close()
            raise
        self._xet = Xet(self.name, self._xet_access, patience=patience) if xet else None
        self._xet_from = xet_from
        self._folder = _folder(self.name, options.get("folder", ""))
        self._listed: dict[str, HubFile] = {}
        if self._folder:
            self.name += f"/{self._folder.rstrip('/')}"

    @property
    def xet(self) -> Xet | None:
        """How large files are read; None if they are not read through Xet."""
        return self._xet

    def files(self, deadline: Deadline) -> tuple[UpstreamFile, ...]:
        """The files of the commit, in order of their paths."""
        with explained(listed=False):
            everything = list(self._hub.files(self.revision, deadline))
        found = [(f.path.removeprefix(self._folder), f) for f in everything if self._has(f)]
        if everything and not found:
            raise SourceNotFound(
                self.name, expected="files in this folder", found=f"none of {len(everything)}"
            )
        self._listed = dict(found)
        return listing(
            self.name,
            (UpstreamFile(p, f.size, sha256=f.sha256, version=f.blob) for p, f in found),
        )

    def reader(self, file: UpstreamFile, deadline: Deadline) -> ObjectReader:
        """A file of the listing, to read ranges of it."""
        if not self._listed:
            self.files(deadline)
        listed = self._listed.get(file.path)
        if listed is None or (listed.size, listed.blob) != (file.size, file.version):
            raise SourceError(f"{self.name}/{file.path}", expected="a file that is listed")
        where = f"{self.name}/{file.path}"
        remote = RemoteReader(
            self._http,
            self._hub.url(self.revision, listed.path),
            file.size,
            where=where,
            headers=self._hub.headers,
            error_of=lambda url, response: self._hub.error(where, url, response),
            passing=lambda response: self._check(where, listed, response),
        )
        if listed.sha256 is None and listed.size <= _SMALL:
            return _SmallReader(remote, where, listed.blob)
        if self._xet is not None and listed.xet_hash and listed.size >= self._xet_from:
            return _XetReader(remote, self._xet, listed.xet_hash)
        return remote

    def local(self, file: UpstreamFile, deadline: Deadline) -> LocalFile | None:
        """None: nothing lies here."""
        return None

    def close(self) -> None:
        """Give back connections, and the process that reads through Xet."""
        if self._xet is not None:
            self._xet.close()
        self._http.close()

    def _has(self, file: HubFile) -> bool:
        return file.path.startswith(self._folder)

    def _xet_access(self, deadline: Deadline) -> XetAccess:
        return self._hub.xet_access(self.revision, deadline)

    def _check(self, where: str, file: HubFile, response: BaseHTTPResponse) -> None:
        """Raise :class:`PreconditionFailed` if an answer tells of another file."""
        for header, expected in (
            ("X-Repo-Commit", self.revision),
            ("X-Linked-Etag", file.sha256),
            ("X-Linked-Size", str(file.size)),
        ):
            found = response.headers.get(header)
            if found and expected and found.removeprefix("W/").strip('"') != expected:
                raise PreconditionFailed(where, expected=f"{header} {expected}", found=found)


class _XetReader:
    """Reads through Xet, and over HTTPS what does not come that way. Safe between threads."""

    local = False
    cached = None

    def __init__(self, remote: RemoteReader, xet: Xet, xet_hash: str) -> None:
        self.size = remote.size
        self.step = remote.step
        self._remote = remote
        self._xet = xet
        self._hash = xet_hash

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` from ``offset``."""
        view = buffer.cast("B")
        done = 0
        if view and 0 <= offset <= self.size - len(view):  # else it is told what is wrong with it
            done = self._xet.read_into(self._hash, self.size, offset, view, deadline)
        self._remote.read_into(offset + done, view[done:], deadline)

    def close(self) -> None:
        """Give back what was read ahead; the process is the upstream's."""
        self._remote.close()


class _SmallReader:
    """A small file, read whole when it is first read, and held to its blob's id in git."""

    local = False
    cached = None

    def __init__(self, remote: RemoteReader, where: str, blob: str) -> None:
        self.size = remote.size
        self.step = remote.step
        self._remote = remote
        self._where = where
        self._blob = blob
        self._lock = threading.Lock()
        self._data: bytes | None = None

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` from ``offset``; :class:`SourceError` if the bytes are not the blob's."""
        view = buffer.cast("B")
        if offset < 0 or offset + len(view) > self.size:
            self._remote.read_into(offset, view, deadline)
        view[:] = self._whole(deadline)[offset : offset + len(view)]

    def close(self) -> None:
        """Forget the bytes."""
        self._data = None
        self._remote.close()

    def _whole(self, deadline: Deadline) -> bytes:
        with held(self._lock, deadline, f"reading {self._where}"):
            if self._data is None:
                data = bytearray(self.size)
                self._remote.read_into(0, memoryview(data), deadline)
                self._data = self._checked(bytes(data))
            return self._data

    def _checked(self, data: bytes) -> bytes:
        kind = "sha1" if len(self._blob) == 40 else "sha256"
        blob = b"blob %d\0" % len(data) + data
        found = hashlib.new(kind, blob, usedforsecurity=False).hexdigest()
        if found != self._blob:
            raise SourceError(
                self._where,
                expected=f"the bytes of git blob {self._blob}",
                found=f"those of {found}",
                do="deploy it again; if it stays so, the Hub or what is before it is broken",
            )
        return data


def _parse(source: str) -> tuple[str, str, dict[str, str]]:
    """Repository, revision or empty, and options of a URL."""
    text, _, query = source.removeprefix("hf://").partition("?")
    repo, at, revision = text.partition("@")
    if not _REPO.fullmatch(repo) or ".." in repo or bool(at) != bool(revision):
        raise UsageError(
            "source", expected="hf://org/repo or hf://org/repo@revision", found=repr(f"hf://{text}")
        )
    return repo, revision, parse_options(f"hf://{text}", query, _OPTIONS)


def _folder(name: str, text: str) -> str:
    """What the paths of a folder's files begin with."""
    path = text.strip("/")
    if path and (problem := unsafe_path(path)):
        raise UsageError(f"{name}: folder", expected="a path in the repository", found=problem)
    return f"{path}/" if path else ""


def _token(name: str, variable: str | None) -> str | None:
    """The token there is now; of the variable, if one is named."""
    if variable is not None:
        token = os.environ.get(variable)
        if not token:
            raise UsageError(f"{name}: token_env", expected=f"a token in {variable}", found="none")
        return token.strip()
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN and not os.environ.get("HF_TOKEN"):
        return None
    return get_token()
