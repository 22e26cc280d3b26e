"""Transfers by many machines: the files of a deploy, mirrored by the workers of a Dask cluster.

Each file of an upstream that lies elsewhere is an errand (:mod:`warmcast.flows.steps.errand`), a
task on the cluster; its bytes go from the upstream through the worker to the origin. The other
steps, and files that lie on the flow's own machine, stay there. Workers need warmcast and the
credentials of both ends in their own environment.

The flow waits under its deadline. A failure, and the flow's end, cancel what has not begun and tell
what runs to stop, which it does at the next piece; a worker whose flow is gone finishes the file
that it has, no later than at the deadline.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from queue import Empty, Queue
from typing import Any
from uuid import uuid4

from distributed import Event, Future, KilledWorker, get_client
from prefect import task
from prefect_dask.task_runners import DaskTaskRunner, PrefectDaskFuture

from warmcast.flows.errors import DeployError
from warmcast.flows.prefect.limits import Limit
from warmcast.flows.runner import Cancelled
from warmcast.flows.steps.errand import Errand, carry_out
from warmcast.flows.steps.mirror import Mirrored
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError

_CONNECT = 10.0
_LOOK = 1.0
"""Seconds between two questions of a worker whether to go on."""


class _Stop:
    """Ends an errand when its flow says so; asks the scheduler now and then."""

    def __init__(self, name: str, deadline: Deadline) -> None:
        self._event = Event(name, get_client())
        self._deadline = deadline
        self._next = 0.0

    def __call__(self, nbytes: int) -> None:
        """Raise :class:`Cancelled` or ``DeadlineExceeded``."""
        self._deadline.check("transferring")
        if time.monotonic() < self._next:
            return
        if self._event.is_set():
            raise Cancelled("transfer", found="its deploy was ended")
        self._next = time.monotonic() + _LOOK


def run_errand(errand: bytes, seconds: float, stop: str, limit: str | None) -> Mirrored:
    """What a worker does: one (pickled) errand, within ``seconds`` from when it begins."""
    deadline = Deadline.after(seconds)
    tick = _Stop(stop, deadline)
    tick(0)
    with Limit(limit, deadline).slot():
        return carry_out(pickle.loads(errand), deadline, tick)  # noqa: S301 - from our own flow


class Cluster:
    """A Dask cluster that is lent to one flow, and its errands."""

    def __init__(self, runner: DaskTaskRunner) -> None:
        self._runner = runner
        self._stop = Event(f"warmcast-stop-{uuid4().hex}", runner.client)

    def submit(
        self,
        step: str,
        name: str,
        errand: Errand,
        deadline: Deadline,
        limit: str | None,
        options: dict[str, Any],
    ) -> PrefectDaskFuture[Mirrored]:
        """Begin an errand; ``options`` are the task's."""
        one = task(name=step, task_run_name=name, **options)(run_errand)
        return self._runner.submit(
            one,
            # Pickled here: Prefect looks for futures all through parameters.
            {
                "errand": pickle.dumps(errand),
                "seconds": deadline.remaining(),
                "stop": self._stop.name,
                "limit": limit,
            },
        )

    def gather(
        self,
        futures: Mapping[PrefectDaskFuture[Mirrored], int],
        tick: Callable[[int], None],
    ) -> list[Mirrored | BaseException]:
        """Wait for errands, of so many bytes each; what came of them, in order.

        ``tick`` is told the bytes of those that end well, and raises when no other is to go on.
        """
        left = {future.wrapped_future: nbytes for future, nbytes in futures.items()}
        ended: Queue[Future[Any]] = Queue()
        for future in left:
            future.add_done_callback(ended.put)
        failed: BaseException | None = None
        while left:
            try:
                tick(0)
            except WarmcastError as cause:
                failed = failed or cause
            with suppress(Empty):
                done = ended.get(timeout=_LOOK)
                nbytes = left.pop(done)
                if done.status != "finished" or done.result().is_failed():
                    failed = failed or Cancelled("transfer", found="another one failed")
                elif failed is None:
                    with suppress(WarmcastError):  # told again when it is asked next
                        tick(nbytes)
            if failed is not None and not self._stop.is_set():
                self.stop()
                for future in left:
                    future.cancel()
        return [_outcome(future, failed) for future in futures]

    def stop(self) -> None:
        """Have every errand end."""
        self._stop.set()


def _outcome(
    future: PrefectDaskFuture[Mirrored], failed: BaseException | None
) -> Mirrored | BaseException:
    try:
        return future.result(raise_on_failure=False)
    except CancelledError:
        return failed or Cancelled("transfer", found="the scheduler cancelled it")
    except (KilledWorker, OSError) as cause:
        return DeployError(
            "Dask cluster",
            expected="workers that live as long as their tasks",
            found=cause,
            do="look at the workers' logs, and their memory",
        )


@contextmanager
def cluster(address: str, deadline: Deadline) -> Iterator[Cluster]:
    """Connect to a scheduler; errands that are left are stopped at the end.

    Raises :class:`DeployError` if there is none.
    """
    timeout = deadline.within(_CONNECT).remaining()
    with DaskTaskRunner(address=address, client_kwargs={"timeout": timeout}) as runner:
        try:
            lent = Cluster(runner)
        except (OSError, ValueError) as cause:
            raise DeployError(
                f"Dask scheduler {address}",
                expected=f"an answer in {timeout:.0f} s",
                found=cause,
                do="give the address that `dask scheduler` tells",
            ) from cause
        try:
            yield lent
        finally:
            lent.stop()
