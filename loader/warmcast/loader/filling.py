"""The memory of one load: allocated once, filled from one source after another and verified."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from warmcast.loader.plan import Plan, Targets
from warmcast.loader.report import Note
from warmcast.loader.routes import Source
from warmcast.loader.stages import Outcome, Stages
from warmcast.loader.verify import Verified, verify
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError


@dataclass(frozen=True, slots=True)
class Filled:
    """Targets that were filled and verified, and by whom."""

    route: str
    source: Source
    targets: Targets
    verified: Verified


class Filling:
    """Allocates, fills and verifies, the same for every route; on all ranks or none."""

    def __init__(
        self, stages: Stages, device: torch.device, deadline: Deadline, *, arena: bool
    ) -> None:
        self._stages = stages
        self._device = device
        self._deadline = deadline
        self._arena = arena
        self._targets: Targets | None = None

    def fill(
        self, route: str, plan: Plan, source: Source, limit: Deadline
    ) -> Filled | Outcome[Any]:
        """Fill a plan's targets from a source and verify them.

        What came of it, or the stage that failed.
        """
        targets = self.allocate(plan)
        name = "transfer" if source.transport else "read"
        filled = self._stages.attempt(name, partial(_fill, source, targets, limit))
        if filled.error is not None:
            return filled
        verified = self._stages.attempt("verify", partial(_verify, targets, self._deadline))
        if verified.error is not None or verified.value is None:
            return verified
        return Filled(route, source, targets, verified.value)

    def allocate(self, plan: Plan) -> Targets:
        """Memory for a plan; what an earlier source left dirty is used again where it fits."""
        return self._stages.together("allocate", partial(self._allocate, plan))

    def free(self) -> None:
        """Give the memory back, of a load that failed."""
        if self._targets is not None:
            self._targets.free()
            self._targets = None

    def let_go(self) -> None:
        """The memory is the model's now."""
        self._targets = None

    def _allocate(self, plan: Plan, note: Note) -> Targets:
        if self._targets is not None and self._targets.plan is plan:
            note.yes("the same memory as before, filled anew")
            return self._targets
        self.free()
        try:
            self._targets = Targets.allocate(plan, self._device, arena=self._arena)
        except torch.OutOfMemoryError:
            raise WarmcastError(
                f"{self._device}: no room for the weights",
                expected=f"{plan.nbytes:,} bytes",
                found="less",
                do="free memory, or choose another device",
            ) from None
        return self._targets


def _fill(source: Source, targets: Targets, limit: Deadline, note: Note) -> None:
    targets.crc32cs.clear()  # of what another source left
    began, ended = note.moved = source.fill(targets, limit)
    moving = max(ended - began, 1e-9)
    note.yes(
        f"{targets.plan.nbytes:,} bytes in {moving:.3f} s, "
        f"{targets.plan.nbytes / moving / 1e9:.2f} GB/s"
        + (f"; {source.reason}" if not source.transport and source.reason else "")
    )


def _verify(targets: Targets, deadline: Deadline, note: Note) -> Verified:
    verified = verify(targets.pairs(), deadline, targets.crc32cs)
    note.yes(
        f"CRC32C of {verified.nbytes:,} bytes, sampled hashes of {verified.tensors} tensors "
        f"in {verified.layers} layers"
    )
    return verified
