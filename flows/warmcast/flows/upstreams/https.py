"""Files of a web server: ``https://host/folder/``, or ``https://host/folder/model.safetensors``.

HTTP cannot list. Of a folder the files are those that ``#files=config.json,sub/x.bin`` names, or
else those that are found: the usual names of a model's files (``_USUAL``), and the shards that an
index among them names. A URL whose last part ends as weights do is that one file.

What holds a file to its state is its strong ETag; else, if it is older than a minute, the time of
its last change; else nothing is, but its size. A query (``?sig=…``) is sent with every request; a
user and password in the URL are sent to this server only. ``http://`` is taken for this machine,
and for others with ``#plain``. A server that reads no ranges is read once, into a temporary file.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from urllib.parse import SplitResult, quote, unquote, urlsplit

from urllib3 import BaseHTTPResponse

from warmcast.flows.convert.index import MOST_NBYTES, read_index
from warmcast.flows.errors import SourceError, SourceNotFound, SourceRefused
from warmcast.flows.local import LocalFile
from warmcast.flows.upstreams import UpstreamFile, read_small
from warmcast.flows.upstreams.failures import answer_error, explained, persist
from warmcast.flows.upstreams.listing import MOST_FILES, listing
from warmcast.flows.upstreams.options import flag, parse_options
from warmcast.flows.upstreams.remote import (
    RemoteReader,
    Validator,
    check_encoding,
    followed,
    server_of,
    size_of,
)
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import NotFound, UsageError
from warmcast.manifests.rules import unsafe_path
from warmcast.manifests.stores import ObjectReader
from warmcast.manifests.stores.http import Http

_OPTIONS = ("files", "plain")
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
_AT_ONCE = 8
_SETTLED = 60.0  # seconds after which a file's time of change, in seconds, names one state of it
_CHECK = "check the URL, and the user and password in it"

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_USUAL = (
    *_INDICES,
    *("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_config.json"),
    *("config.json", "generation_config.json", "hf_quant_config.json", "quantize_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json"),
    *("processor_config.json", "modules.json", "config_sentence_transformers.json"),
    *("sentence_bert_config.json", "1_Pooling/config.json", "README.md", "LICENSE"),
)


class HttpsUpstream:
    """An :class:`Upstream` over files of a web server."""

    revision = ""

    def __init__(self, source: str, deadline: Deadline, *, http: Http | None = None) -> None:
        """``http`` is closed with the upstream. Nothing is asked yet."""
        parts = _parts(source)
        host = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
        folder, _, last = parts.path.rpartition("/")
        named = last.lower().endswith(_WEIGHTS)
        path = f"{folder}/" if named or not last else f"{parts.path}/"
        self.name = f"{parts.scheme}://{host}{path}"
        options = parse_options(self.name, parts.fragment, _OPTIONS)
        here = _LOOPBACK.fullmatch(str(parts.hostname)) is not None
        if parts.scheme == "http" and not here and not flag(self.name, options, "plain"):
            raise UsageError(
                self.name,
                expected="https://",
                found="http://",
                do="add #plain if the network is to be trusted",
            )
        self._named = _named(self.name, options, unquote(last) if named else None)
        self._query = parts.query
        self._server = server_of(self.name)
        self._authorization = _basic(parts.username, parts.password)
        self._validators: dict[str, Validator | None] = {}
        self._http = http or Http(None)

    def files(self, deadline: Deadline) -> tuple[UpstreamFile, ...]:
        """The files that were named, or found, in order of their paths."""
        with explained(listed=False), ThreadPoolExecutor(_AT_ONCE) as pool:
            if self._named is not None:
                return listing(
                    self.name, pool.map(lambda path: self._look(path, deadline), self._named)
                )
            return listing(self.name, self._search(pool, deadline))

    def reader(self, file: UpstreamFile, deadline: Deadline) -> ObjectReader:
        """A file of the listing, to read ranges of it."""
        where = f"{self.name}{file.path}"
        return RemoteReader(
            self._http,
            self._url(file.path),
            file.size,
            where=where,
            headers=self._headers,
            error_of=lambda _, response: answer_error(where, response, do=_CHECK),
            validator=self._validators.get(file.path) or _validator(file.version),
        )

    def local(self, file: UpstreamFile, deadline: Deadline) -> LocalFile | None:
        """None: nothing lies here."""
        return None

    def close(self) -> None:
        """Give back the connections."""
        self._http.close()

    def _url(self, path: str) -> str:
        return f"{self.name}{quote(path)}" + (f"?{self._query}" if self._query else "")

    def _headers(self, url: str) -> dict[str, str]:
        headers = {"User-Agent": "warmcast"}
        if self._authorization and server_of(url) == self._server:
            headers["Authorization"] = self._authorization
        return headers

    def _search(self, pool: ThreadPoolExecutor, deadline: Deadline) -> list[UpstreamFile]:
        """The usual files, as far as they are there, and the shards that they name."""
        refusals: list[SourceRefused] = []

        def look(path: str) -> UpstreamFile | None:
            try:
                return self._look(path, deadline)
            except NotFound:
                return None
            except SourceRefused as refusal:  # how a bucket answers that must not be listed
                refusals.append(refusal)
                return None

        found = [file for file in pool.map(look, _USUAL) if file is not None]
        if not found and refusals:
            raise refusals[0]
        if not found:
            raise SourceNotFound(
                self.name,
                expected="the usual files of a model",
                found="none of them",
                do="name the files: #files=config.json,model.safetensors",
            )
        shards: set[str] = set()
        for file in found:
            if file.path in _INDICES:
                data = read_small(self, file, MOST_NBYTES, deadline)
                shards |= set(read_index(file.path, data).values())
        more = pool.map(look, sorted(shards.difference(_USUAL)))
        return found + [file for file in more if file is not None]

    def _look(self, path: str, deadline: Deadline) -> UpstreamFile:
        """What the server says of a file; :class:`NotFound` if there is none."""
        where = f"{self.name}{path}"
        if problem := unsafe_path(path):
            raise SourceError(where, expected="a plain path", found=problem)
        file = persist(where, deadline, lambda: self._ask(path, where, deadline, head=True))
        if file is None:  # signed for reading only, or no heads are given
            file = persist(where, deadline, lambda: self._ask(path, where, deadline, head=False))
        if file is None:
            raise SourceRefused(where, expected="permission", found="none", do=_CHECK)
        return file

    def _ask(self, path: str, where: str, deadline: Deadline, *, head: bool) -> UpstreamFile | None:
        """Ask for a file's head, or for its first byte; None if that is not given."""
        more = {"Accept-Encoding": "identity"} | ({} if head else {"Range": "bytes=0-0"})
        with followed(
            self._http,
            "HEAD" if head else "GET",
            self._url(path),
            deadline,
            where=where,
            headers=lambda url: {**self._headers(url), **more},
        ) as (_, response):
            if response.status in (400, 403, 405, 501):
                return None
            empty = response.status == 416  # it has no first byte
            if response.status not in (200, 206) and not empty:
                raise answer_error(where, response, do=_CHECK)
            check_encoding(where, response)
            page = response.headers.get("Content-Type", "").startswith("text/html")
            if page and not path.endswith((".html", ".htm")):
                raise NotFound(where, expected="a file", found="a page of HTML")
            size = 0 if empty else size_of(response)
            if size is None:
                return None
            validator, version = _validator_of(response)
            self._validators[path] = validator
            return UpstreamFile(path, size, version=version)


