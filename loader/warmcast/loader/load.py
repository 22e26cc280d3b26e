"""The decision tree of a booting worker, and nothing else.

    1. the ref resolves to a manifest whose digest holds
    2. the containers match the manifest for this rank, exactly
    3. peer: a sender is registered -> handshake -> transfer -> verify
    4. nobody has it, but somebody is loading it (a lease) -> wait, bounded, and become a receiver
    5. storage: the node's agent, the origin -> stream to the device, verify
    6. the weights go into the model; a change is applied, and its truth published

Every branch is a vote of the group, so all ranks walk one path. The model is touched only in 6,
when everything is right: a load that fails leaves it as it was, and leaves no memory behind.

Weights that are changed before they serve (see :mod:`change`) come from peers as they are after
the change. A skeleton that was itself changed before the load can take nothing else: where no peer
has them there is no honest way left, and :class:`RestartRequired` says so.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from warmcast.loader.background import Background
from warmcast.loader.change import Change, published_truth, shadow
from warmcast.loader.containers import State, collect
from warmcast.loader.errors import (
    PartyBroken,
    PeerBusy,
    PeerError,
    PeerSilent,
    RestartRequired,
    SkeletonMismatch,
    TransferFailed,
    TransportUnusable,
    WeightVerificationError,
)
from warmcast.loader.filling import Filled, Filling
from warmcast.loader.node.client import NodeClient
from warmcast.loader.plan import Plan, Targets, make_plan, plan_changed
from warmcast.loader.quorum import Group
from warmcast.loader.ready import Installation, Served
from warmcast.loader.registry import BEAT, EXPIRY, Lease, Registry
from warmcast.loader.report import LoadReport, Note
from warmcast.loader.routes import Job, Source
from warmcast.loader.routes.node import resolve
from warmcast.loader.routes.peer import NoSender, PeerRoute
from warmcast.loader.stages import Stages
from warmcast.loader.staging import Staging
from warmcast.loader.storage import Storage
from warmcast.loader.verify import Verified
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError
from warmcast.manifests.identity import Identity, Mesh
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin
from warmcast.manifests.trust import Trust

PEER_SHARE = 0.5
"""The part of the time left that finding, waiting for and receiving from peers may take."""

ATTEMPTS = 3
"""Transfers from peers that may fail before the origin is taken."""

_AGAIN, _ORIGIN = "again", "origin"

_ANOTHER = (
    NoSender,
    PartyBroken,
    PeerSilent,
    TransferFailed,
    TransportUnusable,
    WeightVerificationError,
)
"""Problems after which a sender, if there is one that has not failed, is asked at once."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caller asked for."""

    ref: str
    device: torch.device
    modules: Sequence[str]
    mesh: Mesh
    change: Change | None
    ignore: Sequence[str]
    keep: Sequence[str]
    arena: bool
    progressive: bool = False


