"""Steps as tasks: each step one, and each file of a mapped step, never a chunk: a task costs 80 ms.

What can pass (a connection, a store or an upstream that does not answer) is tried again, after a
while with jitter; what cannot is not. Files of a limited upstream wait for their slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture

from warmcast.flows.errors import SourceUnreachable
from warmcast.flows.prefect.limits import Limit
from warmcast.flows.runner import Ticker, raise_first
from warmcast.flows.steps.errand import Errand
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, StoreUnreachable

if TYPE_CHECKING:
    from warmcast.flows.prefect.dask import Cluster

T = TypeVar("T")
R = TypeVar("R")

_MAY_PASS = (StoreUnreachable, SourceUnreachable, ConnectionError)
_LONGEST = 60.0
_BRACES = str.maketrans({"{": "{{", "}": "}}"})  # names are formats


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a task is tried again, and after how many seconds: doubled each time, jittered."""

    count: int = 3
    first_delay: float = 2.0

    def options(self) -> dict[str, Any]:
        """The same as a task's options."""
        return {
            "retries": self.count,
            "retry_delay_seconds": [
                min(self.first_delay * 2**i, _LONGEST) for i in range(self.count)
            ]
            or None,
            "retry_jitter_factor": 0.5 if self.count and self.first_delay else None,
            "retry_condition_fn": worth_another_try,
        }


def may_pass(error: BaseException | None) -> bool:
    """Whether the same call may succeed later. A deadline that is over stays so."""
    return isinstance(error, _MAY_PASS) and not isinstance(error, DeadlineExceeded)


def worth_another_try(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """The same, of a failed state."""
    return may_pass(state.data if isinstance(state.data, BaseException) else None)


def is_last_try(retries: Retries) -> bool:
    """Whether the task that runs now is not tried again."""
    context = TaskRunContext.get()
    return context is None or context.task_run.run_count > retries.count


class Tasks:
    """A :class:`warmcast.flows.runner.Runner` that makes each step a task of the present flow.

    With a ``cluster``, files that other machines can have too are its workers' errands.
    """

    def __init__(
        self,
        ticker: Ticker,
        deadline: Deadline,
        retries: Retries,
        limit: Limit,
        cluster: Cluster | None = None,
    ) -> None:
        self._ticker = ticker
        self._deadline = deadline
        self._retries = retries
        self._limit = limit
        self._cluster = cluster

    def call(self, step: str, function: Callable[[], R]) -> R:
        """Run a step as a task."""

        def run() -> R:
            return function()

        return task(name=step, **self._options())(run)()

    def map(
        self,
        step: str,
        function: Callable[[T], R],
        items: Sequence[T],
        label: Callable[[T], str],
        errand: Callable[[T], Errand | None] | None = None,
    ) -> list[R]:
        """Run a step as a task for each item, named after it."""
        names = [f"{step} {label(item)}".translate(_BRACES) for item in items]
        cluster = self._cluster
        away = {}
        if cluster is not None and errand is not None:
            away = {n: one for n, item in enumerate(items) if (one := errand(item)) is not None}
        results: dict[int, Any] = {}
        try:
            here = {
                n: self._begun(step, names[n], function, item)
                for n, item in enumerate(items)
                if n not in away
            }
            if cluster is not None and away:
                results |= self._errands(cluster, step, names, away)
            results |= {n: f.result(raise_on_failure=False) for n, f in here.items()}
        except BaseException:
            self._ticker.stop()
            raise
        ordered = [results[n] for n in range(len(items))]
        raise_first(r if isinstance(r, BaseException) else None for r in ordered)
        return ordered

    def _begun(self, step: str, name: str, function: Callable[[T], R], item: T) -> PrefectFuture[R]:
        def run() -> R:
            try:
                self._ticker(0)
                with self._limit.slot():
                    return function(item)
            except BaseException as cause:
                if not may_pass(cause) or is_last_try(self._retries):
                    self._ticker.stop()
                raise

        return task(name=step, task_run_name=name, **self._options())(run).submit()

    def _errands(
        self, cluster: Cluster, step: str, names: Sequence[str], away: Mapping[int, Errand]
    ) -> dict[int, Any]:
        futures = {
            cluster.submit(
                step, names[n], one, self._deadline, self._limit.name, self._options()
            ): one.file.size
            for n, one in away.items()
        }
        found = dict(zip(away, cluster.gather(futures, self._ticker), strict=True))
        if any(isinstance(result, BaseException) for result in found.values()):
            self._ticker.stop()
        return found

    def _options(self) -> dict[str, Any]:
        return {"cache_policy": NO_CACHE, "persist_result": False, **self._retries.options()}
