"""Publish: write the manifest, then move the ref; the last thing a deploy does.

The ref is moved only if it stands where it stood when the deploy began. Whoever loses that race
fails, unless the winner published the same content.
"""

from __future__ import annotations

from dataclasses import dataclass

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    IntegrityError,
    InvalidData,
    NotFound,
    PreconditionFailed,
    StoreError,
)
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin, Ref, RefState
from warmcast.manifests.retention import put_manifest
from warmcast.manifests.trust import PublicKey, Signer, message, read, write


class Collected(StoreError):
    """Blobs that the origin had were collected before the manifest that names them was written."""


@dataclass(frozen=True, slots=True)
class Published:
    """The manifest that the ref names now, and whether this deploy moved it."""

    manifest: Manifest
    changed: bool


@dataclass(frozen=True, slots=True)
class Signing:
    """How manifests are signed, and the key that has to recognise it."""

    signer: Signer
    key: PublicKey

    def sign(self, origin: Origin, digest: str, deadline: Deadline) -> None:
        """Sign a manifest that is in the origin, if this key has not."""
        if self.key.name not in read(origin.store, digest, deadline):
            signature = self.signer(message(digest), deadline)
            write(origin.store, digest, self.key, signature, deadline)


def publish(
    origin: Origin,
    ref: Ref,
    manifest: Manifest,
    before: RefState | None,
    deadline: Deadline,
    signing: Signing | None = None,
) -> Published:
    """Point ``ref`` at ``manifest``, unless it names the same content already. It is signed before
    anybody can find it.

    Raises :class:`PreconditionFailed` if another deploy moved it since ``before``, and
    :class:`Collected` if blobs went that nobody named until then: they are to be mirrored again.
    """
    present = _same_content(origin, before, manifest, deadline)
    if present is not None:
        if signing is not None:
            signing.sign(origin, present.digest, deadline)
        return Published(present, changed=False)
    missing = put_manifest(origin, manifest, deadline)
    if missing:
        raise Collected(
            f"{missing[0].path} and {len(missing) - 1} more" if missing[1:] else missing[0].path,
            expected="to be in the origin, as it was when this deploy looked",
            found="that it was deleted meanwhile",
            do="deploy again",
        )
    if signing is not None:
        signing.sign(origin, manifest.digest, deadline)
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
