"""How steps are run: at once in this process, or each as a task of a flow.

A deploy is composed once (:mod:`run`) and handed a :class:`Runner`; the Prefect flow brings its
own. A step is a plain function; a mapped step is a function of one item, one call a file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Protocol, TypeVar

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError

if TYPE_CHECKING:
    from warmcast.flows.steps.errand import Errand

T = TypeVar("T")
R = TypeVar("R")

THREADS = 4
"""Files that are worked on at once: hashing and uploading both leave the interpreter's lock."""


class Runner(Protocol):
    """Runs the steps of a deploy."""

    def call(self, step: str, function: Callable[[], R]) -> R:
        """Run a step and return what it returns."""

    def map(
        self,
        step: str,
        function: Callable[[T], R],
        items: Sequence[T],
        label: Callable[[T], str],
        errand: Callable[[T], Errand | None] | None = None,
    ) -> list[R]:
        """Run a step for each item, some at once; results in the order of the items.

        The first error is raised when no call is running any more. ``label`` names an item.
        ``errand`` tells of an item what another machine needs to do the same; None where only
        this one can.
        """


class Cancelled(WarmcastError):
    """Another file's failure, or a person, ended the deploy; never what a caller sees first."""


class Ticker:
    """Told the bytes of every piece of work: counts them, and ends work that should not go on.

    Steps call it from their innermost loops and from within uploads, so that a failed or
    interrupted deploy ends within a piece, not within a file.
    """

    def __init__(self, deadline: Deadline, advance: Callable[[int], None]) -> None:
        self._deadline = deadline
        self._advance = advance
        self._stopped = threading.Event()

    def __call__(self, nbytes: int) -> None:
        """Count ``nbytes``; raises :class:`Cancelled` or ``DeadlineExceeded``."""
        if self._stopped.is_set():
            raise Cancelled("deploy", found="it was ended")
        self._deadline.check("deploying")
        self._advance(nbytes)

    def stop(self) -> None:
        """End all work that calls this ticker."""
        self._stopped.set()

    def guarded(self, function: Callable[[T], R]) -> Callable[[T], R]:
        """The function; where it raises, all other work is ended."""

        def call(item: T) -> R:
            try:
                return function(item)
            except BaseException:
                self.stop()
                raise

        return call


class InProcess:
    """Runs steps in this process, mapped ones in a few threads."""

    def __init__(self, ticker: Ticker) -> None:
        self._ticker = ticker

    def call(self, step: str, function: Callable[[], R]) -> R:
        """Call the function."""
        return function()

    def map(
        self,
        step: str,
        function: Callable[[T], R],
        items: Sequence[T],
        label: Callable[[T], str],
        errand: Callable[[T], Errand | None] | None = None,
    ) -> list[R]:
        """Call the function for each item in a few threads."""
        guarded = self._ticker.guarded(function)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="warmcast-deploy") as pool:
            try:
                futures = [pool.submit(guarded, item) for item in items]
                wait(futures)
            except BaseException:
                self._ticker.stop()
                raise
        raise_first(future.exception() for future in futures)
        return [future.result() for future in futures]


def raise_first(errors: Iterable[BaseException | None]) -> None:
    """Raise the error that ended the others' work, if there was one."""
    found = [error for error in errors if error is not None]
    if found:
        raise next((error for error in found if not isinstance(error, Cancelled)), found[0])
