"""A stage of a load: timed, noted in the journal, and voted on by the group.

A stage that one rank cannot do is a "no" for all of them; what follows from it is the tree's to
say. Errors that are not ours (a device that fails, a bug) end the load of this rank, but not before
the others have been told.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from warmcast.loader.errors import without_frames
from warmcast.loader.quorum import Group, Verdict
from warmcast.loader.report import Journal, Note
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError

T = TypeVar("T")


class Outvoted(WarmcastError):
    """This rank could go on, but another could not; the message gives its reason."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """How a stage came out: this rank's result or problem, and the verdict of all ranks."""

    value: T | None
    verdict: Verdict
    problem: WarmcastError | None

    @property
    def error(self) -> WarmcastError | None:
        """Why the stage failed: this rank's problem, or that of another; None if it did not."""
        if self.problem is not None or self.verdict:
            return self.problem
        return Outvoted(str(self.verdict))


class Stages:
    """Runs the stages of one load, under one deadline."""

    def __init__(self, group: Group, deadline: Deadline) -> None:
        self.group = group
        self.deadline = deadline
        self.journal = Journal()

    def attempt(self, name: str, action: Callable[[Note], T]) -> Outcome[T]:
        """Run a stage that may fail, and vote on it."""
        value: T | None = None
        problem: WarmcastError | None = None
        with self.journal.stage(name) as note:
            try:
                value = action(note)
            except WarmcastError as cause:
                problem = without_frames(cause)
            except Exception as cause:
                with suppress(WarmcastError):
                    self.group.vote(False, f"{type(cause).__name__}: {cause}", self.deadline)
                raise
            verdict = self.group.vote(problem is None, str(problem), self.deadline)
            if not verdict:
                note.no(str(problem) if problem is not None else str(verdict))
        return Outcome(value, verdict, problem)

    def together(self, name: str, action: Callable[[Note], T]) -> T:
        """Run a stage that has to succeed on all ranks; raises the error of the one that failed."""
        outcome = self.attempt(name, action)
        if outcome.error is not None:
            raise outcome.error
        return cast("T", outcome.value)

    def first(self, text: str) -> str:
        """What rank 0 says, on every rank."""
        return self.group.first(text, self.deadline)
