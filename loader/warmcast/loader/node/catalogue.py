"""Manifests and refs as a node knows them: from its disk, the origin, or another node.

A manifest is what its digest says, wherever it comes from. A ref is the origin's to tell; where
the origin is away, what it last said is told, and how old that is.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from warmcast.loader.errors import PeerError
from warmcast.loader.node.cache import Spec
from warmcast.loader.node.contents import Contents, parse_contents
from warmcast.loader.node.membership import Membership
from warmcast.loader.node.peers import Peers
from warmcast.loader.node.tokens import NO_MANIFEST
from warmcast.manifests import trust
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    DeadlineExceeded,
    IntegrityError,
    NotFound,
    StoreError,
    StoreUnreachable,
    WarmcastError,
)
from warmcast.manifests.origin import Origin

log = logging.getLogger("warmcast")

MOST = 64 << 20
"""Bytes of a manifest, at most."""

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_KEPT = 16
_ASKED = 5
_LONG = 3600.0
_AWAY = (StoreUnreachable, DeadlineExceeded)


@dataclass(frozen=True, slots=True)
class KnownRef:
    """What a ref named, at a time in seconds since 1970."""

    manifest: str
    at: float


class Catalogue:
    """What is in the manifests. Safe between threads."""

    def __init__(self, folder: Path, origin: Origin, membership: Membership, peers: Peers) -> None:
        """``folder`` holds a file a manifest, and one a ref."""
        self._folder = folder
        self._origin = origin
        self._membership = membership
        self._peers = peers
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # one at a time: a manifest may be large
        self._known: OrderedDict[str, Contents] = OrderedDict()

    def contents(self, digest: str, deadline: Deadline) -> Contents:
        """What is in the manifest of a digest. Raises :class:`NotFound`, what the origin raises,
        and :class:`DeadlineExceeded`.
        """
        found = self._remembered(digest)
        if found is None:
            with self._alone(digest, deadline):
                found = self._remembered(digest) or self._read(digest, deadline)
                self._remember(digest, found)
        return found

    def spec(self, digest: str, sha256: str, deadline: Deadline) -> Spec:
        """What a blob is that a manifest lists. Raises :class:`NotFound` for one it does not."""
        return _spec(self.contents(digest, deadline), digest, sha256)

    def known_spec(self, digest: str, sha256: str) -> Spec | None:
        """The same of a manifest that is in memory, and at once; None for another."""
        found = self._remembered(digest)
        return None if found is None else _spec(found, digest, sha256)

    def file(self, digest: str, deadline: Deadline) -> Path:
        """The file of a manifest. Raises what :meth:`contents` does, and :class:`StoreError` if
        it cannot be kept here.
        """
        self.contents(digest, deadline)
        found = self.known_file(digest)
        if found is None:
            raise StoreError(f"manifest {digest}", expected="a disk to keep it on", found="none")
        return found

    def known_file(self, digest: str) -> Path | None:
        """The file of a manifest, if this node has it."""
        file = self._file(digest)
        return file if file.is_file() else None

    def resolve(self, name: str, deadline: Deadline) -> str:
        """The digest that a ref names now, or named when the origin was last reached.

        A digest names itself.
        """
        if _DIGEST.fullmatch(name):
            return name
        try:
            digest = self._origin.digest(name, deadline.share(0.5))
        except _AWAY as cause:
            known = self.known_ref(name) or self._ref_from_nodes(name, deadline)
            if known is None:
                raise
            age = time.time() - known.at
            log.warning("%s is taken as it was %.0f s ago: %s", name, age, cause)
            return known.manifest
        text = json.dumps({"manifest": digest, "at": time.time()})
        self._write(self._ref_file(name), text.encode())
        return digest

    def known_ref(self, name: str) -> KnownRef | None:
        """What the origin last said of a ref, to this node."""
        with suppress(OSError):
            return _known_ref(self._ref_file(name).read_bytes())
        return None

    def _ref_from_nodes(self, name: str, deadline: Deadline) -> KnownRef | None:
        """What it last said to some other node: the latest word of a few."""
        found = []
        for node, address in self._some_nodes():
            url = f"{address}/refs/{quote(name, safe='@/')}"
            try:
                known = _known_ref(self._peers.read(url, NO_MANIFEST, 1 << 12, deadline))
            except PeerError as cause:
                log.info("%s: %s", node, cause)
                continue
            found += [known] if known is not None else []
        return max(found, key=lambda known: known.at, default=None)

    def _ref_file(self, name: str) -> Path:
        return self._folder / f"ref-{name.replace('/', '%').replace('@', '%%')}"

    def signatures(self, digest: str, deadline: Deadline) -> Mapping[str, bytes]:
        """A manifest's signatures by the names of their keys, unchecked: those that there are, or
        were when the origin was last reached.
        """
        file = self._folder / f"{digest}.signatures"
        try:
            found = trust.read(self._origin.store, digest, deadline.share(0.5))
        except _AWAY:
            with suppress(OSError, ValueError):
                said = json.loads(file.read_bytes())
                return {str(name): bytes.fromhex(text) for name, text in said.items()}
            raise
        text = json.dumps({name: signature.hex() for name, signature in found.items()})
        self._write(file, text.encode())
        return found

    @contextmanager
    def _alone(self, digest: str, deadline: Deadline) -> Iterator[None]:
        if not self._reading.acquire(timeout=min(deadline.remaining(), _LONG)):
            raise DeadlineExceeded(f"no time left for manifest {digest}: others are being read")
        try:
            yield
        finally:
            self._reading.release()

    def _remembered(self, digest: str) -> Contents | None:
        with self._lock:
            found = self._known.get(digest)
            if found is not None:
                self._known.move_to_end(digest)
            return found

    def _remember(self, digest: str, contents: Contents) -> None:
        with self._lock:
            self._known[digest] = contents
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)

    def _read(self, digest: str, deadline: Deadline) -> Contents:
        file = self._file(digest)
        with suppress(FileNotFoundError, WarmcastError):
            return parse_contents(file.read_bytes(), digest, str(file))
        try:
            data = self._origin.read_manifest(digest, deadline.share(0.5))
            contents = parse_contents(data, digest, self._origin.url)
        except _AWAY:
            found = self._from_nodes(digest, deadline)
            if found is None:
                raise
            data, contents = found
        self._write(file, data)
        return contents

    def _from_nodes(self, digest: str, deadline: Deadline) -> tuple[bytes, Contents] | None:
        """The manifest from one of those who own something of it, as likely as any others."""
        for node, address in self._some_nodes():
            try:
                data = self._peers.read(f"{address}/manifests/{digest}", digest, MOST, deadline)
                return data, parse_contents(data, digest, address)
            except (PeerError, IntegrityError) as cause:
                log.info("%s: %s", node, cause)
        return None

    def _some_nodes(self) -> Iterator[tuple[str, str]]:
        """A few other nodes, and their addresses."""
        nodes = [node for node in self._membership.ring.nodes if node != self._membership.node]
        for node in random.sample(nodes, min(_ASKED, len(nodes))):
            address = self._membership.address(node)
            if address is not None and not self._peers.passed_by(node):
                yield node, address

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


def _spec(contents: Contents, digest: str, sha256: str) -> Spec:
    spec = contents.blobs.get(sha256)
    if spec is None:
        raise NotFound(f"blob {sha256}", expected=f"one of manifest {digest}", found="another")
    return spec


def _known_ref(data: bytes) -> KnownRef | None:
    """What a node has written or said of a ref; None for anything else."""
    with suppress(ValueError, KeyError, TypeError):
        said = json.loads(data)
        known = KnownRef(said["manifest"], float(said["at"]))
        if _DIGEST.fullmatch(known.manifest):
            return known
    return None
