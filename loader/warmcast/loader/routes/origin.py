"""The origin: the store that the deployment was mirrored to. Always the last route."""

from __future__ import annotations

import time

from warmcast.loader.errors import SkeletonMismatch
from warmcast.loader.plan import Targets
from warmcast.loader.routes import Job, Source
from warmcast.loader.staging import Staging
from warmcast.loader.stream import stream
from warmcast.loader.transports import Span
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin


class OriginRoute:
    """Read the files' blobs from the origin; ``careful``: whole chunks only, each checked."""

    name = "origin"

    def __init__(self, origin: Origin, staging: Staging, *, careful: bool = False) -> None:
        self._origin = origin
        self._staging = staging
        self._careful = careful

    def find(self, job: Job, deadline: Deadline) -> Source:
        """The origin itself; :class:`SkeletonMismatch` for a plan of changed weights."""
        if any(placement.entry is None for placement in job.plan.placements):
            raise SkeletonMismatch(
                "origin", expected="containers as deployed", found="changed ones"
            )
        return _OriginSource(self._origin, job.manifest, self._staging, careful=self._careful)


class _OriginSource:
    transport: str | None = None
    reason = ""

    def __init__(
        self, origin: Origin, manifest: Manifest, staging: Staging, *, careful: bool
    ) -> None:
        self._origin = origin
        self._manifest = manifest
        self._staging = staging
        self._careful = careful
        self.name = origin.url

    def fill(self, targets: Targets, deadline: Deadline) -> Span:
        began = time.monotonic()
        stream(
            self._origin, self._manifest, targets, self._staging, deadline, careful=self._careful
        )
        return began, time.monotonic()

    def abandon(self) -> None:
        """Nothing was begun."""
