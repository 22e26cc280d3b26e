"""What came of the demo: a table for people, the same as JSON, and whether all is as expected."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from warmcast.manifests.errors import WarmcastError

_WIDEST = 500

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
        """Print the table, as wide as it is: a terminal may wrap it, but nothing is cut off."""
        table = self._table()
        console = Console(highlight=False)
        width = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
        Console(highlight=False, width=max(width, console.width)).print(table)
        count = sum(worker.identical for worker in self.workers)
        shapes = ", ".join(f"{n} {'×'.join(map(str, s))}" for n, s in self.outputs.items())
        print("Seconds of the load, by stage; the start of the process is not in them.")
        print(
            f"{count} of {len(self.workers)} workers compute, bit by bit, "
            f"what {self.model} does as transformers reads it:\n"
            f"{shapes}; SHA-256 {self.digest[:12]}."
        )
        sys.stdout.flush()

    def _table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("worker", "route", "transport"):
            table.add_column(name)
        for name in ("bytes", *STAGES, "rest", "total s"):
            table.add_column(name, justify="right")
        for name in ("verified", "identical"):
            table.add_column(name)
        for worker in self.workers:
            table.add_row(*_row(worker))
        return table

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
        worker.route,
        worker.report["transport"] or "-",
        f"{worker.report['bytes']:,}",
        *(f"{value:.3f}" for value in seconds),
        "yes" if worker.report["verified"] else "NO",
        "yes" if worker.identical else "NO",
    )
