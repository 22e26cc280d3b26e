"""The Loader: what a worker holds from boot to exit."""

from __future__ import annotations

import logging
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from warmcast.loader import cuda_checks, goodbye
from warmcast.loader.address import host_id
from warmcast.loader.change import Change
from warmcast.loader.collector import quiet
from warmcast.loader.containers import collect, marks
from warmcast.loader.environment import DEADLINE, Settings
from warmcast.loader.errors import GroupLost
from warmcast.loader.heartbeat import Heartbeat
from warmcast.loader.load import Loaded, Walk, Wanted, Ways
from warmcast.loader.node.client import NodeClient
from warmcast.loader.quorum import Group, group_from_env, telling
from warmcast.loader.registry import CALL, Lease, Registry
from warmcast.loader.report import LoadReport
from warmcast.loader.routes.peer import PeerRoute
from warmcast.loader.serve import Sender
from warmcast.loader.skeletons import skeleton
from warmcast.loader.staging import HOST_MEMORY, Staging
from warmcast.loader.transports import Endpoint, Transport, import_transports, transports_for
from warmcast.loader.transports.nccl_warm import warming
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError, WarmcastError
from warmcast.manifests.identity import Mesh
from warmcast.manifests.origin import Origin
from warmcast.manifests.trust import Trust

log = logging.getLogger("warmcast")

GRACE = 30.0
"""Seconds after a load for which its lease is kept for the call to :meth:`Loader.serve`."""


