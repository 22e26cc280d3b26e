"""Time as a value that is passed down: a point on the monotonic clock, and what is left of it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from warmcast.manifests.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time, in seconds on the monotonic clock, after which work has to have ended."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline ``seconds`` from now; infinity means never."""
        return cls(time.monotonic() + seconds)

    @classmethod
    def never(cls) -> Deadline:
        """A deadline that is never over, for work that a person is watching."""
        return cls(math.inf)

    @property
    def expired(self) -> bool:
        """Whether no time is left."""
        return self.remaining() <= 0

    def remaining(self) -> float:
        """Seconds left; 0 when the deadline is over."""
        return max(0.0, self.at - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """The earlier of this deadline and ``seconds`` from now: a phase's share of the whole."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    def share(self, fraction: float) -> Deadline:
        """A deadline after ``fraction`` (0 to 1) of the time left, so that some remains."""
        return self if math.isinf(self.at) else self.within(self.remaining() * fraction)

    def check(self, doing: str) -> None:
        """Raise :class:`DeadlineExceeded`, naming what was being done, if no time is left."""
        if self.expired:
            raise DeadlineExceeded(
                f"no time left while {doing}", do="give the job a longer deadline"
            )
