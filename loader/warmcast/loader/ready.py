"""The last branch: filled and verified targets become the model's, changed where that was asked.

Until here the model was not touched. Installing is one step that can be undone: if a change fails,
or another rank does, the containers that stood before come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from warmcast.loader.change import Change, publish_truth, truths_of
from warmcast.loader.containers import Marks, State, collect, install, marks, on_device, restorer
from warmcast.loader.plan import Targets, plan_changed
from warmcast.loader.report import Note
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidData, StoreError
from warmcast.manifests.identity import Identity
from warmcast.manifests.origin import Origin


@dataclass(frozen=True, slots=True)
class Served:
    """A state as a sender gives it: its identity's digest and its memory, in a receiver's order.

    ``layout`` is the digest of the tensors and their order, which a receiver's must equal;
    ``segments`` are the arena's, empty where the tensors lie in none. ``marks`` tell whether the
    model still holds these very bytes.
    """

    identity: str
    layout: str
    tensors: tuple[Tensor, ...]
    segments: tuple[Tensor, ...]
    marks: Marks


class Installation:
    """Puts one rank's targets into its model.

    ``state`` is the model's as it is now, ``identify`` gives the identity of a state.
    """

    def __init__(
        self,
        model: nn.Module,
        state: State,
        targets: Targets,
        *,
        modules: tuple[str, ...],
        device: torch.device,
        identify: Callable[[State], Identity],
    ) -> None:
        self._model = model
        self._before = state
        self._targets = targets
        self._modules = modules
        self._device = device
        self._identify = identify
        self._restore = restorer(model)

    @property
    def received_changed(self) -> bool:
        """Whether the targets hold weights as they are after a change."""
        return any(placement.entry is None for placement in self._targets.plan.placements)

    def undo(self) -> None:
        """Put back what stood in the model before."""
        self._restore()

    def install(self, prepare: Callable[[nn.Module], None] | None, note: Note) -> Served:
        """Put the targets into the model; what this worker can serve then.

        ``prepare`` is called first: it gives the skeleton the containers of changed weights.
        """
        targets, state = self._targets, self._before
        if prepare is not None:
            prepare(self._model)
            truths = {truth.name: truth for truth, _ in targets.pairs()}
            state = self._state()
            targets = replace(targets, plan=plan_changed(state, truths))
        # Of the containers as they were asked for: ties can give what is installed other strides.
        identity = self._identify(state).digest
        kept = [c for c in state.containers if c.name in targets.plan.kept]
        rest = on_device((*state.computed, *kept), self._device)
        install([*targets.installable(), *rest])
        note.yes(f"{targets.plan.nbytes:,} bytes installed")
        return Served(
            identity,
            targets.plan.layout,
            targets.tensors,
            targets.arena.segments if targets.arena is not None else (),
            marks(self._state()),
        )

    def change(
        self, change: Change, origin: Origin, deadline: Deadline, note: Note
    ) -> Served | None:
        """Apply a change to the installed weights, and publish the truth of what it led to.

        None where the truth is not what this worker has: another has published other bytes, or
        the origin does not take it. Such a worker runs, but gives nothing to others.
        """
        change.apply(self._model)
        state = self._state()
        identity = self._identify(state).digest
        truths = truths_of(state, deadline)
        try:
            published = publish_truth(origin, identity, truths, deadline)
        except (InvalidData, StoreError) as cause:
            note.yes(f"changed, but its truth is not published, and not to be served: {cause}")
            return None
        if not published:
            note.yes("changed, but not to the bytes that were published: not to be served to peers")
            return None
        note.yes(f"changed, and the truth of {len(truths)} tensors published")
        plan = plan_changed(state, {truth.name: truth for truth in truths})
        tensors = tuple(p.containers[0][0].tensor.detach() for p in plan.placements)
        return Served(identity, plan.layout, tensors, (), marks(state))

    def _state(self) -> State:
        return collect(self._model, self._modules)
