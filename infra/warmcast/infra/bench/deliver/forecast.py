"""What a simulated delivery is told, and what it tells: settings in, a forecast out.

Bytes are bytes, times seconds, rates bytes a second. The record of a forecast is
``{"assumptions": {...}, "bursts": [{"burst": "cold"}, {"burst": "warm"}]}``, the fields of a burst
being those of :class:`Burst`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from warmcast.flows.progress import nbytes_text
from warmcast.infra.bench import record
from warmcast.manifests.errors import UsageError

GB = 1e9
_SECONDS = ("node_round_trip", "origin_round_trip", "detection", "step")
MOST_NODES = 1 << 16

MODELLED = (
    "placement by the agents' own ring; each node asks for the chunks in their order, from a place "
    "of its own if rotated, up to fetches at a time",
    "an owner serves in the order of asking, up to uploads at a time; who asks it waits in line, "
    "and turns neither to the next owner nor to the origin",
    "an owner pulls a chunk when it is first asked for",
    "bandwidth is shared evenly at both ends of a transfer; there are no switches between nodes, "
    "no lost packets, no processors and no registry",
    "a node receives no faster than its disk writes; what it sends comes from memory",
    "all that want a node which is gone wait until it is found gone, then ask the ring without it; "
    "the chunks that were on their way from it start anew",
    "a replica is there when its node has all chunks; in the warm burst, when the disk has been "
    "read once",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """A fleet, a model and a network.

    Raises :class:`UsageError` where they make no sense.

    ``replicas``: all asked for at one moment, spread evenly over ``nodes``; those of one node share
    its fetch. ``fetches``, ``uploads``: how many of each a node has at a time. ``rotated``: each
    node begins at a place of its own in the order of the chunks; else all begin at the first.
    ``pass_on_parts``: an owner passes on a chunk while it comes. ``failing``: the share of the
    nodes that is lost when the fleet has received ``failing_at`` of all that it wants (0: at the
    start), and is found gone ``detection`` seconds later.

    ``step``: seconds of a step of the simulation; 0 goes from event to event, and None chooses.
    ``groups``: nodes that want the model are simulated one by one up to this number, and beyond it
    in groups of neighbours that do the same.
    """

    nodes: int
    replicas: int
    model_bytes: int
    chunk_bytes: int = 16 << 20
    nic_rate: float = 12.5e9
    origin_rate: float = 200e9
    origin_connection_rate: float = 0.6e9
    disk_write_rate: float = 6e9
    disk_read_rate: float = 6e9
    node_round_trip: float = 0.2e-3
    origin_round_trip: float = 20e-3
    fetches: int = 16
    uploads: int = 32
    rotated: bool = True
    pass_on_parts: bool = True
    failing: float = 0.0
    failing_at: float = 0.5
    detection: float = 1.0
    seed: int = 0
    step: float | None = None
    groups: int = 2500

    def __post_init__(self) -> None:
        for name in ("nodes", "replicas", "model_bytes", "chunk_bytes", "fetches", "uploads"):
            self._expect(name, "1 or more", getattr(self, name) >= 1)
        self._expect("nodes", f"{MOST_NODES} at most", self.nodes <= MOST_NODES)
        for field in fields(self):
            if field.name.endswith("_rate"):
                value = getattr(self, field.name)
                self._expect(field.name, "more than 0", 0 < value < math.inf)
        for name in ("node_round_trip", "origin_round_trip", "detection"):
            self._expect(name, "0 or more", 0 <= getattr(self, name) < math.inf)
        self._expect("failing", "a share from 0 to less than 1", 0 <= self.failing < 1)
        self._expect("failing_at", "a share from 0 to less than 1", 0 <= self.failing_at < 1)
        self._expect("groups", "1 or more", self.groups >= 1)
        self._expect("step", "0 or more", self.step is None or 0 <= self.step < math.inf)

    def _expect(self, name: str, expected: str, holds: bool) -> None:
        if not holds:
            raise UsageError(name.replace("_", " "), expected=expected, found=getattr(self, name))

    @property
    def chunks(self) -> int:
        """Of the model; the last may be shorter."""
        return -(-self.model_bytes // self.chunk_bytes)

    @property
    def receivers(self) -> int:
        """Nodes with a replica."""
        return min(self.nodes, self.replicas)


@dataclass(frozen=True, slots=True)
class Burst:
    """All replicas started at one moment, and what became of it.

    ``replicas``: those whose node did not fail; the seconds are theirs. ``received_bytes``: by all
    nodes, from each other and from the origin, ``lost_bytes`` of which did not help: they were on
    nodes that failed or of chunks that were begun anew. ``bound_seconds``: what the last replica
    needs at least with this placement, whatever the agents do, and ``bound_by`` is why.
    """

    burst: str
    nodes: int
    replicas: int
    model_bytes: int
    origin_bytes: int
    origin_ratio: float
    seconds_to_first: float
    seconds_to_median: float
    seconds_to_last: float
    busiest_node_sent_bytes: int
    mean_node_sent_bytes: float
    received_bytes: int
    lost_bytes: int
    bound_seconds: float
    bound_by: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """A cold burst, a warm one after it, and on what they rest."""

    assumptions: Mapping[str, Any]
    bursts: tuple[Burst, ...]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "assumptions": dict(self.assumptions),
            "bursts": [asdict(burst) for burst in self.bursts],
        }

    def print(self) -> None:
        """A table for people, and below it what was assumed."""
        columns = (
            "burst",
            "nodes",
            "replicas",
            "GB",
            "first, s",
            "median, s",
            "last, s",
            "at least, s",
            "because of",
            "origin, GB",
            "ratio",
            "busiest sent, GB",
            "mean, GB",
        )
        rows = [
            (
                burst.burst,
                f"{burst.nodes:,}",
                f"{burst.replicas:,}",
                f"{burst.model_bytes / GB:.2f}",
                f"{burst.seconds_to_first:.2f}",
                f"{burst.seconds_to_median:.2f}",
                f"{burst.seconds_to_last:.2f}",
                f"{burst.bound_seconds:.2f}",
                burst.bound_by,
                f"{burst.origin_bytes / GB:.2f}",
                f"{burst.origin_ratio:.2f}",
                f"{burst.busiest_node_sent_bytes / GB:.2f}",
                f"{burst.mean_node_sent_bytes / GB:.2f}",
            )
            for burst in self.bursts
        ]
        print("A forecast, not a measurement.")
        record.print_table(columns, rows)
        print("Assumed: " + ", ".join(_said(self.assumptions)))
        for sentence in self.assumptions["modelled"]:
            print(f"- {sentence}")


def _said(assumptions: Mapping[str, Any]) -> list[str]:
    said = []
    for name, value in assumptions.items():
        words = name.replace("_", " ")
        if name.endswith("_rate"):
            said.append(f"{words} {value / GB:g} GB/s")
        elif name.endswith("_bytes"):
            said.append(f"{words.removesuffix(' bytes')} {nbytes_text(value)}")
        elif name in _SECONDS:
            said.append(f"{words} {value:g} s")
        elif isinstance(value, bool):
            said.append(f"{words} {'yes' if value else 'no'}")
        elif isinstance(value, int | float):
            said.append(f"{words} {value:g}")
    return said
