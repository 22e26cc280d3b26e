"""The flow ``warmcast-mirror``: watches the upstreams of a ``warmcast.yaml``, on a schedule.

A new revision of a model is mirrored, and a ref of its own (``model@candidate``) pointed at it, for
people or tests to promote. Where nothing is new, which what upstreams publish of their files tells,
nothing is read and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact

from warmcast.flows.cli import check_origin
from warmcast.flows.config import Job, read_config, with_refs
from warmcast.flows.errors import DeployError
from warmcast.flows.jobs import run_jobs
from warmcast.flows.plan import plan_job
from warmcast.flows.prefect.deploy import run_in_flow
from warmcast.flows.prefect.secrets import check_plain, in_environment
from warmcast.flows.prefect.tasks import Retries
from warmcast.manifests.deadline import Deadline

Write = Callable[[str], object]


@flow(name="warmcast-mirror", flow_run_name="mirror {file}", persist_result=False)
def mirror_flow(
    file: str = "warmcast.yaml",
    models: list[str] | None = None,
    origin: str | None = None,
    ref: str = "candidate",
    work: str | None = None,
    deadline_s: float | None = None,
    retries: int = 3,
    retry_delay_s: float = 2.0,
    dask: str | None = None,
    secrets: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Mirror what is new of the models in ``file``, and point ``ref`` of each at it.

    ``origin`` stands for the file's. A model that fails does not keep the others from being
    mirrored; the flow fails at the end. Returns a value by model.
    """
    config = read_config(Path(file))
    url = origin or config.origin or ""
    check_origin(url)
    check_plain(url, "origin")
    deadline = Deadline.never() if deadline_s is None else Deadline.after(deadline_s)
    logger = get_run_logger()
    tries = Retries(retries, retry_delay_s)

    def run(name: str, job: Job) -> dict[str, Any]:
        wanted = with_refs(job, [ref])
        planned = plan_job(wanted, url, deadline)
        told = {"source": job.source, "revision": planned.revision}
        if not planned.changes:
            logger.info("%s: nothing new", name)
            return told | {"changed": False, "moved_bytes": 0, "manifest": planned.refs[0].now}
        done = run_in_flow(
            wanted, url, work=Path(work) if work else None, repair=False, deadline=deadline,
            dask=dask, retries=tries,
        )  # fmt: skip
        return told | {key: done[key] for key in ("changed", "moved_bytes", "manifest")}

    def failed(name: str, why: str) -> None:
        logger.error("%s: %s", name, why)

    with in_environment(secrets or {}):
        done = run_jobs(config.chosen(models or []), run, deadline, failed)
    rows = [{"model": name, "state": _state(row)} | row for name, row in done.done.items()]
    rows += [{"model": name, "state": f"failed: {why}"} for name, why in done.failed.items()]
    create_table_artifact(key="warmcast-mirror", table=rows, description=done.summary())
    if done.failed:
        raise DeployError(
            file, expected="every model mirrored", found=f"{', '.join(done.failed)} failed"
        )
    return dict(done.done)


def _state(row: dict[str, Any]) -> str:
    return "new" if row["changed"] else "nothing new"
