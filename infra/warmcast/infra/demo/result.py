"""What came of the demo: a table for people, the same as JSON, and whether it is as it should be."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warmcast.manifests.errors import WarmcastError

STAGES: Mapping[str, Sequence[str]] = {
    "find": ("ref", "manifest", "skeleton", "identity", "registry", "peer", "next"),
    "move": ("transfer", "read"),
    "verify": ("verify",),
}
"""The table's columns of seconds, and the load's stages that each sums; the rest is ``rest``."""


class NotAsExpected(WarmcastError):
    """A worker took another route, was not verified, or computes something else."""


@dataclass(frozen=True, slots=True)
class Worker:
    """How one worker booted. ``report`` is a load's report as JSON."""

    name: str
    device: str
    expected: str
    report: Mapping[str, Any]
    tree: str
    identical: bool

    @property
    def route(self) -> str:
        """The way by which the weights came."""
        return str(self.report["route"])

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by column of the table."""
        sums = {
            column: sum(s["seconds"] for s in self.report["stages"] if s["name"] in names)
            for column, names in STAGES.items()
        }
        return {**sums, "rest": max(0.0, self.report["seconds"] - sum(sums.values()))}

    def record(self) -> dict[str, Any]:
        """The worker as JSON; seconds of the load, in all and by stage."""
        return {
            "name": self.name,
            "device": self.device,
            "route": self.route,
            "transport": self.report["transport"],
            "source": self.report["source"],
            "bytes": self.report["bytes"],
            "seconds": round(self.report["seconds"], 6),
            "stages": {name: round(seconds, 6) for name, seconds in self.stages.items()},
            "verified": self.report["verified"],
            "identical": self.identical,
            "tree": self.tree.splitlines(),
        }


@dataclass(frozen=True, slots=True)
class Result:
    """The whole. ``outputs`` are the shapes that every worker computes; ``digest`` covers them."""

    model: str
    origin: str
    digest: str
    outputs: Mapping[str, Sequence[int]]
    workers: Sequence[Worker]

    def record(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "model": self.model,
            "origin": self.origin,
            "outputs": {name: list(shape) for name, shape in self.outputs.items()},
            "outputs_sha256": self.digest,
            "workers": [worker.record() for worker in self.workers],
        }

    def print(self) -> None:
        """Print the table."""
        for line in self.lines():
            print(line)
        sys.stdout.flush()

    def lines(self) -> list[str]:
        """The table as lines: plain text, which no terminal's width changes."""
        head = ("worker", "device", "route", "transport", "bytes",
                *STAGES, "rest", "total s", "verified", "identical")  # fmt: skip
        rows = [head, *(_row(worker) for worker in self.workers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        numbers = range(head.index("bytes"), head.index("verified"))
        texts = [
            "  ".join(
                cell.rjust(width) if place in numbers else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        texts.insert(1, "  ".join("─" * width for width in widths))
        shapes = ", ".join(f"{n} {'×'.join(map(str, s))}" for n, s in self.outputs.items())
        count = sum(worker.identical for worker in self.workers)
        return [
            *texts,
            "Seconds of the load, by stage; the process's start is not in them.",
            f"Outputs bit-identical to {self.model} read by transformers: "
            f"{count} of {len(self.workers)} workers ({shapes}; SHA-256 {self.digest[:12]}).",
        ]

    def check(self) -> None:
        """Raise :class:`NotAsExpected`, for the first worker that is not as it should be."""
        for worker in self.workers:
            if worker.route != worker.expected:
                raise NotAsExpected(
                    worker.name, expected=f"route {worker.expected}", found=worker.route
                )
            if not worker.report["verified"]:
                raise NotAsExpected(worker.name, expected="every byte checked", found="not")
            if not worker.identical:
                raise NotAsExpected(
                    worker.name,
                    expected=f"outputs as those of {self.model} read by transformers",
                    found="others",
                )


def _row(worker: Worker) -> tuple[str, ...]:
    seconds = (*worker.stages.values(), worker.report["seconds"])
    return (
        worker.name,
        worker.device,
        worker.route,
        worker.report["transport"] or "-",
        f"{worker.report['bytes']:,}",
        *(f"{value:.3f}" for value in seconds),
        "yes" if worker.report["verified"] else "NO",
        "yes" if worker.identical else "NO",
    )
