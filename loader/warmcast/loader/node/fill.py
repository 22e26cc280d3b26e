"""Filling the cache: each chunk is fetched once at a time, whoever asks for it.

Where a chunk is looked for: on the disk, at the nodes that own it by the ring, in the origin; the
first that has it ends the search. One that another node asks for is not looked for on the ring
again: whom they all ask is its owner, and that is how the origin gives it but once. Where the
origin is away, any of a chunk's owners that has it gives it.

What workers and other nodes wait for comes first. What is brought in the background waits while
anybody does, and keeps to a rate.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import mmap
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from warmcast.loader.node.buffers import Buffers
from warmcast.loader.node.cache import Blob, Spec
from warmcast.loader.node.membership import Membership
from warmcast.loader.node.metrics import Metrics
from warmcast.loader.node.peers import NodeAsks, NodeBusy, NodeFailed, Peers
from warmcast.loader.node.ring import Ring
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    DeadlineExceeded,
    IntegrityError,
    StoreUnreachable,
    WarmcastError,
)
from warmcast.manifests.origin import Origin
from warmcast.manifests.stores import ObjectReader

log = logging.getLogger("warmcast")

OWNERS = 8
"""Nodes that a chunk may be looked for at, in this order: enough to find one there when half of
them are gone, for then all find the same one.
"""

_ASKED = 4
"""Nodes that may fail to give a chunk before the origin is asked."""

_PATIENCE = 120.0
"""Seconds that one chunk may take, from wherever it comes."""

_BUSY = 15.0
"""Seconds for which a node that is busy is asked again."""

AWAY = (StoreUnreachable, DeadlineExceeded)
"""How an origin fails that may have what is asked for, and does not answer."""

_REMEMBERED = 5.0
"""Seconds for which an origin that was away is the last to be asked."""

_OPEN = 32
"""Blobs of the origin that are kept open."""

_LEAST = 32 << 20
"""Bytes for chunks under way, however large the ring is."""

_PLACED = 4096
"""Blobs of which it is remembered where their chunks are on the ring, 4 bytes a chunk."""


class Wish(enum.IntEnum):
    """Who wants a chunk; the smaller comes first."""

    WORKER = 0
    NODE = 1
    BACKGROUND = 2


@dataclass(slots=True)
class _Job:
    manifest: str
    blob: Blob
    number: int
    wish: Wish
    future: Future[str] = field(default_factory=Future)
    wanted: int = 0
    begun: bool = False
    by_ring: bool = False


class _Rate:
    """Bytes a second, on average over a second; 0 for no bound."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._next = time.monotonic()

    def pause(self) -> float:
        """Seconds until more may be moved."""
        return max(0.0, self._next - time.monotonic()) if self._rate else 0.0

    def moves(self, nbytes: int) -> None:
        """So many are, from now on."""
        if self._rate:
            self._next = max(self._next, time.monotonic() - 1.0) + nbytes / self._rate


