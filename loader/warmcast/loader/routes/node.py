"""The node: what its agent has on its disk, or brings there from other nodes or the origin.

The worker reads the cached files as any local ones, each chunk as soon as the agent says that it is
there. What an agent that goes away in the middle has not brought comes through those of other
nodes, which it named, so that the origin is spared; and from the origin where they do not answer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from warmcast.loader.errors import SkeletonMismatch
from warmcast.loader.node.client import Files, NodeClient
from warmcast.loader.node.others import Others
from warmcast.loader.plan import Targets
from warmcast.loader.routes import Job, Source
from warmcast.loader.staging import Staging
from warmcast.loader.stream import stream
from warmcast.loader.transports import Span
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    DeadlineExceeded,
    StoreError,
    StoreUnreachable,
    WarmcastError,
    one_line,
)
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin
from warmcast.manifests.stores import ObjectReader
from warmcast.manifests.stores.file_reader import FileReader
from warmcast.manifests.trust import Trust, read

log = logging.getLogger("warmcast")

_ANSWER = 2.0
"""Seconds that an agent has for its first answer."""


def resolve(
    origin: Origin,
    node: NodeClient | None,
    ref: str,
    deadline: Deadline,
    trust: Trust | None = None,
) -> Manifest:
    """The manifest that a ref names: by the origin, or where that is away as the node knows it.

    With ``trust`` it has to be signed; raises :class:`Untrusted`.
    """
    try:
        manifest = origin.resolve(ref, deadline if node is None else deadline.share(0.25))
        signatures = read(origin.store, manifest.digest, deadline) if trust is not None else {}
    except (StoreUnreachable, DeadlineExceeded) as cause:
        if node is None:
            raise
        try:
            manifest = node.manifest(node.resolve(ref, deadline), deadline)
            signatures = node.signatures(manifest.digest, deadline) if trust is not None else {}
        except WarmcastError as other:
            log.info("nor does the node know %s: %s", ref, other)
            raise cause from None
    if trust is not None:
        trust.check(manifest.digest, signatures)
    return manifest


class NodeRoute:
    """Read what the node's agent has."""

    name = "node"

    def __init__(self, node: NodeClient, origin: Origin, staging: Staging) -> None:
        self._node = node
        self._origin = origin
        self._staging = staging

    def find(self, job: Job, deadline: Deadline) -> Source:
        """The agent; raises :class:`NodeGone` if none answers."""
        if any(placement.entry is None for placement in job.plan.placements):
            raise SkeletonMismatch("node", expected="containers as deployed", found="changed ones")
        others = others_of(self._node, job.manifest, deadline, job.ref)
        return _NodeSource(self._node, others, self._origin, job.manifest, self._staging)


def others_of(
    node: NodeClient, manifest: Manifest, deadline: Deadline, ref: str = ""
) -> Others | None:
    """Whom to ask for a manifest's chunks should the agent go. Raises :class:`NodeGone`."""
    return Others.of(node.others(manifest.digest, deadline.within(_ANSWER), ref))


def suspect(node: NodeClient, manifest: Manifest) -> None:
    """What came was wrong or did not come: have the agent look at what it has of a manifest."""
    try:
        node.check(manifest.digest, Deadline.after(_ANSWER))
    except WarmcastError as cause:
        log.info("%s is not told to look: %s", node.url, cause)


class _NodeSource:
    transport: str | None = None

    def __init__(
        self,
        node: NodeClient,
        others: Others | None,
        origin: Origin,
        manifest: Manifest,
        staging: Staging,
    ) -> None:
        self._node = node
        self._others = others
        self._origin = origin
        self._manifest = manifest
        self._staging = staging
        self.name = node.url
        self.reason = ""

    def fill(self, targets: Targets, deadline: Deadline) -> Span:
        files = {p.entry.file for p in targets.plan.placements if p.entry is not None}
        began = time.monotonic()
        with Arrivals(
            self._node, self._others, self._origin, self._manifest, files, deadline
        ) as blobs:
            stream(blobs, self._manifest, targets, self._staging, deadline)
            self.reason = blobs.told()
        return began, time.monotonic()

    def abandon(self) -> None:
        """Nothing was begun."""