def _validator_of(response: BaseHTTPResponse) -> tuple[Validator | None, str]:
    """What holds further answers to the state that this one tells of, and the name of the state.

    The name is empty where another state could have the same.
    """
    headers = response.headers
    etag, changed = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if etag.startswith('"'):
        return Validator("If-Match", "ETag", etag), f"etag:{etag}"
    if not changed:
        return None, ""
    settled = _seconds_between(changed, headers.get("Date", "")) >= _SETTLED
    version = f"modified:{changed}" if settled else ""
    return Validator("If-Unmodified-Since", "Last-Modified", changed), version


def _validator(version: str) -> Validator | None:
    """The same, of a version that was told."""
    kind, _, value = version.partition(":")
    if kind == "etag":
        return Validator("If-Match", "ETag", value)
    return Validator("If-Unmodified-Since", "Last-Modified", value) if kind == "modified" else None


def _seconds_between(earlier: str, later: str) -> float:
    """Seconds between two dates as HTTP writes them; 0 if one is none."""
    try:
        span = parsedate_to_datetime(later) - parsedate_to_datetime(earlier)
    except (ValueError, TypeError):  # TypeError: one tells its zone, the other does not
        return 0.0
    return span.total_seconds()


def _parts(source: str) -> SplitResult:
    try:
        parts = urlsplit(source)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        # Not quoted: it may hold a password.
        raise UsageError("source", expected="https://host/folder/", found="another URL")
    return parts


def _named(where: str, options: Mapping[str, str], weights: str | None) -> tuple[str, ...] | None:
    """The files that a URL names; None if they are to be searched for."""
    if "files" not in options:
        return None if weights is None else (weights,)
    if weights is not None:
        raise UsageError(f"{where}: files", expected="the URL of a folder before #", found=weights)
    paths = tuple(options["files"].split(","))
    if len(paths) > MOST_FILES or not all(paths):
        raise UsageError(f"{where}: files", expected="paths and ',' between them")
    return paths


def _basic(user: str | None, password: str | None) -> str | None:
    """The header that tells user and password."""
    if user is None:
        return None
    pair = f"{unquote(user)}:{unquote(password or '')}".encode()
    return f"Basic {base64.b64encode(pair).decode()}"
