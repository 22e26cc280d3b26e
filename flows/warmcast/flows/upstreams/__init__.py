"""The Upstream protocol, and the one place that knows which upstreams there are.

An upstream is where a checkpoint comes from: a repository of files under ``/``-separated paths.
It lists them, and brings one at a time to where it can be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from warmcast.flows.local import LocalFile
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError


@dataclass(frozen=True, slots=True)
class UpstreamFile:
    """A file of a repository: its path in it, and its size in bytes."""

    path: str
    size: int


class Upstream(Protocol):
    """A repository of files. A new upstream is one file beside this one and a line below."""

    name: str
    """What the manifest says of it, without paths or addresses of this machine."""

    revision: str
    """The commit, where the upstream tells; else empty."""

    def files(self, deadline: Deadline) -> tuple[UpstreamFile, ...]:
        """The files, in order of their paths. Raises :class:`SourceError`."""

    def bring(self, file: UpstreamFile, deadline: Deadline) -> LocalFile:
        """The file's bytes on this machine. Raises :class:`SourceChanged` if it is another now."""


def open_upstream(source: str | Path) -> Upstream:
    """Open the upstream that a command line names: for now, a folder.

    Raises :class:`UsageError` if there is none such.
    """
    from warmcast.flows.upstreams.folder import FolderUpstream

    scheme = urlsplit(source).scheme if isinstance(source, str) and "://" in source else ""
    if scheme not in ("", "file"):
        raise UsageError("source", expected="a folder", found=f"{source!s}")
    return FolderUpstream(Path(urlsplit(str(source)).path if scheme else source))
