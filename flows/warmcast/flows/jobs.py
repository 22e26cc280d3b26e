"""Several deploys, one after another: one that fails does not keep the others from being done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmcast.flows.config import Job
from warmcast.flows.progress import Progress, nbytes_text
from warmcast.flows.run import DeployResult, deploy
from warmcast.flows.runner import InProcess, Runner, Ticker
from warmcast.flows.steps.history import Moved, promote
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError, one_line
from warmcast.manifests.origin import Origin, Ref


@dataclass(frozen=True, slots=True)
class JobResult:
    """A deploy, and the other refs that name it now."""

    result: DeployResult
    others: tuple[Moved, ...] = ()

    def summary(self) -> str:
        """A line a ref."""
        return "\n".join([self.result.summary(), *(moved.summary() for moved in self.others)])

    def record(self) -> dict[str, Any]:
        """The same as a JSON value."""
        digest = self.result.manifest.digest
        others = [
            {"ref": moved.ref, "before": moved.before, "changed": moved.before != digest}
            for moved in self.others
        ]
        return self.result.record() | {"other_refs": others, "summary": self.summary()}


def run_job(
    job: Job,
    origin: str,
    *,
    work: Path | None = None,
    repair: bool = False,
    deadline: Deadline,
    progress: Progress | None = None,
    runner: Callable[[Ticker], Runner] = InProcess,
) -> JobResult:
    """Deploy, and point all the job's refs at what came of it. Raises what ``deploy`` raises."""
    result = deploy(
        job.source,
        origin,
        job.refs[0],
        revision=job.revision,
        allow=job.allow,
        ignore=job.ignore,
        convert=job.convert.options(),
        meshes=job.requests(),
        work=work,
        repair=repair,
        signing=job.sign.signing() if job.sign else None,
        deadline=deadline,
        progress=progress,
        runner=runner,
    )
    with Origin.open(origin) as opened:
        others = tuple(
            promote(opened, result.manifest.digest, Ref.parse(ref), deadline)
            for ref in job.refs[1:]
        )
    return JobResult(result, others)


@dataclass(frozen=True, slots=True)
class Several:
    """What came of several deploys, by model, as JSON values; of those that failed, why."""

    done: Mapping[str, dict[str, Any]]
    failed: Mapping[str, str]
    seconds: float

    def summary(self) -> str:
        """One line."""
        changed = sum(record["changed"] for record in self.done.values())
        moved = sum(record["moved_bytes"] for record in self.done.values())
        failed = f", {len(self.failed)} failed ({', '.join(self.failed)})" if self.failed else ""
        return (
            f"of {len(self.done) + len(self.failed)} models {changed} published, "
            f"{len(self.done) - changed} as they were{failed}; {nbytes_text(moved)} moved, "
            f"{self.seconds:.1f} s"
        )

    def record(self) -> dict[str, Any]:
        """The same as a JSON value."""
        return {
            "models": dict(self.done),
            "failed": dict(self.failed),
            "seconds": round(self.seconds, 3),
            "summary": self.summary(),
        }


def run_jobs(
    jobs: Mapping[str, Job],
    run: Callable[[str, Job], dict[str, Any]],
    deadline: Deadline,
    failed: Callable[[str, str], None],
) -> Several:
    """Run each job; ``failed`` is told at once. When the deadline is over, no other is begun."""
    began = time.monotonic()
    done: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    for name, job in jobs.items():
        try:
            deadline.check(f"deploying {name}")
            done[name] = run(name, job)
        except Exception as cause:  # noqa: BLE001 - told; the others are not to suffer for it
            errors[name] = _line(cause)
            failed(name, errors[name])
    return Several(done, errors, time.monotonic() - began)


def _line(cause: Exception) -> str:
    if isinstance(cause, WarmcastError):
        return str(cause)
    return f"{type(cause).__name__}: {one_line(cause)}"
