"""The journal of a transfer: what was done of it, and who is doing the rest.

    transfers/<key>.json    a :class:`Journal`; compare-and-swap only

The key is the same for all who want the same file, so the journal is also their lease: whoever
writes its name into it owns the transfer and shows every ``beat`` seconds that it lives. The others
watch. An owner whose journal does not change for ``silent`` seconds, by the watcher's own clock, is
taken to be dead, and the journal is taken over. Of one that was not dead the next write fails, and
it stops: no two write. What it had sent meanwhile are the same bytes.

The journal is gone when the file is in the origin.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from warmcast.flows.steps.measure import Progressed
from warmcast.manifests.canonical import canonical_json, parse_json
from warmcast.manifests.checksum import from_hex, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    DeadlineExceeded,
    InvalidData,
    NotFound,
    PreconditionFailed,
    StoreError,
)
from warmcast.manifests.manifest import Crc32c, Record, Size, Time, parse_record
from warmcast.manifests.origin import now
from warmcast.manifests.stores import ObjectStore, Part

FOLDER = "transfers/"
_LIMIT = 1 << 27
_LONGEST_PAUSE = 1.0
_LOOK = 0.1  # seconds between two looks at whether a transfer has ended
_RELEASE = 5.0  # seconds that giving up may take


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast transfers go, and when an owner is taken to be dead; bytes and seconds.

    ``chunk_nbytes`` is a multiple of 256 KiB; it is doubled for files of more than 10,000 chunks.
    ``connections`` read a file, ``lanes`` chunks of all files are in memory.
    """

    chunk_nbytes: int = 32 << 20
    connections: int = 8
    lanes: int = 16
    beat: float = 2.0
    silent: float = 10.0


class PartRecord(Record):
    """A part that the origin has."""

    index: Size
    size: Size
    crc32c: Crc32c
    tag: str


class Journal(Record):
    """How far a transfer is. ``token`` names what was begun in the store.

    ``owner`` is empty when nobody is at work; ``beat`` makes every write another.
    """

    schema_version: Literal[1] = 1
    what: str
    size: Size
    chunk_nbytes: Annotated[int, Field(ge=1, strict=True)]
    owner: str
    beat: Size
    at: Time
    token: str | None = None
    parts: tuple[PartRecord, ...] = ()
    progressed: Progressed | None = None


class Fenced(StoreError):
    """Another took the transfer over, because it heard nothing of this one."""


@dataclass(frozen=True, slots=True)
class Done:
    """What was done of a transfer: parts in the origin, by index, and the pass over its bytes."""

    token: str | None
    parts: tuple[Part, ...]
    progressed: Progressed | None


class Lease:
    """A journal that is ours, until it is finished, or left to others."""

    def __init__(self, store: ObjectStore, key: str, journal: Journal, etag: str) -> None:
        self.found = journal
        """The journal as it was when it became ours."""
        self._store = store
        self._key = key
        self._journal = journal
        self._etag = etag
        self._changed = threading.Condition()
        self._asked = self._written = 0
        self._stopping = self._finished = False
        self._state: Callable[[], Done] = lambda: self.done
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> Done:
        """What earlier owners did."""
        parts = tuple(
            Part(part.index, part.size, from_hex(part.crc32c), part.tag)
            for part in self.found.parts
        )
        return Done(self.found.token, parts, self.found.progressed)

    def keep(
        self,
        state: Callable[[], Done],
        lost: Callable[[BaseException], None],
        pace: Pace,
        deadline: Deadline,
    ) -> None:
        """Write ``state()`` whenever :meth:`settle` is called, and every beat at least.

        ``lost`` is called, once, with :class:`Fenced` or the store's error, if that fails.
        """

        def work() -> None:
            try:
                while True:
                    with self._changed:
                        if self._asked == self._written and not self._stopping:
                            self._changed.wait(pace.beat)
                        if self._stopping:
                            return
                        asked = self._asked
                    self._write(state(), self._journal.owner, deadline)
                    with self._changed:
                        self._written = asked
                        self._changed.notify_all()
            except BaseException as error:  # noqa: BLE001 raised by the transfer
                lost(error)

        self._state = state
        self._stopping = False
        self._thread = threading.Thread(target=work, name="warmcast-journal")
        self._thread.start()

    def settle(self, deadline: Deadline) -> None:
        """Return when the journal tells of all that was done before this call.

        Several calls at once wait for one write.
        """
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            while self._written < mine:
                deadline.check("writing a journal")
                self._changed.wait(min(_LOOK, deadline.remaining()))

    def write(self, state: Done, deadline: Deadline) -> None:
        """Write the journal now; not while it is kept."""
        self._write(state, self._journal.owner, deadline)

    def stop(self) -> None:
        """Keep the journal no longer."""
        if self._thread is not None:
            with self._changed:
                self._stopping = True
                self._changed.notify_all()
            self._thread.join()
            self._thread = None

    def leave(self) -> None:
        """Let others go on at once, from what :meth:`keep` kept. They find out by themselves,
        later, if this fails, or the process is killed.
        """
        self.stop()
        if not self._finished:
            with suppress(StoreError, DeadlineExceeded):
                self._write(self._state(), "", Deadline.after(_RELEASE))

    def finish(self, deadline: Deadline) -> None:
        """Take the journal away: the file is in the origin, or its transfer is to begin anew."""
        self.stop()
        self._finished = True
        self._store.delete(self._key, deadline)

    def _write(self, state: Done, owner: str, deadline: Deadline) -> None:
        journal = self._journal.model_copy(
            update={
                "owner": owner,
                "beat": self._journal.beat + 1,
                "at": now(),
                "token": state.token,
                "parts": tuple(
                    PartRecord(
                        index=part.index, size=part.size, crc32c=to_hex(part.crc32c), tag=part.tag
                    )
                    for part in state.parts
                ),
                "progressed": state.progressed,
            }
        )
        try:
            self._etag = self._store.replace(self._key, _text(journal), self._etag, deadline)
        except (PreconditionFailed, NotFound):
            raise Fenced(
                self._journal.what, expected="to be this deploy's to transfer", found="another's"
            ) from None
        self._journal = journal