@dataclass(frozen=True, slots=True)
class Ways:
    """Whom a worker can ask: the origin always, peers where there is a registry and a transport,
    the node's agent where it was named. With ``trust``, a manifest has to be signed.

    ``lead`` takes the lease of an identity, under which the origin is read, or says None if
    somebody else has it; its owner keeps it until this worker serves, and gives it back if the load
    fails.
    """

    origin: Origin
    staging: Staging
    registry: Registry | None
    peers: PeerRoute | None
    lead: Callable[[str, Deadline], Lease | None]
    node: NodeClient | None = None
    trust: Trust | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A finished load, and what this worker can serve from now on.

    ``served`` is None where the bytes after a change are not those that were published as the
    truth: such a worker runs, but gives nothing to others. ``background`` is where the rest of a
    progressive load goes on.
    """

    report: LoadReport
    served: Served | None
    background: Background | None = None


@dataclass(frozen=True, slots=True)
class _Goal:
    """What peers are asked for. ``plan`` is None for weights after a change: it follows from the
    published truth, which may appear while this worker waits.
    """

    identity: Identity
    state: State
    plan: Plan | None


class Walk:
    """One load of one model, walking the tree."""

    def __init__(
        self, model: nn.Module, wanted: Wanted, ways: Ways, group: Group, deadline: Deadline
    ) -> None:
        self._model = model
        self._wanted = wanted
        self._ways = ways
        self._stages = Stages(group, deadline)
        self._group = group
        self._deadline = deadline
        self._filling = Filling(self._stages, wanted.device, deadline, arena=wanted.arena)
        self._storage = Storage(
            ways.origin, ways.node, ways.staging, self._stages, self._filling, group, deadline
        )
        self._installation: Installation | None = None
        self._background: Background | None = None
        self._unprepared = False

    def run(self) -> Loaded:
        """Walk the tree to its end. An error leaves with the journal as its note."""
        try:
            return self._run()
        except BaseException as cause:
            if self._background is not None:
                self._background.cancel()
            if self._installation is not None:
                self._installation.undo()
            self._filling.free()
            _forget(cause)
            cause.add_note("\n".join(["the load went so:", *self._stages.journal.lines()]))
            raise

    def _run(self) -> Loaded:
        manifest = self._resolve()
        state, plan = self._stages.together("skeleton", partial(self._match, manifest))
        goal = self._stages.together("identity", partial(self._goal, manifest, state, plan))
        filled = self._from_peers(manifest, goal) if goal is not None else None
        if filled is None and self._wanted.progressive and plan is not None:
            return self._progressively(manifest, state, plan)
        if filled is None:
            filled = self._from_storage(manifest, state, plan)
        finish = partial(self._finish, manifest, state, filled.targets)
        served = self._stages.together("ready", finish)
        # It knows this walk, and holds what stood in the model before: neither has to wait for the
        # garbage collector, which counts objects and not their bytes.
        self._installation = None
        source, plan = filled.source, filled.targets.plan
        report = self._report(
            manifest, plan, filled.route, source.transport, source.name, filled.verified
        )
        return Loaded(report, served)

    def _into_the_model(self, manifest: Manifest, state: State, targets: Targets) -> Installation:
        self._installation = Installation(
            self._model,
            state,
            targets,
            modules=tuple(self._wanted.modules),
            device=self._wanted.device,
            identify=partial(self._identity, manifest),
        )
        return self._installation

    # From storage, beside a model that already runs

    def _progressively(self, manifest: Manifest, state: State, plan: Plan) -> Loaded:
        """Give the model its containers, and return when the first layer's weights are there."""
        targets = self._filling.allocate(plan)

        def install(note: Note) -> tuple[Served, Callable[[], None]]:
            installation = self._into_the_model(manifest, state, targets)
            return installation.install(None, note), installation.undo

        served, undo = self._stages.together("ready", install)
        route, source, blobs = self._storage.open(manifest, plan)
        self._background = background = Background(
            self._model,
            [self._model.get_submodule(name) for name in self._wanted.modules],
            self._ways.origin,
            blobs,
            self._ways.staging,
            manifest,
            targets,
            undo,
            self._deadline,
        )
        background.start()
        self._stages.together("read", lambda note: note.yes(background.wait_for_the_first_layer()))
        self._installation = self._background = None
        self._filling.let_go()
        coming = Verified(len(plan.placements), plan.nbytes, 0)
        report = self._report(manifest, plan, route, None, source, coming)
        return Loaded(replace(report, verified=False), served, background)

    # 1 and 2: what is wanted, and into what

    def _resolve(self) -> Manifest:
        """The manifest, one for all ranks: a ref may move between two ranks' looks at it."""
        origin, ref = self._ways.origin, self._wanted.ref
        manifest = self._stages.together(
            "ref",
            partial(
                _noted,
                lambda: resolve(origin, self._ways.node, ref, self._deadline, self._ways.trust),
            ),
        )
        digest = self._stages.first(manifest.digest)
        if self._group.size == 1:
            return manifest
        return self._stages.together(
            "manifest", partial(_noted, lambda: origin.manifest(digest, self._deadline))
        )

    def _match(self, manifest: Manifest, note: Note) -> tuple[State, Plan | None]:
        """The model's containers, and the plan by which the origin's files fit them; None for a
        skeleton that was changed before.
        """
        wanted = self._wanted
        state = collect(self._model, wanted.modules)
        try:
            plan = make_plan(
                state,
                manifest,
                mesh=wanted.mesh,
                rank=self._group.rank,
                modules=wanted.modules,
                ignore=wanted.ignore,
                keep=wanted.keep,
            )
        except SkeletonMismatch as cause:
            if wanted.change is None:
                raise
            note.yes(f"taken as changed by {wanted.change.name} already: {cause}")
            return state, None
        parts = [f"{len(plan.placements)} tensors, {plan.nbytes:,} bytes"]
        parts += [f"kept {_few(plan.kept)}"] if plan.kept else []
        parts += [f"not loaded {_few(plan.skipped)}"] if plan.skipped else []
        note.yes("; ".join(parts))
        return state, plan

    def _goal(
        self, manifest: Manifest, state: State, plan: Plan | None, note: Note
    ) -> _Goal | None:
        """What peers would have to have; None where that is not known before it is there."""
        change = self._wanted.change
        if change is not None and plan is not None:
            if change.prepare is None:
                note.yes(f"known only after {change.name}, which cannot prepare a skeleton")
                return None
            self._unprepared = True
            prepared = shadow(self._model)
            change.prepare(prepared)
            state = collect(prepared, self._wanted.modules)
        identity = self._identity(manifest, state)
        note.yes(identity.digest[:12])
        return _Goal(identity, state, plan if change is None else None)

    def _identity(self, manifest: Manifest, state: State) -> Identity:
        change = self._wanted.change
        return Identity(
            model_key=manifest.model_key,
            mesh_key=self._wanted.mesh.key,
            state_key=state.key,
            rank=self._group.rank,
            environment_key=change.key(self._wanted.device) if change else None,
        )

    # 3 and 4: from a peer, or from one that is about to be one

    def _from_peers(self, manifest: Manifest, goal: _Goal) -> Filled | None:
        """Weights from peers, for all ranks or for none; None if the origin is to be taken."""
        able = self._stages.attempt("registry", partial(self._registered, goal))
        if able.error is not None or able.value is None:
            return None
        registry, peers = able.value
        limit = self._deadline.share(PEER_SHARE)
        failures = 0
        while True:
            with ExitStack() as stack:
                meet = partial(self._meet, manifest, goal, peers, stack, limit)
                met = self._stages.attempt("peer", meet)
                problem = met.problem
                if met.error is None and met.value is not None:
                    plan, source = met.value
                    filled = self._filling.fill("peer", plan, source, limit)
                    if isinstance(filled, Filled):
                        return filled
                    problem = filled.problem
                    if problem is not None:
                        peers.blame(source, problem)
                failures += met.value is not None
                step = ""
                if self._group.rank == 0:
                    step = self._next(registry, peers, goal, problem, failures, stack, limit)
            if self._stages.first(step) == _ORIGIN:
                return None

    def _registered(self, goal: _Goal, note: Note) -> tuple[Registry, PeerRoute]:
        registry, peers = self._ways.registry, self._ways.peers
        if registry is None or peers is None:
            missing = "registry" if registry is None else "transport for this device"
            raise NoSender(f"no {missing}")
        count = len(registry.senders(goal.identity.digest, self._deadline))
        note.yes(f"{count} senders of {goal.identity.digest[:12]}")
        return registry, peers

    def _meet(
        self,
        manifest: Manifest,
        goal: _Goal,
        peers: PeerRoute,
        stack: ExitStack,
        limit: Deadline,
        note: Note,
    ) -> tuple[Plan, Source]:
        """A plan, and a sender that is ready to fill it."""
        plan = goal.plan
        if plan is None:
            served = peers.known(goal.identity.digest, limit)
            truths = published_truth(self._ways.origin, goal.identity.digest, self._deadline)
            if truths is None and served:  # it was there, for a sender publishes first
                raise PeerError("senders, but no published truth to hold them to")
            if truths is None:
                raise NoSender("nobody has published the weights after the change")
            plan = plan_changed(goal.state, truths)
        source = peers.find(self._job(manifest, plan, goal.identity), limit)
        stack.callback(source.abandon)
        why = f" ({source.reason})" if source.reason else ""
        note.yes(f"{source.name} answers, over {source.transport}{why}")
        return plan, source

    def _next(
        self,
        registry: Registry,
        peers: PeerRoute,
        goal: _Goal,
        problem: Exception | None,
        failures: int,
        stack: ExitStack,
        limit: Deadline,
    ) -> str:
        """What all ranks do after a peer was not found, or failed them; rank 0 decides."""
        identity = goal.identity.digest
        with self._stages.journal.stage("next") as note:
            if failures >= ATTEMPTS or limit.expired:
                note.yes(f"origin: {failures} tries with peers failed, or no time is left for more")
                return _ORIGIN
            try:
                # The watch begins before the last look, so that no news falls between the two.
                watch = stack.enter_context(registry.watch(identity, limit))
                if isinstance(problem, _ANOTHER) and peers.known(identity, limit):
                    note.yes("again: there is another sender")
                    return _AGAIN
                if problem is None:
                    # This rank had a sender and another had not: its own may need a moment.
                    news = watch.wait(limit.within(BEAT))
                elif isinstance(problem, PeerBusy):
                    # Busy senders have the weights: there is nothing to lead, only to wait for.
                    news = watch.wait(limit.within(EXPIRY))
                else:
                    lease = self._ways.lead(identity, limit)
                    if lease is not None:
                        note.yes(f"origin: nobody else is loading it (lease {lease.fence})")
                        return _ORIGIN
                    news = watch.wait(limit.within(EXPIRY))
                note.yes(f"again: {news or 'no news, but somebody may have gone'}")
                return _AGAIN
            except WarmcastError as cause:
                note.yes(f"origin: {cause}")
                return _ORIGIN

    # 5: from storage

    def _from_storage(self, manifest: Manifest, state: State, plan: Plan | None) -> Filled:
        if plan is None:
            change = self._wanted.change
            raise RestartRequired(
                f"{self._wanted.ref}: no peer gave the weights after "
                f"{change.name if change else 'the change'}, and a checkpoint does not fit "
                "containers that were changed before",
                do="restart with an unchanged skeleton",
            )
        return self._storage.read(self._job(manifest, plan, self._identity(manifest, state)))

    def _job(self, manifest: Manifest, plan: Plan, identity: Identity) -> Job:
        wanted = self._wanted
        return Job(manifest, plan, identity, wanted.device, wanted.arena, wanted.ref)

    # 6: into the model

    def _finish(
        self, manifest: Manifest, state: State, targets: Targets, note: Note
    ) -> Served | None:
        installation = self._into_the_model(manifest, state, targets)
        change = self._wanted.change
        received = installation.received_changed
        prepare = change.prepare if change is not None and self._unprepared and received else None
        served = installation.install(prepare, note)
        if change is None or received:
            return served
        return installation.change(change, self._ways.origin, self._deadline, note)

    def _report(
        self,
        manifest: Manifest,
        plan: Plan,
        route: str,
        transport: str | None,
        source: str,
        verified: Verified,
    ) -> LoadReport:
        return LoadReport(
            ref=self._wanted.ref,
            manifest=manifest.digest,
            rank=self._group.rank,
            route=route,
            transport=transport,
            source=source,
            tensors=verified.tensors,
            bytes=verified.nbytes,
            seconds=self._stages.journal.seconds,
            verified=True,
            kept=plan.kept,
            skipped=plan.skipped,
            stages=tuple(self._stages.journal.stages),
        )


def _forget(cause: BaseException | None) -> None:
    """Let go of what the frames of an error hold: views of the memory that was to be filled."""
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def _noted(read: Callable[[], Manifest], note: Note) -> Manifest:
    manifest = read()
    note.yes(f"{manifest.digest[:12]}, {len(manifest.files)} files, {manifest.nbytes:,} bytes")
    return manifest


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
