"""Servers that upstreams read from: plain HTTP, and a Hugging Face Hub with its storage.

They answer as the real ones do, as far as they are asked; faults are those of ``s3_proxy``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.manifests.s3_proxy import Proxy

LFS = (".safetensors", ".bin")


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    headers: Mapping[str, str]

    @classmethod
    def of(cls, data: bytes) -> Request:
        lines = data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        pairs = (line.partition(":") for line in lines[1:])
        return cls(method, target, {k.lower(): v.strip() for k, _, v in pairs})

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> dict[str, str]:
        return {k: v[0] for k, v in parse_qs(urlsplit(self.target).query).items()}


class Server(Proxy):
    """A server that answers by itself."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0))

    def _forward(self, request: bytes) -> bytes:
        return self.answer(Request.of(request))

    def answer(self, request: Request) -> bytes:
        raise NotImplementedError

    @property
    def asked(self) -> list[Request]:
        return [Request.of(request) for request in self.requests]

    @property
    def connections(self) -> int:
        """Connections that clients hold open."""
        with self._lock:
            return len(self._open)


def response(
    request: Request, status: str, headers: Mapping[str, str] | None = None, body: bytes = b""
) -> bytes:
    found = {"Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in found.items())
    sent = b"" if request.method == "HEAD" else body
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + sent


def content(
    request: Request, data: bytes, headers: Mapping[str, str] | None = None, *, ranges: bool = True
) -> bytes:
    """A file, or the range of it that is asked for."""
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
    if not ranges or match is None:
        return response(request, "200 OK", headers, data)
    first, last = int(match[1]), min(int(match[2]), len(data) - 1)
    if first >= len(data):
        return response(request, "416 Range Not Satisfiable", headers)
    told = {"Content-Range": f"bytes {first}-{last}/{len(data)}", **(headers or {})}
    return response(request, "206 Partial Content", told, data[first : last + 1])


@dataclass
class File:
    """A file of a web server, and what it says of it."""

    data: bytes
    headers: dict[str, str] = field(default_factory=dict)


class Web(Server):
    """Files under paths. ``ranges``: whether they can be had; ``head``: whether HEAD can.

    Conditions are heeded where the file has the header that they are about.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, File] = {}
        self.moved: dict[str, str] = {}
        self.ranges = True
        self.head = True
        self.authorization: str | None = None

    def put(self, path: str, data: bytes, **headers: str) -> None:
        """Headers are named as ``last_modified``; an ETag is made of the bytes if none is given."""
        told = {name.replace("_", "-").title(): value for name, value in headers.items() if value}
        if "etag" not in headers:
            told["Etag"] = f'"{sha256(data)[:32]}"'
        self.files[path] = File(data, told)

    def answer(self, request: Request) -> bytes:
        if self.authorization and request.headers.get("authorization") != self.authorization:
            return response(request, "401 Unauthorized")
        if request.method == "HEAD" and not self.head:
            return response(request, "405 Method Not Allowed")
        if (target := self.moved.get(request.path)) is not None:
            return response(request, "302 Found", {"Location": target})
        file = self.files.get(request.path)
        if file is None:
            return response(request, "404 Not Found")
        for condition, header in (("if-match", "Etag"), ("if-unmodified-since", "Last-Modified")):
            wanted, found = request.headers.get(condition), file.headers.get(header)
            if wanted and found and wanted != found:
                return response(request, "412 Precondition Failed")
        return content(request, file.data, file.headers, ranges=self.ranges)


class Storage(Server):
    """Where a Hub's large files are: by their SHA-256, under signatures that expire."""

    def __init__(self) -> None:
        super().__init__()
        self.blobs: dict[str, bytes] = {}
        self.good = 0
        """The signature that is good; those before it have expired."""

    def sign(self, sha256: str) -> str:
        return f"{self.url}/{sha256}?Signature={self.good}"

    def answer(self, request: Request) -> bytes:
        data = self.blobs.get(request.path.removeprefix("/"))
        if request.query.get("Signature") != str(self.good):
            return response(request, "403 Forbidden", body=b"<Code>ExpiredToken</Code>")
        if data is None:
            return response(request, "404 Not Found")
        return content(request, data, {"ETag": '"of-the-storage"'})


@dataclass
class Repo:
    """A repository: its commits, what names them, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    extra: list[object] = field(default_factory=list)
    """What its listings hold besides files."""


class Hub(Server):
    """The Hub: ``tokens`` are those that are good; listings have ``page`` entries a page."""

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self.storage = storage
        self.repos: dict[str, Repo] = {}
        self.renamed: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.page = 1000
        self.xet: dict[str, str] = {}
        """The Xet hash of a SHA-256."""
        self.cas = ""

    def commit(self, name: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """A new commit on a branch, of these files and no others."""
        repo = self.repos.setdefault(name, Repo())
        text = json.dumps([name, *((p, sha256(d)) for p, d in sorted(files.items()))])
        commit = sha256(text.encode())[:40]
        repo.commits[commit] = dict(files)
        repo.names[branch] = commit
        return commit

    def answer(self, request: Request) -> bytes:
        path = request.path.removesuffix("/")
        if re.fullmatch(r"/api/models/[\w.-]+/[\w.-]+", path):
            path += "/revision/main"
        match = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/([a-z-]+)/([^?]+)", path)
        if match is None:
            match = re.fullmatch(r"/([\w.-]+/[\w.-]+)/(resolve)/([^?]+)", request.path)
        if match is None:
            return response(request, "404 Not Found")
        name, verb, rest = match.groups()
        if name in self.renamed:
            target = request.target.replace(name, self.renamed[name])
            return response(request, "307 Temporary Redirect", {"Location": target})
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.tokens:
            return response(request, "401 Unauthorized")
        repo = self.repos.get(name)
        if repo is None or (repo.private and not token):
            return refusal(
                request, "404 Not Found" if token else "401 Unauthorized", "RepoNotFound"
            )
        if repo.gated and verb == "resolve":
            return refusal(request, "403 Forbidden", "GatedRepo")
        commit, _, path = rest.partition("/") if verb == "resolve" else (rest, "", "")
        commit = repo.names.get(commit, commit)
        if commit not in repo.commits:
            return refusal(request, "404 Not Found", "RevisionNotFound")
        if verb == "resolve":
            return self._resolve(request, repo, commit, path)
        if verb == "tree":
            return self._tree(request, repo, commit)
        if verb == "revision":
            return as_json(request, {"id": name, "sha": commit})
        access = {"casUrl": self.cas, "accessToken": "of-the-storage", "exp": 1 << 40}
        return as_json(request, access)

    def _tree(self, request: Request, repo: Repo, commit: str) -> bytes:
        entries = [*repo.extra, *(self._entry(p, d) for p, d in repo.commits[commit].items())]
        start = int(request.query.get("cursor", 0))
        headers = {}
        if start + self.page < len(entries):
            url = f"{self.url}{request.path}?recursive=true&cursor={start + self.page}"
            headers["Link"] = f'<{url}>; rel="next"'
        return as_json(request, entries[start : start + self.page], headers)

    def _entry(self, path: str, data: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(data)}
        if not path.endswith(LFS):
            return {**entry, "oid": blob_id(data)}
        digest = sha256(data)
        pointer = f"version https://git-lfs\noid sha256:{digest}\nsize {len(data)}\n".encode()
        lfs = {"oid": digest, "size": len(data), "pointerSize": len(pointer)}
        xet = {"xetHash": self.xet[digest]} if digest in self.xet else {}
        return {**entry, "oid": blob_id(pointer), "lfs": lfs, **xet}

    def _resolve(self, request: Request, repo: Repo, commit: str, path: str) -> bytes:
        data = repo.commits[commit].get(path)
        if data is None:
            return refusal(request, "404 Not Found", "EntryNotFound")
        headers = {"X-Repo-Commit": commit}
        if not path.endswith(LFS):
            return content(request, data, {**headers, "ETag": f'"{blob_id(data)}"'})
        digest = sha256(data)
        self.storage.blobs[digest] = data
        headers |= {
            "Location": self.storage.sign(digest),
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(data)),
        }
        return response(request, "302 Found", headers)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def refusal(request: Request, status: str, code: str) -> bytes:
    return response(request, status, {"X-Error-Code": code, "X-Error-Message": "no"})


def as_json(request: Request, value: object, headers: Mapping[str, str] | None = None) -> bytes:
    told = {"Content-Type": "application/json", **(headers or {})}
    return response(request, "200 OK", told, json.dumps(value).encode())


XET_UPLOAD = """
import sys, hf_xet
with hf_xet.XetSession().new_upload_commit(endpoint=sys.argv[1]) as commit:
    uploads = [commit.start_upload_file(path) for path in sys.argv[2:]]
for upload in uploads:
    print(upload.result().xet_info.hash)
"""


def no_login(monkeypatch, folder: Path) -> None:
    """No token of this machine's user, and no setting of theirs."""
    import os

    from huggingface_hub import constants

    for name in os.environ:
        if name.startswith(("HF_", "HUGGING")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
