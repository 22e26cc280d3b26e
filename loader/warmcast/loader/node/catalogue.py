"""Manifests and refs as a node knows them: from its disk, the origin, or another node.

A manifest is what its digest says, wherever it comes from. A ref is the origin's to tell; where
the origin is away, what it last said is told, and how old that is.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from warmcast.loader.errors import PeerError
from warmcast.loader.node.cache import Spec
from warmcast.loader.node.membership import Membership
from warmcast.loader.node.peers import Peers
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, NotFound, StoreUnreachable, WarmcastError
from warmcast.manifests.manifest import FileEntry, Manifest, parse_manifest
from warmcast.manifests.origin import Origin

log = logging.getLogger("warmcast")

MOST = 64 << 20
"""Bytes of a manifest, at most."""

_KEPT = 16
_ASKED = 5
_AWAY = (StoreUnreachable, DeadlineExceeded)

_Entry: TypeAlias = tuple[Manifest, dict[str, FileEntry]]
"""A manifest, and its files by the SHA-256 of their blobs."""


class Catalogue:
    """What is in the manifests. Safe between threads."""

    def __init__(self, folder: Path, origin: Origin, membership: Membership, peers: Peers) -> None:
        """``folder`` holds a file a manifest, and one a ref."""
        self._folder = folder
        self._origin = origin
        self._membership = membership
        self._peers = peers
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Entry] = OrderedDict()

    def manifest(self, digest: str, deadline: Deadline) -> Manifest:
        """The manifest of a digest. Raises :class:`NotFound` and what the origin raises."""
        return self._entry(digest, deadline)[0]

    def spec(self, digest: str, sha256: str, deadline: Deadline) -> Spec:
        """What a blob is that a manifest lists. Raises :class:`NotFound` for one it does not."""
        return _spec(self._entry(digest, deadline), sha256)

    def known_spec(self, digest: str, sha256: str) -> Spec | None:
        """The same of a manifest that is in memory, and at once; None for another."""
        entry = self._remembered(digest)
        return None if entry is None else _spec(entry, sha256)

    def known(self, digest: str) -> bytes | None:
        """The bytes of a manifest, if this node has it."""
        try:
            return self._file(digest).read_bytes()
        except FileNotFoundError:
            return None

    def resolve(self, name: str, deadline: Deadline) -> str:
        """The digest that a ref names now, or named when the origin was last reached."""
        file = self._folder / f"ref-{name.replace('/', '%').replace('@', '%%')}"
        try:
            digest = self._origin.resolve(name, deadline.share(0.5)).digest
        except _AWAY as cause:
            with suppress(OSError, ValueError, KeyError):
                said = json.loads(file.read_bytes())
                age = time.time() - said["at"]
                log.warning("%s is taken as it was %.0f s ago: %s", name, age, cause)
                return str(said["manifest"])
            raise
        self._write(file, json.dumps({"manifest": digest, "at": time.time()}).encode())
        return digest

    def _remembered(self, digest: str) -> _Entry | None:
        with self._lock:
            entry = self._known.get(digest)
            if entry is not None:
                self._known.move_to_end(digest)
            return entry

    def _entry(self, digest: str, deadline: Deadline) -> _Entry:
        entry = self._remembered(digest)
        if entry is not None:
            return entry
        manifest = self._read(digest, deadline)
        with self._lock:
            entry = manifest, {file.sha256: file for file in manifest.files}
            self._known[digest] = entry
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return entry

    def _read(self, digest: str, deadline: Deadline) -> Manifest:
        file = self._file(digest)
        with suppress(FileNotFoundError, WarmcastError):
            return parse_manifest(file.read_bytes(), digest, str(file))
        try:
            manifest = self._origin.manifest(digest, deadline.share(0.5))
        except _AWAY:
            found = self._from_nodes(digest, deadline)
            if found is None:
                raise
            manifest = found
        self._write(file, manifest.data)
        return manifest

    def _from_nodes(self, digest: str, deadline: Deadline) -> Manifest | None:
        """The manifest from one of those who own something of it, as likely as any others."""
        asked = [n for n in self._membership.ring.nodes if n != self._membership.node]
        for node in asked[:_ASKED]:
            address = self._membership.address(node)
            if address is None or self._peers.passed_by(node):
                continue
            try:
                data = self._peers.read(f"{address}/manifests/{digest}", digest, MOST, deadline)
                return parse_manifest(data, digest, address)
            except PeerError as cause:
                log.info("%s: %s", node, cause)
        return None

    def _file(self, digest: str) -> Path:
        return self._folder / f"{digest}.json"

    def _write(self, file: Path, data: bytes) -> None:
        """Keep what was learnt; it is learnt again where that cannot be."""
        name = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            name.write_bytes(data)
            name.replace(file)
        except OSError as cause:
            log.warning("%s is not kept: %s", file.name, cause)
            with suppress(OSError):
                name.unlink(missing_ok=True)


def _spec(entry: _Entry, sha256: str) -> Spec:
    manifest, files = entry
    file = files.get(sha256)
    if file is None:
        raise NotFound(
            f"blob {sha256}", expected=f"one of manifest {manifest.digest}", found="another"
        )
    return Spec.of(manifest, file)
