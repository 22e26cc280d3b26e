"""The flow ``warmcast-gc``: ``warmcast gc`` on a schedule."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact

from warmcast.flows.prefect.secrets import check_plain, in_environment
from warmcast.flows.refs_cli import GRACE, HISTORY
from warmcast.flows.steps.collect import collect
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.origin import Origin


@flow(name="warmcast-gc", flow_run_name="gc {origin}", persist_result=False)
def gc_flow(
    origin: str,
    delete: bool = False,
    grace_hours: float = GRACE,
    history: int = HISTORY,
    deadline_s: float | None = None,
    secrets: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Mark what no ref needs, and delete what was marked long enough; without ``delete``, tell.

    Returns what was found and done.
    """
    check_plain(origin, "origin")
    deadline = Deadline.never() if deadline_s is None else Deadline.after(deadline_s)
    with in_environment(secrets or {}), Origin.open(origin) as opened:
        found = collect(opened, grace_hours * 3600, history, deadline, dry_run=not delete)
    logger = get_run_logger()
    for problem in found.problems:
        logger.warning("%s", problem)
    logger.info("%s", found.summary())
    record = asdict(found)
    create_table_artifact(
        key="warmcast-gc",
        table=[{"what": what.replace("_", " "), "count": n} for what, n in record.items()
               if not isinstance(n, list)],
        description=found.summary(),
    )  # fmt: skip
    return record