class Arrivals:
    """The blobs of some of a manifest's files, as the agent brings them.

    Takes the place of the origin where blobs are opened. A thread listens to the agent while the
    context is open.
    """

    def __init__(
        self,
        node: NodeClient,
        others: Others | None,
        origin: Origin,
        manifest: Manifest,
        files: Iterable[str],
        deadline: Deadline,
    ) -> None:
        self.url = node.url
        self._node = node
        self._others = others
        self._origin = origin
        self._manifest = manifest
        self._deadline = deadline
        wanted = set(files)
        self._numbers = [n for n, file in enumerate(manifest.files) if file.path in wanted]
        self._of = {manifest.files[n].sha256: n for n in self._numbers}
        self._there = {n: bytearray(len(manifest.files[n].chunks)) for n in self._numbers}
        self._names: Mapping[int, Sequence[Path]] = {}
        self._tiers: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._lost: WarmcastError | None = None
        self._over = self._told_all = False
        self._files: Files | None = None
        self._thread = threading.Thread(target=self._listen, name="warmcast-node", daemon=True)

    def __enter__(self) -> Arrivals:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
            files = self._files
        if files is not None:
            files.end()
        self._thread.join()
        if self._others is not None:
            self._others.close()
        if isinstance(value, WarmcastError):
            suspect(self._node, self._manifest)

    def open_blob(self, sha256: str, deadline: Deadline) -> ObjectReader:
        """Open a blob: in the cache, or the origin's if the agent has gone."""
        number = self._of[sha256]
        with self._changed:
            self._wait(lambda: number in self._names, deadline)
            names = self._names.get(number, ())
        for name in (*names, *names):  # it may get its last name between the two
            with suppress(FileNotFoundError):
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
                return _Reader(self, self._origin, number, sha256, fd, name)
        log.info("%s does not show %s", self.url, sha256[:12])
        return _Reader(self, self._origin, number, sha256, None, Path(sha256))

    def comes(self, number: int, chunk: int, deadline: Deadline) -> bool:
        """Wait for a chunk of a file; False if the agent will not bring it."""
        there = self._there[number]
        if there[chunk]:
            return True
        with self._changed:
            self._wait(lambda: bool(there[chunk]), deadline)
        return bool(there[chunk])

    def whole(self, number: int) -> bool:
        """Whether all of a file has come."""
        return 0 not in self._there[number]

    def past_the_agent(
        self, number: int, chunk: int, begin: int, view: memoryview, deadline: Deadline
    ) -> bool:
        """Fill ``view`` with a chunk's bytes from ``begin`` through another node's agent; whether
        that could be done.
        """
        sha256 = self._manifest.files[number].sha256
        others = self._others
        came = others is not None and others.read_into(sha256, chunk, begin, view, deadline)
        self._count("other agents" if came else "origin", begin)
        return came

    def _count(self, whom: str, begin: int) -> None:
        """Count a chunk that did not come through the agent, at its first byte."""
        if not begin:
            with self._changed:
                self._tiers[f"{whom}, past the agent"] += 1

    @property
    def tiers(self) -> Mapping[str, int]:
        """How many chunks came from where, so far."""
        with self._changed:
            return dict(self._tiers)

    def told(self) -> str:
        """Where the chunks came from, in words."""
        parts = [f"{count} {tier}" for tier, count in sorted(self._tiers.items())]
        lost = f"; {one_line(self._lost)}" if self._lost is not None else ""
        return f"chunks: {', '.join(parts)}{lost}"

    def _wait(self, done: Callable[[], bool], deadline: Deadline) -> None:
        while not (done() or self._told_all or self._lost) and self._thread.is_alive():
            deadline.check(f"waiting for the {self.url}")
            self._changed.wait(min(deadline.remaining(), 0.5))

    def _listen(self) -> None:
        try:
            with self._node.files(self._manifest.digest, self._numbers, self._deadline) as files:
                with self._changed:
                    self._files = files
                    if self._over:
                        return
                    self._names = files.names
                    self._changed.notify_all()
                for file, chunk, tier in files:
                    with self._changed:
                        self._there[file][chunk] = 1
                        self._tiers[tier] += 1
                        self._changed.notify_all()
                # As long as somebody listens the agent keeps the files.
                with self._changed:
                    self._told_all = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._over)
        except WarmcastError as cause:
            with self._changed:
                if self._over:
                    return
                self._lost = cause
                self._changed.notify_all()
            log.warning("what is missing comes from the origin: %s", cause)


class _Reader:
    """Reads a cached file, chunk by chunk as they come. Safe between threads."""

    step = 1 << 20
    local = True

    def __init__(
        self,
        arrivals: Arrivals,
        origin: Origin,
        number: int,
        sha256: str,
        fd: int | None,
        name: Path,
    ) -> None:
        manifest = arrivals._manifest
        self.size = manifest.files[number].size
        self._chunk_size = manifest.chunk_size
        self._arrivals = arrivals
        self._number = number
        self._sha256 = sha256
        self._origin = origin
        self._file: FileReader | None = None
        if fd is not None:
            self._file = FileReader(
                fd, str(name), lambda cause: StoreError(str(name), found=cause.strerror or cause)
            )
        self._opening = threading.Lock()
        self._other: ObjectReader | None = None

    @property
    def cached(self) -> tuple[int, int] | None:
        """As the file's own reader says, when all of the file has come."""
        if self._file is None or not self._arrivals.whole(self._number):
            return None
        return self._file.cached

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        """Fill ``buffer`` with the blob's bytes from ``offset``, which lie in one chunk or more."""
        view = buffer.cast("B")
        while len(view):
            chunk = offset // self._chunk_size
            length = min(len(view), (chunk + 1) * self._chunk_size - offset)
            begin = offset - chunk * self._chunk_size
            piece = view[:length]
            if self._file is not None and self._arrivals.comes(self._number, chunk, deadline):
                self._file.read_into(offset, piece, deadline)
            elif not self._arrivals.past_the_agent(self._number, chunk, begin, piece, deadline):
                self._from_origin(deadline).read_into(offset, piece, deadline)
            offset += length
            view = view[length:]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        if self._other is not None:
            self._other.close()

    def _from_origin(self, deadline: Deadline) -> ObjectReader:
        with self._opening:
            if self._other is None:
                self._other = self._origin.open_blob(self._sha256, deadline)
            return self._other
