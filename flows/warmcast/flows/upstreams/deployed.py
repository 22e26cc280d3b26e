"""What a ref of the origin names, as an upstream: a deployment that another one is made from."""

from __future__ import annotations

from warmcast.flows.local import LocalFile
from warmcast.flows.upstreams import UpstreamFile
from warmcast.manifests.checksum import from_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.origin import Origin
from warmcast.manifests.stores import ObjectReader


class DeployedUpstream:
    """An :class:`Upstream` over a manifest's files, but for those that only its layouts use."""

    def __init__(self, origin: Origin, ref: str, deadline: Deadline) -> None:
        self._origin = origin
        self._manifest = origin.resolve(ref, deadline)
        self.name = f"ref:{ref}"
        self.revision = self._manifest.digest

    def files(self, deadline: Deadline) -> tuple[UpstreamFile, ...]:
        """The files, in order of their paths."""
        shards = {shard.file for layout in self._manifest.layouts for shard in layout.shards}
        return tuple(
            UpstreamFile(f.path, f.size, f.sha256, from_hex(f.crc32c), f.sha256)
            for f in self._manifest.files
            if f.path not in shards
        )

    def reader(self, file: UpstreamFile, deadline: Deadline) -> ObjectReader:
        """Open the file's blob."""
        return self._origin.open_blob(self._manifest.file[file.path].sha256, deadline)

    def local(self, file: UpstreamFile, deadline: Deadline) -> LocalFile | None:
        """None: blobs are fetched, and checked on the way."""
        return None

    def close(self) -> None:
        """Nothing is held: the origin is its owner's."""