def acquire(
    store: ObjectStore,
    key: str,
    what: str,
    size: int,
    pace: Pace,
    deadline: Deadline,
    tick: Callable[[int], None],
    note: Callable[[str], None] = lambda _: None,
) -> Lease | None:
    """Own a transfer: a new one, or one that its owner left.

    Waits, until ``deadline``, while another is at work. None if its journal went meanwhile: the
    file is in the origin then, or nothing of it. ``tick`` is called with 0, and may raise.
    """
    owner = secrets.token_hex(8)
    path = f"{FOLDER}{key}.json"
    watched: str | None = None
    since = time.monotonic()
    pause = 0.02
    while True:
        tick(0)
        deadline.check(f"waiting for another deploy to transfer {what}")
        found = read_journal(store, path, deadline)
        try:
            if found is None:
                if watched is not None:
                    return None
                fresh = _fresh(what, size, pace, owner)
                return Lease(store, path, fresh, store.replace(path, _text(fresh), None, deadline))
            journal, etag = found
            silent = etag == watched and time.monotonic() - since >= pace.silent
            if journal is None or journal.size != size:
                mine = _fresh(what, size, pace, owner)  # damaged: what it tells of is lost
                return Lease(store, path, mine, store.replace(path, _text(mine), etag, deadline))
            if not journal.owner or silent:
                mine = journal.model_copy(
                    update={"owner": owner, "beat": journal.beat + 1, "at": now()}
                )
                return Lease(store, path, mine, store.replace(path, _text(mine), etag, deadline))
        except (PreconditionFailed, NotFound):
            continue  # somebody was faster: see what the journal says now
        if watched is None:
            note(f"{what}: another deploy transfers it; waiting")
        if etag != watched:
            watched, since = etag, time.monotonic()
        time.sleep(min(pause, deadline.remaining()))
        pause = min(2 * pause, _LONGEST_PAUSE, pace.silent / 4)


def read_journal(
    store: ObjectStore, path: str, deadline: Deadline
) -> tuple[Journal | None, str] | None:
    """A journal and its etag; None if there is none, or None in its place if it is damaged."""
    try:
        data, etag = store.read(path, deadline, limit=_LIMIT)
    except NotFound:
        return None
    try:
        return parse_record(Journal, parse_json(data, path, InvalidData), path), etag
    except InvalidData:
        return None, etag


def _fresh(what: str, size: int, pace: Pace, owner: str) -> Journal:
    chunk = pace.chunk_nbytes
    while size > 10_000 * chunk:
        chunk *= 2
    return Journal(what=what, size=size, chunk_nbytes=chunk, owner=owner, beat=0, at=now())


def _text(journal: Journal) -> bytes:
    return canonical_json(journal.model_dump(mode="json"))
