"""Publish: write the manifest, then move the ref; the last thing a deploy does.

The ref is moved only if it stands where it stood when the deploy began. Whoever loses that race
fails, unless the winner published the same content.
"""

from __future__ import annotations

from dataclasses import dataclass

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, InvalidData, NotFound, PreconditionFailed
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin, Ref, RefState


@dataclass(frozen=True, slots=True)
class Published:
    """The manifest that the ref names now, and whether this deploy moved it."""

    manifest: Manifest
    changed: bool


def publish(
    origin: Origin, ref: Ref, manifest: Manifest, before: RefState | None, deadline: Deadline
) -> Published:
    """Point ``ref`` at ``manifest``, unless it names the same content already.

    Raises :class:`PreconditionFailed` if another deploy moved it since ``before``.
    """
    present = _same_content(origin, before, manifest, deadline)
    if present is not None:
        return Published(present, changed=False)
    origin.put_manifest(manifest, deadline)
    try:
        origin.move_ref(ref, manifest.digest, before, deadline)
    except PreconditionFailed:
        present = _same_content(origin, origin.ref(ref, deadline), manifest, deadline)
        if present is None:
            raise
        return Published(present, changed=False)
    return Published(manifest, changed=True)


def _same_content(
    origin: Origin, state: RefState | None, manifest: Manifest, deadline: Deadline
) -> Manifest | None:
    """The manifest that a ref names, if it has the content of ``manifest``."""
    if state is None:
        return None
    try:
        present = origin.manifest(state.record.manifest, deadline)
    except (NotFound, IntegrityError, InvalidData):
        return None  # a ref to nothing, or to what was damaged, is worth replacing
    return present if present.same_content(manifest) else None
