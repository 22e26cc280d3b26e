"""The Upstream protocol, and the one place that knows which upstreams there are.

An upstream is where a checkpoint comes from: a repository of files under ``/``-separated paths.
It lists them, and reads ranges of them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from warmcast.flows.errors import SourceError
from warmcast.flows.local import LocalFile
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError
from warmcast.manifests.stores import ObjectReader


@dataclass(frozen=True, slots=True)
class UpstreamFile:
    """A file of a repository: its path in it, its size in bytes, and what is published of it.

    ``sha256`` (hexadecimal) and ``crc32c`` are of its bytes, None where the upstream does not
    tell. ``version`` names this state of the file (an etag, a generation, a commit and blob id):
    another state never has the same; empty where the upstream tells none.
    """

    path: str
    size: int
    sha256: str | None = None
    crc32c: int | None = None
    version: str = ""


class Upstream(Protocol):
    """A repository of files. A new upstream is one file beside this one and a line below.

    Calls are safe between threads. Errors are :class:`SourceError` and its kinds, and
    ``DeadlineExceeded``; what can pass (429, 5xx, a connection lost) is tried again inside.
    """

    name: str
    """What the manifest says of it, without paths or addresses of this machine."""

    revision: str
    """The commit, where the upstream tells; else empty."""

    def files(self, deadline: Deadline) -> tuple[UpstreamFile, ...]:
        """The files, in order of their paths."""

    def reader(self, file: UpstreamFile, deadline: Deadline) -> ObjectReader:
        """Open one file to read ranges of it, many at once; of the state that ``file`` tells.

        Reading raises :class:`SourceChanged` if the upstream has another state by now.
        """

    def local(self, file: UpstreamFile, deadline: Deadline) -> LocalFile | None:
        """The file where it lies on this machine; None if it does not."""

    def close(self) -> None:
        """Give back connections and processes."""


_EXTRAS = {"gs": "flows,gcs", "s3": "flows,s3"}
_UPSTREAMS = {
    "file": "warmcast.flows.upstreams.folder:open_folder",
    "gs": "warmcast.flows.upstreams.gs:open_gs",
    "hf": "warmcast.flows.upstreams.hf:HfUpstream",
    "http": "warmcast.flows.upstreams.https:HttpsUpstream",
    "https": "warmcast.flows.upstreams.https:HttpsUpstream",
    "s3": "warmcast.flows.upstreams.s3:open_s3",
}


def open_upstream(source: str | Path, deadline: Deadline | None = None) -> Upstream:
    """Open the upstream that a command line names: a folder, or one of these URLs.

    ``file:///folder``, ``hf://org/repo@revision``, ``s3://bucket/prefix``, ``gs://bucket/prefix``,
    ``https://host/folder/``; the options of each are told in its module. A client
    library is imported here, when its scheme is first used.

    Raises :class:`UsageError` if there is none such, :class:`SourceError` and its kinds, and
    ``DeadlineExceeded``.
    """
    scheme = source.partition("://")[0] if isinstance(source, str) and "://" in source else "file"
    target = _UPSTREAMS.get(scheme.lower())
    if target is None:
        raise UsageError(
            "source",
            expected=f"a folder, or a URL of {', '.join(f'{s}://' for s in _UPSTREAMS)}",
            found=f"{scheme}://",
        )
    if isinstance(source, str) and "://" in source:
        source = f"{scheme.lower()}{source[len(scheme) :]}"
    module, _, name = target.partition(":")
    try:
        open_ = getattr(importlib.import_module(module), name)
        upstream: Upstream = open_(source, deadline or Deadline.never())
    except ModuleNotFoundError as cause:
        raise UsageError(
            f"source {scheme}://",
            expected=f"the package {cause.name!r}",
            found="it is not installed",
            do=f"pip install 'warmcast[{_EXTRAS.get(scheme, 'flows')}]'",
        ) from cause
    return upstream


def pinned(source: str | Path, revision: str) -> str | Path:
    """A source that names a revision where the upstream knows revisions; else the source."""
    if not revision or not isinstance(source, str) or not source.lower().startswith("hf://"):
        return source
    place, question, options = source.partition("?")
    return f"{place.partition('@')[0]}@{revision}{question}{options}"


def read_small(upstream: Upstream, file: UpstreamFile, limit: int, deadline: Deadline) -> bytes:
    """A small file's bytes; :class:`SourceError` if it holds more than ``limit``."""
    if file.size > limit:
        raise SourceError(file.path, expected=f"{limit} bytes at most", found=file.size)
    data = bytearray(file.size)
    reader = upstream.reader(file, deadline)
    try:
        reader.read_into(0, memoryview(data), deadline)
    finally:
        reader.close()
    return bytes(data)