class Filler:
    """Threads that bring chunks. The owner closes it."""

    def __init__(
        self,
        membership: Membership,
        peers: Peers,
        origin: Origin,
        metrics: Metrics,
        *,
        memory: int,
        rate: int = 0,
    ) -> None:
        """``memory``: bytes of the ring and of chunks under way, at most, ``_LEAST`` for chunks;
        ``rate``: bytes that the background moves a second.
        """
        self._membership = membership
        self._peers = peers
        self._origin = origin
        self._metrics = metrics
        self._memory = memory
        self._rate = _Rate(rate)
        self._changed = threading.Condition()
        self._queue: list[tuple[Wish, int, _Job]] = []
        self._count = itertools.count()
        self._jobs: dict[tuple[str, int], _Job] = {}
        self._waiting = 0  # contexts of foreground()
        self._over = False
        self._away = 0.0  # until when the origin is taken to be
        self._buffers = Buffers()
        self._readers: OrderedDict[str, ObjectReader] = OrderedDict()
        self._reading = threading.Lock()
        self._places: tuple[Ring | None, dict[str, npt.NDArray[np.uint32]]] = (None, {})
        self._threads = [
            threading.Thread(target=self._work, name=f"warmcast-fill-{n}", daemon=True)
            for n in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def foreground(self) -> Iterator[None]:
        """A worker waits while the context is open; nothing is brought in the background."""
        with self._changed:
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    @contextmanager
    def wanted(self, manifest: str, blob: Blob, number: int, wish: Wish) -> Iterator[Future[str]]:
        """Have a chunk brought; the future tells which tier it came from, or raises.

        Who leaves the context does not want it any more.
        """
        with self._changed:
            key = (blob.spec.sha256, number)
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job(manifest, blob, number, wish)
                heapq.heappush(self._queue, (wish, next(self._count), job))
            elif wish < job.wish and not job.begun:
                job.wish = wish
                heapq.heappush(self._queue, (wish, next(self._count), job))
            job.wanted += 1
            self._changed.notify()
        try:
            yield job.future
        finally:
            with self._changed:
                job.wanted -= 1
                if not job.wanted and not job.begun:
                    self._jobs.pop(key, None)

    def asks_the_ring(self, sha256: str, number: int) -> bool:
        """Whether another node is being asked for a chunk just now."""
        with self._changed:
            job = self._jobs.get((sha256, number))
            return job is not None and job.by_ring

    @property
    def under_way(self) -> int:
        """Chunks that are wanted and have not come."""
        return len(self._jobs)

    def order(self, blob: Blob) -> npt.NDArray[np.uint32]:
        """A blob's chunks in the order in which they are best wanted; see :meth:`Ring.order`."""
        ring, places = self._places_of(blob.spec)
        return ring.order(places, self._membership.node)

    def close(self) -> None:
        """End the threads; who waits is told."""
        with self._changed:
            self._over = True
            jobs = [job for job in self._jobs.values() if not job.begun]
            self._changed.notify_all()
        for job in jobs:
            with suppress(Exception):
                job.future.set_exception(WarmcastError("the node agent ends"))
        for thread in self._threads:
            thread.join()
        for reader in self._readers.values():
            reader.close()

    # In the threads

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            job, memory = taken
            length = job.blob.spec.span(job.number)[1]
            try:
                with job.blob.in_use():
                    tier = self._bring(job, memoryview(memory)[:length])
            except Exception as cause:  # noqa: BLE001  (who waits is to be told, whatever it is)
                outcome: str | Exception = cause
                self._metrics.errors.labels(type(cause).__name__).inc()
            else:
                outcome = tier
            with self._changed:
                self._jobs.pop((job.blob.spec.sha256, job.number), None)
                self._buffers.give_back(memory)
                if job.wish is Wish.BACKGROUND and outcome == "disk":
                    self._rate.moves(-length)  # it was there
                self._changed.notify_all()
            if isinstance(outcome, str):
                job.future.set_result(outcome)
            else:
                job.future.set_exception(outcome)

    def _take(self) -> tuple[_Job, mmap.mmap] | None:
        """The next chunk to bring, and memory for it; None at the end."""
        with self._changed:
            while not self._over:
                pause = 1.0
                if self._queue:
                    wish, _, job = self._queue[0]
                    if job.begun or not job.wanted or wish != job.wish:
                        heapq.heappop(self._queue)
                        continue
                    length = job.blob.spec.span(job.number)[1]
                    held = wish is Wish.BACKGROUND and (self._waiting or self._rate.pause())
                    memory = None if held else self._buffers.take(length, self._room())
                    if memory is not None:
                        heapq.heappop(self._queue)
                        job.begun = True
                        if wish is Wish.BACKGROUND:
                            self._rate.moves(length)
                        return job, memory
                    if held and not self._waiting:
                        pause = self._rate.pause()
                self._changed.wait(pause)
            return None

    def _room(self) -> int:
        """Bytes for chunks under way: what the ring of a large fleet takes of them it takes."""
        return max(_LEAST, self._memory - self._membership.ring.nbytes)

    def _bring(self, job: _Job, buffer: memoryview) -> str:
        blob, number = job.blob, job.number
        tier = "disk"
        if not blob.has(number):
            deadline = Deadline.after(_PATIENCE)
            tier = "ring"
            if job.wish is Wish.NODE or not self._from_ring(job, buffer, deadline):
                tier = self._past_the_ring(job, buffer, deadline)
            blob.write(number, buffer)
        self._metrics.chunks.labels(tier).inc()
        self._metrics.nbytes.labels(tier).inc(len(buffer))
        return tier

    def _from_ring(self, job: _Job, buffer: memoryview, deadline: Deadline) -> bool:
        owners = self._owners(job.blob.spec, job.number)
        failed = 0
        for node in owners:
            if node == self._membership.node or failed == _ASKED:
                return False
            address = self._membership.address(node)
            if address is None or self._peers.passed_by(node):
                continue
            job.by_ring = True
            try:
                self._from_node(address, job, buffer, deadline)
                return True
            except (NodeBusy, NodeAsks) as cause:
                log.info("%s: %s", node, cause)
                failed += 1
            except NodeFailed as cause:
                self._metrics.errors.labels("NodeFailed").inc()
                self._peers.blame(node, cause)
                failed += 1
            finally:
                job.by_ring = False
        return False

    def _past_the_ring(self, job: _Job, buffer: memoryview, deadline: Deadline) -> str:
        """Take a chunk from the origin; where that is away, from any node that has it."""
        away = time.monotonic() < self._away
        if away and self._from_one_that_has_it(job, buffer, deadline):
            return "ring"
        try:
            self._from_origin(job.blob.spec, job.number, buffer, deadline)
        except AWAY:
            self._away = time.monotonic() + _REMEMBERED
            if away or not self._from_one_that_has_it(job, buffer, deadline):
                raise
            return "ring"
        return "origin"

    def _from_one_that_has_it(self, job: _Job, buffer: memoryview, deadline: Deadline) -> bool:
        """What this node is to fetch others may have from before it came, or was chosen for it."""
        for node in self._owners(job.blob.spec, job.number):
            address = self._membership.address(node)
            if node == self._membership.node or address is None or self._peers.passed_by(node):
                continue
            with suppress(NodeFailed):
                self._fetch(address, job, buffer, deadline, if_there=True)
                return True
        return False

    def _from_node(self, address: str, job: _Job, buffer: memoryview, deadline: Deadline) -> None:
        """Take a chunk from a node, or where that is busy from one to which it gave it before: so
        what all want spreads like a tree. Waiting for one that is there costs the origin nothing.
        """
        limit = deadline.within(_BUSY)
        while True:
            try:
                self._fetch(address, job, buffer, deadline)
                return
            except NodeBusy as busy:
                if limit.expired or self._over:
                    raise
                other = self._membership.address(busy.instead)
                if other is not None and not self._peers.passed_by(busy.instead):
                    with suppress(NodeFailed):
                        self._fetch(other, job, buffer, deadline, if_there=True)
                        return
                time.sleep(random.uniform(0.02, 0.2))  # noqa: S311

    def _fetch(
        self,
        address: str,
        job: _Job,
        buffer: memoryview,
        deadline: Deadline,
        *,
        if_there: bool = False,
    ) -> None:
        self._peers.fetch(
            address,
            job.manifest,
            job.blob.spec,
            job.number,
            buffer,
            deadline,
            self._metrics.received.inc,
            if_there=if_there,
        )

    def _from_origin(self, spec: Spec, number: int, buffer: memoryview, deadline: Deadline) -> None:
        begin, _ = spec.span(number)
        found = ""
        for _ in range(2):
            self._reader(spec, deadline).read_into(begin, buffer, deadline)
            self._metrics.origin.inc(len(buffer))
            found = to_hex(crc32c(buffer))
            if found == spec.crcs[number]:
                return
        raise IntegrityError(
            f"blob {spec.sha256} of {self._origin.url} at byte {begin}",
            expected=f"CRC32C {spec.crcs[number]}",
            found=f"{found}, twice",
            do="run `warmcast verify`, then deploy again",
        )

    def _reader(self, spec: Spec, deadline: Deadline) -> ObjectReader:
        with self._reading:
            reader = self._readers.get(spec.sha256)
            if reader is not None:
                self._readers.move_to_end(spec.sha256)
                return reader
        opened = self._origin.open_blob(spec.sha256, deadline)  # others need not wait for it
        with self._reading:
            reader = self._readers.setdefault(spec.sha256, opened)
            if len(self._readers) > _OPEN:
                self._close_oldest()
        if reader is not opened:
            opened.close()
        return reader

    def _close_oldest(self) -> None:
        with self._changed:
            needed = {sha256 for (sha256, _), job in self._jobs.items() if job.begun}
        oldest = next((sha256 for sha256 in self._readers if sha256 not in needed), None)
        if oldest is not None:
            self._readers.pop(oldest).close()

    def _owners(self, spec: Spec, number: int) -> tuple[str, ...]:
        # Who waits for an owner holds no ring: another may come meanwhile, as large.
        ring, places = self._places_of(spec)
        return ring.following(int(places[number]), OWNERS)

    def _places_of(self, spec: Spec) -> tuple[Ring, npt.NDArray[np.uint32]]:
        """The ring as it is now, and where on it a blob's chunks are."""
        ring = self._membership.ring
        known, blobs = self._places
        if known is not ring or len(blobs) >= _PLACED:
            blobs = {}
            self._places = (ring, blobs)  # which lets go of the last ring before this one is made
        del known
        places = blobs.get(spec.sha256)
        if places is None:
            places = blobs[spec.sha256] = ring.places(spec.sha256, len(spec.crcs))
        return ring, places


_THREADS = 16
