"""The flow ``warmcast-deploy``: a deploy as Prefect sees it, for triggers and CI."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from warmcast.flows.config import ConvertSection, Job, MeshSection, SignSection
from warmcast.flows.jobs import run_job
from warmcast.flows.prefect.artifacts import Timed, publish_deploy
from warmcast.flows.prefect.limits import Limit
from warmcast.flows.prefect.secrets import check_plain, in_environment
from warmcast.flows.prefect.tasks import Retries, Tasks
from warmcast.flows.progress import Lines
from warmcast.flows.runner import THREADS, Runner, Ticker
from warmcast.manifests.deadline import Deadline


def _name() -> str:
    return " ".join(["deploy", *map(str, flow_run.parameters.get("refs", ()))])


@flow(
    name="warmcast-deploy",
    flow_run_name=_name,
    task_runner=ThreadPoolTaskRunner(max_workers=THREADS),  # type: ignore[arg-type]
    persist_result=False,
)
def deploy_flow(
    source: str,
    origin: str,
    refs: list[str],
    revision: str | None = None,
    allow: list[str] | None = None,
    ignore: list[str] | None = None,
    convert: ConvertSection | None = None,
    meshes: list[MeshSection] | None = None,
    sign: SignSection | None = None,
    work: str | None = None,
    repair: bool = False,
    deadline_s: float | None = None,
    retries: int = 3,
    retry_delay_s: float = 2.0,
    dask: str | None = None,
    secrets: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Deploy ``source`` into ``origin`` and point ``refs`` at it; see :func:`warmcast.flows.run`.

    ``sign`` names files of keys, ``secrets`` Secret blocks by the variables of the environment that
    they are for; ``dask`` is the address of a scheduler whose workers transfer files. Returns what
    was done: :meth:`warmcast.flows.jobs.JobResult.record`.
    """
    check_plain(source, "source")
    check_plain(origin, "origin")
    job = Job(
        source=source,
        refs=tuple(refs),
        revision=revision,
        allow=tuple(allow or ()),
        ignore=tuple(ignore or ()),
        convert=convert or ConvertSection(),
        meshes=tuple(meshes or ()),
        sign=sign,
    )
    deadline = Deadline.never() if deadline_s is None else Deadline.after(deadline_s)
    timed = Timed(Lines(get_run_logger().info))
    tries = Retries(retries, retry_delay_s)
    with ExitStack() as held:
        held.enter_context(in_environment(secrets or {}))
        lent = None
        if dask is not None:
            from warmcast.flows.prefect.dask import cluster

            lent = held.enter_context(cluster(dask, deadline))
        limit = Limit.of(source, deadline)

        def runner(ticker: Ticker) -> Runner:
            return Tasks(ticker, deadline, tries, limit, lent)

        done = run_job(
            job, origin, work=Path(work) if work else None, repair=repair, deadline=deadline,
            progress=timed, runner=runner,
        )  # fmt: skip
    record = done.record()
    publish_deploy(record, origin, timed)
    return record


def run_in_flow(
    job: Job,
    origin: str,
    *,
    work: Path | None,
    repair: bool,
    deadline: Deadline,
    dask: str | None,
    retries: Retries = Retries(),  # noqa: B008 - it is frozen
) -> dict[str, Any]:
    """Run a job as a flow, its transfers by the workers of the Dask scheduler at ``dask``."""
    check_plain(job.source, "source")
    check_plain(origin, "--origin")
    remaining = deadline.remaining()
    record: dict[str, Any] = deploy_flow(
        job.source, origin, list(job.refs), revision=job.revision, allow=list(job.allow),
        ignore=list(job.ignore), convert=job.convert, meshes=list(job.meshes), sign=job.sign,
        work=None if work is None else str(work), repair=repair,
        deadline_s=None if remaining == float("inf") else remaining, dask=dask,
        retries=retries.count, retry_delay_s=retries.first_delay,
    )  # fmt: skip
    return record
