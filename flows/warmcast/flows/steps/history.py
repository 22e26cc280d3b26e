"""Promote and roll back: move a ref to a manifest that is there, by compare-and-swap."""

from __future__ import annotations

from dataclasses import dataclass

from warmcast.flows.errors import DeployError
from warmcast.flows.steps.publish import Collected
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import NotFound
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin, Ref
from warmcast.manifests.retention import put_manifest


@dataclass(frozen=True, slots=True)
class Moved:
    """Where a ref stood, None if it is new, and the manifest that it names now."""

    ref: str
    before: str | None
    manifest: Manifest

    def summary(self) -> str:
        """One line for people."""
        now = self.manifest.digest[:12]
        if self.before == self.manifest.digest:
            return f"{self.ref}: nothing changed: manifest {now}"
        was = f"was {self.before[:12]}" if self.before else "is new"
        return f"{self.ref}: manifest {now} ({was})"


def promote(origin: Origin, source: str, ref: Ref, deadline: Deadline) -> Moved:
    """Point ``ref`` at what ``source`` (a ref or a digest) names.

    Raises :class:`NotFound` if there is no such manifest, :class:`PreconditionFailed` if somebody
    else moves the ref meanwhile.
    """
    return _move(origin, ref, origin.resolve(source, deadline), deadline)


def roll_back(origin: Origin, ref: Ref, to: str | None, deadline: Deadline) -> Moved:
    """Point ``ref`` at what it named before, or at ``to``, a digest's beginning in its history."""
    state = origin.ref(ref, deadline)
    if state is None:
        raise NotFound(f"ref {ref}", expected=f"a ref in {origin.url}", found="none")
    if to is None:
        digest = state.record.previous
        if digest is None:
            raise DeployError(f"ref {ref}", expected="an earlier manifest", found="its first one")
    else:
        past = {record.manifest for record in origin.history(ref, deadline)}
        found = sorted(known for known in past if known.startswith(to)) if len(to) >= 4 else []
        if len(found) != 1:
            raise DeployError(
                f"--to {to!r}",
                expected="four digits or more of one digest in the ref's history",
                found=", ".join(known[:12] for known in found) or "none",
                do=f"see `warmcast refs {ref}`",
            )
        digest = found[0]
    return _move(origin, ref, origin.manifest(digest, deadline), deadline)


def _move(origin: Origin, ref: Ref, manifest: Manifest, deadline: Deadline) -> Moved:
    state = origin.ref(ref, deadline)
    before = state.record.manifest if state else None
    if before != manifest.digest:
        # A collector may have had its eyes on it.
        missing = put_manifest(origin, manifest, deadline)
        if missing:
            raise Collected(
                f"manifest {manifest.digest[:12]}",
                expected="all its blobs",
                found=f"{missing[0].path} is not in the origin",
                do="deploy it again",
            )
        origin.move_ref(ref, manifest.digest, state, deadline)
    return Moved(str(ref), before, manifest)
