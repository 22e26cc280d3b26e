"""What happened: the decision tree as it was walked, with a reason at every branch.

A :class:`Journal` is written while a load goes on and becomes a :class:`LoadReport`. The journal of
a load that failed goes with its error, so that a log shows why each way was not taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Stage:
    """One branch of the tree: what was tried, for how long (seconds), and how it came out.

    ``moved`` is when the first weights moved and when the last had come, in seconds on the
    monotonic clock, for a stage that moves any.
    """

    name: str
    outcome: str
    reason: str
    seconds: float
    moved: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did. ``bytes`` counts weights, ``seconds`` the whole load."""

    ref: str
    manifest: str
    rank: int
    route: str
    transport: str | None
    source: str
    tensors: int
    bytes: int
    seconds: float
    verified: bool
    kept: tuple[str, ...]
    skipped: tuple[str, ...]
    stages: tuple[Stage, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        rate = self.bytes / self.seconds / 1e9 if self.seconds else 0.0
        head = (
            f"{self.ref} ({self.manifest[:12]}) by {self.route}"
            f"{f' over {self.transport}' if self.transport else ''} from {self.source}: "
            f"{self.tensors} tensors, {self.bytes:,} bytes, {self.seconds:.3f} s, "
            f"{rate:.2f} GB/s, {'every byte checked' if self.verified else 'NOT verified'}"
        )
        return "\n".join([head, *tree(self.stages)])


def tree(stages: tuple[Stage, ...]) -> list[str]:
    """The walked tree as lines of text."""
    width = max((len(s.name) for s in stages), default=0)
    lines = []
    for position, stage in enumerate(stages):
        branch = "└─" if position == len(stages) - 1 else "├─"
        reason = f"  {stage.reason}" if stage.reason else ""
        lines.append(
            f"{branch} {stage.name:<{width}}  {stage.outcome:<4} {stage.seconds:8.3f} s{reason}"
        )
    return lines


@dataclass(slots=True)
class Journal:
    """The stages of a load so far."""

    stages: list[Stage] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self.started

    @contextmanager
    def stage(self, name: str) -> Iterator[Note]:
        """Time a stage; an error that leaves it is noted as its outcome."""
        note = Note()
        began = time.monotonic()
        try:
            yield note
        except BaseException as cause:
            note.no(str(cause) or type(cause).__name__)
            raise
        finally:
            seconds = time.monotonic() - began
            self.stages.append(Stage(name, note.outcome, note.reason, seconds, note.moved))

    def lines(self) -> list[str]:
        """The tree so far, as lines of text."""
        return tree(tuple(self.stages))


class Note:
    """How a stage came out: yes, unless it is told otherwise."""

    __slots__ = ("moved", "outcome", "reason")

    def __init__(self) -> None:
        self.outcome = "yes"
        self.reason = ""
        self.moved: tuple[float, float] | None = None

    def yes(self, reason: str) -> None:
        """The stage came out well, and this is worth knowing."""
        self.outcome, self.reason = "yes", reason

    def no(self, reason: str) -> None:
        """The branch is not taken, for this reason."""
        self.outcome, self.reason = "no", " ".join(reason.split())
