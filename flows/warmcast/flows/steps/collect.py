"""Collect: delete what no kept manifest names, after a grace (see :mod:`retention`).

Kept are the manifests that refs name, those they named before, and the last of their history.
Whatever else there is was deployed by somebody who has not published yet, or is not needed any
more: it is marked, and deleted by a later run when its mark is older than the grace. Transfers that
were left as long ago go too (:mod:`abandoned`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from warmcast.flows.progress import nbytes_text
from warmcast.flows.steps.abandoned import take_away
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, InvalidData, NotFound
from warmcast.manifests.origin import Origin
from warmcast.manifests.retention import PROTECTED, Kind, Mark, Retention

_NAME = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(slots=True)
class Collected:
    """What a run found and did; bytes are of blobs. ``waiting``: marked, its grace is not over."""

    kept_manifests: int = 0
    kept_blobs: int = 0
    deleted_manifests: int = 0
    deleted_blobs: int = 0
    deleted_nbytes: int = 0
    waiting_manifests: int = 0
    waiting_blobs: int = 0
    waiting_nbytes: int = 0
    deleted_transfers: int = 0
    dry_run: bool = False
    problems: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line for people."""
        verb = "would delete" if self.dry_run else "deleted"
        transfers = ""
        if self.deleted_transfers:
            transfers = f", and {self.deleted_transfers} transfers that nobody went on with"
        return (
            f"{verb} {self.deleted_blobs} blobs ({nbytes_text(self.deleted_nbytes)}) and "
            f"{self.deleted_manifests} manifests{transfers}; {self.waiting_blobs} blobs "
            f"({nbytes_text(self.waiting_nbytes)}) and {self.waiting_manifests} manifests wait for "
            f"their grace to end; {self.kept_blobs} blobs of {self.kept_manifests} manifests kept"
        )


def collect(
    origin: Origin, grace: float, history: int, deadline: Deadline, *, dry_run: bool
) -> Collected:
    """Mark what nobody needs, and delete what was marked ``grace`` seconds ago or earlier.

    ``history``: manifests of each ref's history that are kept. Raises if a kept manifest cannot be
    read: what it names is not known then, and nothing is deleted.
    """
    return _Collector(origin, grace, deadline, dry_run=dry_run).run(history)


class _Collector:
    def __init__(self, origin: Origin, grace: float, deadline: Deadline, *, dry_run: bool) -> None:
        self._origin = origin
        self._retention = Retention(origin)
        self._grace = grace
        self._deadline = deadline
        self._dry_run = dry_run
        self._found = Collected(dry_run=dry_run)
        self._named: dict[str, frozenset[str]] = {}  # what each manifest names
        self._marks: dict[tuple[Kind, str], Mark] = {}

    def run(self, history: int) -> Collected:
        found = self._found
        roots = self._roots(history)
        kept = frozenset().union(*(self._names(digest, must=True) for digest in roots))
        for kind, digest in self._retention.marked(self._deadline):
            mark = self._retention.mark(kind, digest, self._deadline)
            if mark is not None:
                self._marks[kind, digest] = mark
        manifests = set(self._listed("manifests/sha256/"))
        blobs = self._sizes()
        found.kept_manifests, found.kept_blobs = len(roots), len(kept & set(blobs))

        gone = self._take("manifests", manifests - roots, lambda: self._roots(history))
        found.deleted_manifests = len(gone)
        found.waiting_manifests = len(manifests - roots - gone)

        # What waits to be published, or to go, still names its blobs.
        named = frozenset().union(*(self._names(digest) for digest in manifests - roots - gone))
        gone = self._take("blobs", set(blobs) - kept, lambda: self._named_since(manifests), named)
        waiting = set(blobs) - kept - gone
        found.deleted_blobs, found.waiting_blobs = len(gone), len(waiting)
        found.deleted_nbytes = sum(blobs[sha256] for sha256 in gone)
        found.waiting_nbytes = sum(blobs[sha256] for sha256 in waiting)
        found.deleted_transfers = take_away(
            self._origin, self._grace, self._deadline, dry_run=self._dry_run
        )
        self._tidy({("manifests", d) for d in roots} | {("blobs", d) for d in kept})
        return found

    def _roots(self, history: int) -> set[str]:
        """The manifests that are kept."""
        roots: set[str] = set()
        for ref in self._origin.refs(self._deadline):
            state = self._origin.ref(ref, self._deadline)
            if state is not None:
                roots.add(state.record.manifest)
                if state.record.previous is not None:
                    roots.add(state.record.previous)
                past = self._origin.history(ref, self._deadline)
                roots.update(record.manifest for record in past[-history:] if history)
        return roots & set(self._listed("manifests/sha256/"))

    def _names(self, digest: str, *, must: bool = False) -> frozenset[str]:
        """The blobs that a manifest names; one that is damaged names none, unless it is kept."""
        if digest not in self._named:
            try:
                manifest = self._origin.manifest(digest, self._deadline)
            except NotFound:
                return frozenset()
            except (IntegrityError, InvalidData) as cause:
                if must:
                    raise
                self._found.problems.append(f"manifest {digest[:12]} names nothing: {cause}")
                return frozenset()
            self._named[digest] = frozenset(file.sha256 for file in manifest.files)
        return self._named[digest]

    def _named_since(self, before: set[str]) -> set[str]:
        """The blobs that manifests name which were not there before."""
        new = set(self._listed("manifests/sha256/")) - before
        return set().union(*(self._names(digest) for digest in new))

    def _take(
        self,
        kind: Kind,
        digests: AbstractSet[str],
        needed: Callable[[], AbstractSet[str]],
        stay: AbstractSet[str] = frozenset(),
    ) -> set[str]:
        """Mark what is not needed, and delete what was marked long enough ago, but for what is to
        ``stay`` still; which were deleted. ``needed`` tells, once nobody can come to need them
        unnoticed, what somebody has come to need until then.
        """
        ripe = []
        for digest in sorted(digests):
            mark = self._marks.get((kind, digest))
            if mark is None:
                if not self._dry_run:
                    self._retention.make(kind, digest, "condemned", self._deadline)
            elif mark.state == "spared":
                if mark.age > max(PROTECTED, self._grace) and not self._dry_run:
                    self._retention.forget(mark, self._deadline)  # to be condemned anew
            elif mark.age >= self._grace and digest not in stay:
                ripe.append(mark)
        if self._dry_run:
            return {mark.digest for mark in ripe}
        swapped = [self._retention.swap(mark, "deleting", self._deadline) for mark in ripe]
        going = [mark for mark in swapped if mark is not None]
        spared = needed() if going else set()
        gone = set()
        for mark in going:
            if mark.digest in spared:
                self._retention.swap(mark, "spared", self._deadline)
            else:
                self._retention.delete(mark, self._deadline)
                gone.add(mark.digest)
        return gone

    def _tidy(self, needed: set[tuple[Kind, str]]) -> None:
        """Forget marks of what is needed again."""
        for key, mark in self._marks.items():
            if key in needed and mark.state != "deleting" and not self._dry_run:
                self._retention.forget(mark, self._deadline)

    def _listed(self, prefix: str) -> list[str]:
        names = (
            info.key.rpartition("/")[2].removesuffix(".json")
            for info in self._origin.store.list(prefix, self._deadline)
        )
        return [name for name in names if _NAME.fullmatch(name)]

    def _sizes(self) -> dict[str, int]:
        return {
            name: info.size
            for info in self._origin.store.list("blobs/sha256/", self._deadline)
            if _NAME.fullmatch(name := info.key.rpartition("/")[2])
        }
