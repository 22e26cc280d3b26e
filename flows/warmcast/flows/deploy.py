"""The flow: a deploy as Prefect sees it, for schedulers and CI.

The same steps as :func:`warmcast.flows.run.deploy`, each a task; mirroring is a task for each
file, never for a chunk, because a task costs some 80 ms. At the end a table of what was moved is
published as an artifact. Nothing is cached by Prefect: what was done already is known by the
origin itself, and steps are safe to run again.

This module alone imports Prefect.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

# Prefect reports usage to its makers unless it is told not to, and reads this when imported.
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ThreadPoolTaskRunner

from warmcast.flows.convert.options import MAX_SHARD_NBYTES, ConvertOptions
from warmcast.flows.progress import Lines
from warmcast.flows.run import DeployResult, deploy
from warmcast.flows.runner import THREADS, Ticker, raise_first
from warmcast.flows.steps.meshes import parse_mesh
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError


class _OneLine(logging.Filter):
    """Our errors say in one line what is wrong; Prefect would log each with two tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, without the traceback of an error of ours."""
        if record.exc_info and isinstance(record.exc_info[1], WarmcastError):
            record.exc_info = None
        return True


for _name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(_name).addFilter(_OneLine())

T = TypeVar("T")
R = TypeVar("R")


class Tasks:
    """A :class:`warmcast.flows.runner.Runner` that makes each step a task of the present flow."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker = ticker

    def call(self, step: str, function: Callable[[], R]) -> R:
        """Run a step as a task."""

        def run() -> R:
            return function()

        return task(name=step, cache_policy=NO_CACHE, persist_result=False)(run)()

    def map(
        self, step: str, function: Callable[[T], R], items: Sequence[T], label: Callable[[T], str]
    ) -> list[R]:
        """Run a step as a task for each item, named after it."""
        guarded = self._ticker.guarded(function)
        futures = []
        for item in items:

            def run(item: T = item) -> R:
                return guarded(item)

            one = task(
                name=step,
                task_run_name=f"{step} {label(item)}",
                cache_policy=NO_CACHE,
                persist_result=False,
            )
            futures.append(one(run).submit())
        results = [future.result(raise_on_failure=False) for future in futures]
        raise_first(r if isinstance(r, BaseException) else None for r in results)
        return results


@flow(
    name="warmcast-deploy",
    flow_run_name="deploy {ref}",
    task_runner=ThreadPoolTaskRunner(max_workers=THREADS),  # type: ignore[arg-type]
    persist_result=False,
)
def deploy_flow(
    source: str,
    origin: str,
    ref: str,
    revision: str | None = None,
    meshes: list[dict[str, Any]] | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    work: str | None = None,
    repair: bool = False,
    deadline_s: float | None = None,
) -> dict[str, Any]:
    """Deploy ``source`` into ``origin`` and point ``ref`` at it; see :func:`deploy`.

    ``meshes`` are values as :func:`parse_mesh` reads them. Returns :meth:`DeployResult.record`.
    """
    result = deploy(
        source,
        origin,
        ref,
        revision=revision,
        meshes=[parse_mesh(mesh, f"meshes.{i}") for i, mesh in enumerate(meshes or ())],
        convert=ConvertOptions(max_shard_nbytes=max_shard_nbytes),
        work=Path(work) if work else None,
        repair=repair,
        deadline=Deadline.never() if deadline_s is None else Deadline.after(deadline_s),
        progress=Lines(get_run_logger().info),
        runner=Tasks,
    )
    _publish_table(result)
    return result.record()


def _publish_table(result: DeployResult) -> None:
    moved = set(result.moved)
    create_table_artifact(
        key="warmcast-deploy",
        table=[
            {
                "file": file.path,
                "bytes": file.size,
                "moved": "yes" if file.path in moved else "already there",
                "sha256": file.sha256,
            }
            for file in result.manifest.files
        ],
        description=result.summary(),
    )
