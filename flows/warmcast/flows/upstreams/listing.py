"""What every upstream's list of files is held to, whoever wrote the names in it."""

from __future__ import annotations

from collections.abc import Iterable

from warmcast.flows.errors import SourceError
from warmcast.flows.upstreams import UpstreamFile
from warmcast.manifests.rules import unsafe_path

MOST_FILES = 100_000

DISTRIBUTED = ".metadata"
"""A distributed checkpoint's file, the only one of a model whose name begins with a dot."""


def listing(name: str, files: Iterable[UpstreamFile]) -> tuple[UpstreamFile, ...]:
    """The files in order of their paths.

    Without those of a name, or below a folder, that begins with a dot (but for a distributed
    checkpoint's ``.metadata``): they belong to tools, not to the model. Raises
    :class:`SourceError` for a path that is not below the upstream or is there twice, a negative
    size, and more than ``MOST_FILES`` files.
    """
    found: dict[str, UpstreamFile] = {}
    for count, file in enumerate(files):
        if problem := unsafe_path(file.path):
            raise SourceError(f"{name}: {file.path!r}", expected="a plain path", found=problem)
        if file.size < 0:
            raise SourceError(f"{name}: {file.path!r}", expected="a size", found=file.size)
        if file.path in found:
            raise SourceError(f"{name}: {file.path!r}", expected="each path once", found="it twice")
        if count == MOST_FILES:
            raise SourceError(name, expected=f"{MOST_FILES} files at most", found="more")
        found[file.path] = file
    return tuple(
        found[path]
        for path in sorted(found)
        if not any(part.startswith(".") for part in path.removesuffix(DISTRIBUTED).split("/"))
    )
