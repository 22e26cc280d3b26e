"""Where no peer has the weights: the node's agent, and the origin. Each branch is a vote."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from warmcast.loader.errors import WeightVerificationError
from warmcast.loader.filling import Filled, Filling
from warmcast.loader.node.client import NodeClient, NodeGone
from warmcast.loader.node.others import Others
from warmcast.loader.plan import Plan
from warmcast.loader.quorum import Group
from warmcast.loader.report import Note
from warmcast.loader.routes import Job, Source
from warmcast.loader.routes.node import Arrivals, NodeRoute, others_of, suspect
from warmcast.loader.routes.origin import OriginRoute
from warmcast.loader.stages import Outcome, Stages
from warmcast.loader.staging import Staging
from warmcast.loader.stream import BlobSource
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin

_NODE_SHARE = 0.8
"""The part of the time left that reading from the node may take; the origin has what remains."""

Blobs = Callable[[], AbstractContextManager[BlobSource]]


class Storage:
    """The node's agent, if there is one, and the origin, as one load sees them."""

    def __init__(
        self,
        origin: Origin,
        node: NodeClient | None,
        staging: Staging,
        stages: Stages,
        filling: Filling,
        group: Group,
        deadline: Deadline,
    ) -> None:
        self._origin = origin
        self._node = node
        self._staging = staging
        self._stages = stages
        self._filling = filling
        self._group = group
        self._deadline = deadline

    def read(self, job: Job) -> Filled:
        """Fill and verify a job's targets. Raises what the origin, the last, failed with."""
        if self._by_node:
            near = self._from_node(job)
            if near is not None:
                return near
        filled = self._from_origin(job, careful=False)
        if not isinstance(filled, Filled) and self._again_with_care(filled):
            filled = self._from_origin(job, careful=True)
        if isinstance(filled, Filled):
            return filled
        raise filled.error or WarmcastError(f"{self._origin.url} was not read")

    def open(self, manifest: Manifest, plan: Plan) -> tuple[str, str, Blobs]:
        """Where a progressive load opens blobs: the route's name, the source's, and how."""
        node = self._node
        if self._by_node and node is not None:
            met = self._stages.attempt("node", partial(self._others, node, manifest))
            if met.error is None:
                files = {p.entry.file for p in plan.placements if p.entry is not None}
                others = met.value
                return (
                    "node",
                    node.url,
                    lambda: Arrivals(node, others, self._origin, manifest, files, self._deadline),
                )

        def origin() -> AbstractContextManager[BlobSource]:
            return nullcontext(self._origin)

        return "origin", self._origin.url, origin

    @property
    def _by_node(self) -> bool:
        """Whether agents are asked: a rank that was not told of one says so in the vote."""
        return self._node is not None or self._group.size > 1

    def _from_node(self, job: Job) -> Filled | None:
        """What the nodes' agents have, for all ranks; None if the origin is to be read."""
        met = self._stages.attempt("node", partial(self._agent, job))
        if met.error is not None or met.value is None:
            return None
        limit = self._deadline.share(_NODE_SHARE)
        filled = self._filling.fill("node", job.plan, met.value, limit)
        if isinstance(filled, Filled):
            return filled
        # What was wrong on its way is known to the agent; what the GPU found is not.
        if self._node is not None and isinstance(filled.problem, WeightVerificationError):
            suspect(self._node, job.manifest)
        return None

    def _agent(self, job: Job, note: Note) -> Source:
        if self._node is None:
            raise NodeGone("node agent", expected="one", found="none was named")
        source = NodeRoute(self._node, self._origin, self._staging).find(job, self._deadline)
        note.yes(source.name)
        return source

    def _others(self, node: NodeClient, manifest: Manifest, note: Note) -> Others | None:
        others = others_of(node, manifest, self._deadline)
        note.yes(node.url)
        return others

    def _from_origin(self, job: Job, *, careful: bool) -> Filled | Outcome[Any]:
        route = OriginRoute(self._origin, self._staging, careful=careful)
        source = route.find(job, self._deadline)
        return self._filling.fill("origin", job.plan, source, self._deadline)

    def _again_with_care(self, failed: Outcome[Any]) -> bool:
        """Whether a rank's tensors were wrong, of which only parts of chunks were read."""
        wrong = isinstance(failed.problem, WeightVerificationError)
        with suppress(WarmcastError):  # what failed first is the error to tell
            return not self._group.vote(not wrong, "wrong bytes", self._deadline)
        return False