class Loader:
    """Gets verified weights from the fastest place that has them, and passes them on.

    One loader serves one process. It owns a connection to the registry, a heartbeat thread while
    something is kept there, and one sender for each model it serves; :meth:`close` ends them all,
    and so do the end of the process and SIGTERM.
    """

    def __init__(
        self,
        origin: str,
        registry: str | None = None,
        *,
        deadline: float = DEADLINE,
        host_memory: int = HOST_MEMORY,
        node: str | os.PathLike[str] | None = None,
        trust: Sequence[str | os.PathLike[str]] = (),
        group: Group | None = None,
    ) -> None:
        """Make a loader of an origin's URL and a registry's (``redis://…``); None: no peers.

        ``deadline`` is the time in seconds that a load may take, unless it is told otherwise;
        ``host_memory`` the bytes of host memory, beyond the model's own, that loads may use, kept
        between them. ``node`` is the socket of the node's agent; None: there is none. ``trust``
        names files of Ed25519 public keys, of which one has to have signed a manifest; empty: any
        manifest will do. ``group`` is the ranks that load together; None: those that torchrun's
        environment names.
        """
        self._origin = Origin.open(origin)
        self._registry = Registry(registry) if registry else None
        if registry:
            import_transports()  # now, when nobody waits for weights yet
        self._node = NodeClient(Path(node)) if node is not None else None
        self._trust = Trust.read([Path(path) for path in trust]) if trust else None
        self._seconds = deadline
        self._group = group
        self._own_group: Group | None = None
        self._heartbeat = Heartbeat()
        self._staging = Staging(host_memory)
        self._leases: dict[str, Lease] = {}
        self._loaded: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()
        self._senders: list[Sender] = []
        self._worker = f"{os.uname().nodename[:200]}-{os.getpid()}-{secrets.token_hex(2)}"
        goodbye.on_exit(self)

    @classmethod
    def from_env(cls) -> Loader:
        """A loader as the environment says; see :mod:`warmcast.loader.environment`."""
        settings = Settings.from_env()
        return cls(
            settings.origin,
            settings.registry,
            deadline=settings.deadline,
            host_memory=settings.host_memory,
            node=settings.node,
            trust=settings.trust,
        )

    @contextmanager
    def skeleton(self) -> Iterator[None]:
        """Build a model without its weights; see :func:`warmcast.loader.skeletons.skeleton`."""
        with skeleton():
            yield

    def load(
        self,
        model: nn.Module,
        ref: str,
        device: str | torch.device = "cpu",
        *,
        modules: Sequence[str] = (),
        mesh: Mesh | None = None,
        change: Change | None = None,
        ignore: Sequence[str] = (),
        keep: Sequence[str] = (),
        arena: bool = True,
        progressive: bool = False,
        deadline: float | None = None,
    ) -> LoadReport:
        """Fill a model with the weights that ``ref`` (``model@name``, or a digest) names.

        All ranks of the group call it together. ``modules`` limits it to submodules (their names
        in the state dict stay whole); ``mesh`` says how the ranks divide the model; ``change`` is
        what the worker makes of the weights before it serves; ``ignore`` and ``keep`` are shell
        patterns of tensors not to load and containers to leave as they are; ``arena=False`` leaves
        allocation to torch, tensor by tensor.

        ``progressive``: where the weights come from the origin, return when the first layer's are
        there, and let the model run while the others come. Each of its tensors waits for its own
        bytes; no output leaves it before all of them were verified, and an error ends it there if
        one was wrong. :meth:`finish` waits for the end.

        Returns what happened, stage by stage. Raises :class:`WarmcastError`; the model is then as
        it was before.
        """
        limit = Deadline.after(self._seconds if deadline is None else deadline)
        self._give_up(model)
        group = self._joined(limit)
        with telling(group, limit):
            wanted = Wanted(
                ref,
                _device(device),
                modules,
                mesh or _flat_mesh(group),
                change,
                ignore,
                keep,
                arena,
                progressive,
            )
            _check(wanted, group)
            transports = transports_for(wanted.device) if self._registry is not None else ()
        taken: list[Lease] = []

        def lead(identity: str, deadline: Deadline) -> Lease | None:
            lease = self._lead(identity, deadline)
            if lease is not None:
                taken.append(lease)
                self._keep(lease, limit)
            return lease

        peers = None
        if self._registry is not None and transports:
            peers = PeerRoute(self._registry, self._endpoint(wanted.device, transports), transports)
        ways = Ways(
            self._origin, self._staging, self._registry, peers, lead, self._node, self._trust
        )
        try:
            with ExitStack() as stack:
                if peers is not None:
                    stack.enter_context(warming(transports, wanted.device))
                stack.enter_context(cuda_checks.compiling(wanted.device))
                stack.enter_context(quiet())
                loaded = Walk(model, wanted, ways, group, limit).run()
        except BaseException as cause:
            self._give_back(taken)
            if isinstance(cause, GroupLost):
                self._part()  # its connections are broken: the next load makes a group anew
            raise
        behind = loaded.background is not None
        for lease in taken:
            self._keep(lease, Deadline.after(GRACE + (limit.remaining() if behind else 0.0)))
        self._loaded[model] = (loaded, wanted, tuple(taken))
        log.info("%s", loaded.report)
        return loaded.report

    def serve(self, model: nn.Module, *, max_receivers: int = 8) -> Sender | None:
        """Be a sender of a loaded model's weights from now on, beside the worker's own work.

        At most ``max_receivers`` are served at a time. Returns None, with nothing served, where
        there is no registry, no transport, or the weights are not what was published.

        Raises :class:`UsageError` if the model was not loaded by this loader, or its weights were
        changed since without a ``change`` that says so.
        """
        self.finish(model)
        loaded, wanted, leases = self._loaded[model]
        transports = transports_for(wanted.device)
        if self._registry is None or loaded.served is None or not transports:
            self._give_back(leases)
            return None
        if marks(collect(model, wanted.modules)) != loaded.served.marks:
            self._give_back(leases)
            raise UsageError(
                "serve",
                expected="the weights as they were when load() returned",
                found="weights that were replaced or written since",
                do="pass what changes them to load() as change=",
            )
        if wanted.device.type == "cuda":
            torch.cuda.synchronize(wanted.device)
        sender = Sender(
            loaded.served,
            wanted.device,
            self._registry,
            self._endpoint(wanted.device, transports),
            transports,
            self._heartbeat,
            max_receivers=max_receivers,
        )
        sender.start(Deadline.after(CALL))
        self._senders.append(sender)
        # Only now: who waits for the lease must find the sender when it is free.
        self._give_back(leases)
        return sender

    def finish(self, model: nn.Module) -> LoadReport:
        """Wait until a model's weights are all there and verified; what its load did.

        Returns at once but for a progressive load. Raises :class:`UsageError` if the model was not
        loaded by this loader, and the error that a progressive load ended with.
        """
        if model not in self._loaded:
            raise UsageError("loader", expected="a model that this loader has loaded")
        loaded, wanted, leases = self._loaded[model]
        if loaded.background is not None:
            loaded.background.wait()
            served = loaded.served
            if served is not None:  # now that all is written
                served = replace(served, marks=marks(collect(model, wanted.modules)))
            loaded = Loaded(replace(loaded.report, verified=True), served)
            self._loaded[model] = (loaded, wanted, leases)
        return loaded.report

    def arrived(self, model: nn.Module) -> int:
        """Bytes of a model's weights that are there; all of them but for a progressive load."""
        if model not in self._loaded:
            raise UsageError("loader", expected="a model that this loader has loaded")
        loaded = self._loaded[model][0]
        return loaded.background.arrived if loaded.background is not None else loaded.report.bytes

    def _give_up(self, model: nn.Module) -> None:
        """End a progressive load that still goes on; the model is to be loaded anew."""
        entry = self._loaded.pop(model, None)
        if entry is not None and entry[0].background is not None:
            entry[0].background.cancel()

    def close(self) -> None:
        """Give up presences and leases, and end the loader's threads and connections."""
        for loaded, *_ in list(self._loaded.values()):
            if loaded.background is not None:
                loaded.background.cancel()
        for sender in self._senders:
            sender.close()
        self._senders.clear()
        self._give_back(list(self._leases.values()))
        self._heartbeat.close()
        self._part()
        if self._registry is not None:
            self._registry.close()
        self._staging.close()
        self._origin.close()

    def leave(self) -> None:
        """Give up leases at once; the process is about to end. Senders take leave themselves."""
        self._give_back(list(self._leases.values()))

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _joined(self, deadline: Deadline) -> Group:
        if self._group is not None:
            return self._group
        if self._own_group is None:
            self._own_group = group_from_env(deadline)
        return self._own_group

    def _part(self) -> None:
        """Give up the group that this loader made; one that it was given is its owner's."""
        if self._own_group is not None:
            self._own_group.close()
            self._own_group = None

    def _endpoint(self, device: torch.device, transports: Sequence[Transport]) -> Endpoint:
        gpu = nccl = ""
        if device.type == "cuda":
            from warmcast.loader.transports import nccl_library

            gpu = str(torch.cuda.get_device_properties(device).uuid)
            nccl = nccl_library.version()
        names = tuple(transport.name for transport in transports)
        return Endpoint(
            worker=self._worker,
            host=host_id(),
            device=device.type,
            gpu=gpu,
            nccl=nccl,
            transports=names,
        )

    def _lead(self, identity: str, deadline: Deadline) -> Lease | None:
        """The lease of an identity: this loader's own, if an earlier load of it was not served."""
        if self._registry is None:
            return None
        return self._leases.get(identity) or self._registry.acquire(identity, deadline)

    def _keep(self, lease: Lease, until: Deadline) -> None:
        """Renew a lease until it is given back, or a time is over."""
        registry = self._registry
        self._leases[lease.identity] = lease

        def beat(deadline: Deadline) -> bool:
            if registry is None:
                return False
            if until.expired:
                registry.release(lease, deadline)
            elif registry.renew(lease, deadline):
                return True
            self._leases.pop(lease.identity, None)
            return False

        self._heartbeat.keep(_beat_of(lease), beat)

    def _give_back(self, leases: Sequence[Lease]) -> None:
        """Let somebody else lead; a lease that was given back before is left alone."""
        for lease in leases:
            if self._leases.get(lease.identity) is not lease or self._registry is None:
                continue
            self._leases.pop(lease.identity, None)  # its last beat may have been faster
            self._heartbeat.drop(_beat_of(lease))
            try:
                self._registry.release(lease, Deadline.after(CALL))
            except WarmcastError as cause:
                log.warning("lease left to expire: %s", cause)


_Entry = tuple[Loaded, Wanted, tuple[Lease, ...]]
"""A load, and the leases that end when it is served."""


def _beat_of(lease: Lease) -> str:
    return f"lease {lease.identity[:12]}"


def _check(wanted: Wanted, group: Group) -> None:
    """Raise :class:`UsageError` for what a group of this size cannot be asked for."""
    change = wanted.change
    if wanted.progressive and (group.size > 1 or change is not None):
        raise UsageError(
            "progressive",
            expected="a model of one rank, served as it was deployed",
            found=f"{group.size} ranks" if change is None else f"the change {change.name!r}",
        )
    if wanted.mesh.size != group.size:
        raise UsageError(
            "mesh", expected=f"{group.size} ranks, as the group has", found=wanted.mesh.size
        )


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError("device", expected="cpu, cuda or cuda:N", found=repr(device)) from None
    if found.type not in ("cpu", "cuda"):
        raise UsageError("device", expected="cpu, cuda or cuda:N", found=str(found))
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("device", expected="a GPU that torch sees", found="none")
        if found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
    return found


def _flat_mesh(group: Group) -> Mesh:
    """The mesh of a group whose ranks split no tensor."""
    return Mesh() if group.size == 1 else Mesh.grid({"rank": group.size})
