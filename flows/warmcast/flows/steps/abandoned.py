"""Abandoned: take away transfers that nobody goes on with: journals, and what was begun in stores.

A journal tells when it was last written; while its owner lives that is every other second. What was
begun and no journal names is an upload of one process, or of one that was killed before it wrote
its journal; of that the store tells the age. A journal is taken over before what it names goes, so
that an owner who does live after all finds out and begins anew.
"""

from __future__ import annotations

from datetime import UTC, datetime

from warmcast.flows.steps.journal import FOLDER, read_journal
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import NotFound, PreconditionFailed
from warmcast.manifests.manifest import TIME_FORMAT
from warmcast.manifests.origin import Origin

UNFINISHED = 3600.0
"""Seconds that an upload without a journal may take, whatever the grace is."""


def take_away(origin: Origin, grace: float, deadline: Deadline, *, dry_run: bool) -> int:
    """Take away what was left ``grace`` seconds ago or earlier; how many transfers and uploads."""
    store = origin.store
    named: set[str] = set()
    count = 0
    for info in list(store.list(FOLDER, deadline)):
        if "/" in info.key.removeprefix(FOLDER):
            continue
        found = read_journal(store, info.key, deadline)
        if found is None:
            continue
        journal, etag = found
        if journal is not None and journal.token is not None:
            named.add(journal.token)
        if journal is not None and _age(journal.at) < grace:
            continue
        count += 1
        if dry_run:
            continue
        try:
            store.replace(info.key, b"{}", etag, deadline)
        except (PreconditionFailed, NotFound):
            continue  # somebody goes on with it
        if journal is not None and journal.token is not None:
            store.abort_parts(journal.token, deadline)
        store.delete(info.key, deadline)
    for begun in list(store.begun_parts(deadline)):
        if begun.token not in named and begun.age >= max(grace, UNFINISHED):
            count += 1
            if not dry_run:
                store.abort_parts(begun.token, deadline)
    return count


def _age(at: str) -> float:
    """Seconds since a time as journals write it, by this machine's clock."""
    made = datetime.strptime(at, TIME_FORMAT).replace(tzinfo=UTC)
    return (datetime.now(UTC) - made).total_seconds()
