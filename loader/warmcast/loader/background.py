"""The part of a progressive load that goes on when the model already has its containers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from warmcast.loader import goodbye
from warmcast.loader.errors import without_frames
from warmcast.loader.order import keep_order, known_order
from warmcast.loader.plan import Targets
from warmcast.loader.progressive import Gate, Guard
from warmcast.loader.staging import Staging
from warmcast.loader.stream import BlobSource, stream
from warmcast.loader.verify import Verified, verify
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin
from warmcast.manifests.sampling import layer_of

log = logging.getLogger("warmcast")


class Background:
    """Brings one model's weights from where ``blobs`` opens them, and verifies them, in a thread of
    its own.

    ``targets`` are in the model already; ``undo`` takes them out again if the load fails. The
    owner ends it with :meth:`cancel`.
    """

    def __init__(
        self,
        model: nn.Module,
        roots: Sequence[nn.Module],
        origin: Origin,
        blobs: Callable[[], AbstractContextManager[BlobSource]],
        staging: Staging,
        manifest: Manifest,
        targets: Targets,
        undo: Callable[[], None],
        deadline: Deadline,
    ) -> None:
        self._names = [placement.truth.name for placement in targets.plan.placements]
        self._order = known_order(origin, manifest, self._names, deadline)
        self._gate = Gate([p.truth.nbytes for p in targets.plan.placements], deadline)
        self._guard = Guard(model, roots, targets.sites(), self._gate)
        self._work: Callable[[], Verified] | None = partial(
            self._bring, origin, blobs, staging, manifest, targets, deadline
        )
        self._undo: Callable[[], None] | None = undo
        self._device = targets.tensors[0].device if targets.tensors else torch.device("cpu")
        self._stop = threading.Event()
        self._verified: Verified | None = None
        self._thread = threading.Thread(target=self._run, name="warmcast-progressive", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        goodbye.ended_at_exit(self)

    @property
    def arrived(self) -> int:
        """Bytes of tensors that are there."""
        return self._gate.arrived

    def wait_for_the_first_layer(self) -> str:
        """Return when the weights that come first are there; what they are."""
        if not self._order:
            return "nothing to wait for"
        layer = layer_of(self._names[self._order[0]])
        first = [number for number in self._order if layer_of(self._names[number]) == layer]
        self._gate.wait(first)
        return f"{len(first)} tensors of {layer!r} are there, {len(self._names)} in all will be"

    def wait(self) -> Verified:
        """Return when all was verified; raises what ended the load before."""
        try:
            self._gate.wait_for_verdict()
        finally:
            if self._gate.over:
                self._thread.join()
        assert self._verified is not None  # noqa: S101  (the gate raises where it is)
        return self._verified

    def stop(self) -> None:
        """Have the load given up, if it still goes on; who waits is told."""
        self._stop.set()

    def join(self, deadline: Deadline) -> None:
        """Wait until the load is over, or time is."""
        self._thread.join(deadline.remaining())

    def cancel(self) -> None:
        """Give the load up if it still goes on, and let go of the model; who waits is told."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._guard.lift()

    def _bring(
        self,
        origin: Origin,
        blobs: Callable[[], AbstractContextManager[BlobSource]],
        staging: Staging,
        manifest: Manifest,
        targets: Targets,
        deadline: Deadline,
    ) -> Verified:
        with blobs() as source:
            stream(
                source,
                manifest,
                targets,
                staging,
                deadline,
                order=self._order,
                arrived=self._gate.arrive,
                stop=self._stop,
            )
            verified = verify(targets.pairs(), deadline)
        if self._guard.through:
            seen = self._guard.order
            keep_order(origin, manifest, self._names, self._order, seen, deadline)
        return verified

    def _run(self) -> None:
        assert self._work is not None and self._undo is not None  # noqa: S101
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # this thread's
            self._verified = self._work()
        except Exception as cause:  # noqa: BLE001  (whatever it is, the model must not wait on)
            error = (
                cause
                if isinstance(cause, WarmcastError)
                else WarmcastError(f"{type(cause).__name__}: {cause}")
            )
            log.warning("the load of a running model failed: %s", error)
            self._gate.fail(without_frames(error))
            self._undo()
        else:
            self._guard.lift()
        # They know the memory; the model alone holds it from now on.
        self._work = self._undo = None
        self._gate.close()
