"""A folder in the layout of a Hugging Face repository, a snapshot of its cache included.

Symbolic links are followed, because the cache is made of them. What begins with a dot (``.git``,
``.cache``, ``.gitattributes``) belongs to tools, not to the model, and is passed over.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from warmcast.flows.errors import MissingShard, SourceError
from warmcast.flows.local import LocalFile, LocalReader
from warmcast.flows.upstreams import UpstreamFile
from warmcast.flows.upstreams.listing import DISTRIBUTED
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHE_PREFIX = "models--"


def open_folder(source: str | Path, deadline: Deadline) -> FolderUpstream:  # noqa: ARG001
    """Open a folder by its path, or by ``file:///path``."""
    if isinstance(source, str) and source.lower().startswith("file://"):
        return FolderUpstream(Path(unquote(urlsplit(source).path)))
    return FolderUpstream(Path(source))


class FolderUpstream:
    """An :class:`Upstream` over a folder; its files are read where they are."""

    def __init__(self, folder: Path) -> None:
        # Not resolved: a snapshot's own path says the commit, whatever it links to.
        self._folder = Path.cwd() / folder.expanduser()
        if not self._folder.is_dir():
            raise UsageError(
                f"source {str(folder)!r}",
                expected="a folder",
                found="a file" if self._folder.exists() else "nothing there",
                do="name the folder that holds config.json and the weights",
            )
        snapshot = self._folder.parent.name == "snapshots" and _COMMIT.fullmatch(self._folder.name)
        self.revision = self._folder.name if snapshot else ""
        name = self._folder.parent.parent.name if snapshot else self._folder.name
        self.name = f"folder:{name.removeprefix(_CACHE_PREFIX).replace('--', '/')}"

    def files(self, deadline: Deadline) -> tuple[UpstreamFile, ...]:
        """The files below the folder, in order of their paths."""
        found: list[UpstreamFile] = []
        self._walk(self._folder, "", {os.path.realpath(self._folder)}, found, deadline)
        return tuple(sorted(found, key=lambda f: f.path))

    def reader(self, file: UpstreamFile, deadline: Deadline) -> LocalReader:
        """The file, open as it is now."""
        return LocalReader(self.local(file, deadline))

    def local(self, file: UpstreamFile, deadline: Deadline) -> LocalFile:
        """The file where it lies."""
        deadline.check(f"looking at {file.path}")
        return LocalFile.of(file.path, self._folder / file.path, size=file.size)

    def close(self) -> None:
        """Nothing is held."""

    def _walk(
        self,
        folder: Path,
        prefix: str,
        above: set[str],
        found: list[UpstreamFile],
        deadline: Deadline,
    ) -> None:
        deadline.check(f"listing {folder}")
        try:
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except OSError as cause:
            raise SourceError(
                str(folder), expected="a folder that can be listed", found=cause.strerror
            ) from cause
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if entry.name.startswith(".") and not (entry.name == DISTRIBUTED and entry.is_file()):
                continue
            if entry.is_dir():
                real = os.path.realpath(entry.path)
                if real in above:
                    raise SourceError(
                        path, expected="folders that end", found="a link to a folder above it"
                    )
                self._walk(Path(entry.path), f"{path}/", above | {real}, found, deadline)
            elif entry.is_file():
                found.append(UpstreamFile(path, entry.stat().st_size))
            elif entry.is_symlink():
                raise MissingShard(
                    str(folder / entry.name),
                    expected="a file behind the link",
                    found="none",
                    do="the download did not finish; run it again",
                )
            else:
                raise SourceError(path, expected="files and folders", found="a device or a pipe")
