"""The Route protocol: a way to get the bytes.

A route finds a *source*, and the source fills a rank's targets. Both are one rank's own affair;
that all ranks take the same route, and that what arrived is what it should be, is the tree's
(:mod:`warmcast.loader.load`). A new route is one file beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from warmcast.loader.plan import Plan, Targets
from warmcast.loader.transports import Span
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.identity import Identity
from warmcast.manifests.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank wants: this plan of this manifest, under this identity, on this device.

    ``arena`` tells that the memory to be filled is an arena; ``ref`` is what the manifest was asked
    for by.
    """

    manifest: Manifest
    plan: Plan
    identity: Identity
    device: torch.device
    arena: bool = True
    ref: str = ""


class Source(Protocol):
    """Somebody who has the bytes and is ready to give them.

    ``reason`` tells why a better transport was not taken; it is empty where there is none.
    """

    name: str
    transport: str | None
    reason: str

    def fill(self, targets: Targets, deadline: Deadline) -> Span:
        """Fill every target; when bytes moved, without preparations.

        After an error the targets are worth nothing.
        """

    def abandon(self) -> None:
        """Give up what was begun with the source, which will not be filled from."""


class Route(Protocol):
    """A way to find a source."""

    name: str

    def find(self, job: Job, deadline: Deadline) -> Source:
        """Find a source; raises the error that says why there is none."""
