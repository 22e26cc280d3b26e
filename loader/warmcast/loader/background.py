"""The part of a progressive load that goes on when the model already has its containers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from warmcast.loader.errors import without_frames
from warmcast.loader.progressive import Gate, Guard
from warmcast.loader.verify import Verified
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidManifest, WarmcastError
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin

log = logging.getLogger("warmcast")

_ORDERS = "orders"
"""The kind of record that holds the order in which a model came to its tensors."""


class Background:
    """Brings the weights of one model over and verifies them, in a thread of its own.

    ``work`` does it, and may be stopped by the event that it is given; ``undo`` takes the
    containers out of the model again if it fails. The owner ends it with :meth:`cancel`.
    """

    def __init__(
        self,
        work: Callable[[threading.Event], Verified],
        gate: Gate,
        guard: Guard,
        undo: Callable[[], None],
        device: torch.device,
    ) -> None:
        self.guard = guard
        self._work: Callable[[threading.Event], Verified] | None = work
        self._gate = gate
        self._undo: Callable[[], None] | None = undo
        self._device = device
        self._stop = threading.Event()
        self._verified: Verified | None = None
        self._thread = threading.Thread(target=self._run, name="warmcast-progressive", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wait(self) -> Verified:
        """Return when all was verified; raises what ended the load before."""
        try:
            self._gate.wait_for_verdict()
        finally:
            if self._gate.over:
                self._thread.join()
        assert self._verified is not None  # noqa: S101  (the gate raises where it is)
        return self._verified

    def cancel(self) -> None:
        """Give the load up if it still goes on, and let go of the model; who waits is told."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.guard.lift()

    def _run(self) -> None:
        assert self._work is not None and self._undo is not None  # noqa: S101
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # this thread's
            self._verified = self._work(self._stop)
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
            self.guard.lift()
        # They know the memory; the model alone holds it from now on.
        self._work = self._undo = None
        self._gate.close()


def known_order(
    origin: Origin, manifest: Manifest, names: Sequence[str], deadline: Deadline
) -> list[int]:
    """The numbers of ``names`` in the order in which a model came to them, as far as is known."""
    try:
        record = origin.record(_ORDERS, manifest.model_key, deadline)
        listed = record["tensors"] if isinstance(record, Mapping) else []
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise InvalidManifest("order", expected="a list of tensors' names", found="another")
    except (WarmcastError, KeyError) as cause:
        log.info("the order of the manifest is taken: %s", cause)
        listed = []
    numbers = {name: number for number, name in enumerate(names)}
    first = list(dict.fromkeys(numbers[name] for name in listed if name in numbers))
    seen = set(first)
    return [*first, *(number for number in range(len(names)) if number not in seen)]


def keep_order(
    origin: Origin,
    manifest: Manifest,
    names: Sequence[str],
    taken: Sequence[int],
    seen: Sequence[int],
    deadline: Deadline,
) -> None:
    """Write down in which order the model came to its tensors, for the next load.

    ``taken`` is the order in which they were read. The first who sees another writes; a worker
    that may not write to the origin leaves it.
    """
    place = {number: position for position, number in enumerate(taken)}
    positions = [place[number] for number in seen]
    if positions == sorted(positions):
        return
    rest = [number for number in taken if number not in set(seen)]
    record = {"tensors": [names[number] for number in (*seen, *rest)]}
    try:
        origin.put_record(_ORDERS, manifest.model_key, record, deadline)
    except WarmcastError as cause:
        log.info("the order of the model's tensors is not written down: %s", cause)
