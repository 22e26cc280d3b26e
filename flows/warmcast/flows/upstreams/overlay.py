"""An adapter's repository laid over its base's: what is deployed of a merge.

The files are the base's, but for those that the adapter has too (a tokenizer with more tokens);
its own config and weights stand beside the base's. The model card stays the adapter's.
"""

from __future__ import annotations

from pathlib import Path

from warmcast.flows.local import LocalFile
from warmcast.flows.upstreams import Upstream, UpstreamFile, open_upstream
from warmcast.flows.upstreams.deployed import DeployedUpstream
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError
from warmcast.manifests.origin import Origin, Ref
from warmcast.manifests.stores import ObjectReader

_OF_BASE = ("config.json", "generation_config.json")
"""What the base says, whatever the adapter's repository holds."""


def open_source(
    source: str | Path, base: str | None, origin: Origin, deadline: Deadline
) -> Upstream:
    """Open the upstream of a deploy: ``source``, laid over ``base`` where there is one.

    ``base`` is a folder, a URL, or a ref of ``origin``. Raises what :func:`open_upstream` does, and
    ``NotFound`` for a ref that is not there.
    """
    if base is None:
        return open_upstream(source, deadline)
    below: Upstream
    if _is_ref(base):
        below = DeployedUpstream(origin, base, deadline)
    else:
        below = open_upstream(base, deadline)
    try:
        return OverlayUpstream(below, open_upstream(source, deadline))
    except BaseException:
        below.close()
        raise


def _is_ref(base: str) -> bool:
    if "://" in base or Path(base).is_dir():
        return False
    try:
        Ref.parse(base)
    except UsageError:
        return False
    return True


class OverlayUpstream:
    """An :class:`Upstream` over two; closing it closes both."""

    def __init__(self, below: Upstream, above: Upstream) -> None:
        self._below, self._above = below, above
        self.name = f"{above.name} merged into {below.name}"
        self.revision = above.revision
        self._of: dict[str, Upstream] = {}

    def files(self, deadline: Deadline) -> tuple[UpstreamFile, ...]:
        """The files of both, in order of their paths."""
        below = {file.path: file for file in self._below.files(deadline)}
        above = {
            file.path: file
            for file in self._above.files(deadline)
            if file.path not in _OF_BASE or file.path not in below
        }
        self._of = dict.fromkeys(below, self._below) | dict.fromkeys(above, self._above)
        return tuple(sorted((below | above).values(), key=lambda file: file.path))

    def reader(self, file: UpstreamFile, deadline: Deadline) -> ObjectReader:
        """Open a file of the one that has it."""
        return self._of[file.path].reader(file, deadline)

    def local(self, file: UpstreamFile, deadline: Deadline) -> LocalFile | None:
        """The file where it lies, if it does."""
        return self._of[file.path].local(file, deadline)

    def close(self) -> None:
        """Close both."""
        try:
            self._above.close()
        finally:
            self._below.close()
