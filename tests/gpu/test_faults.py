"""Faults between GPUs, at every moment of a transfer, by each transport.

Sides are killed, stopped or cut off from the registry, and the registry is lost for all. Whatever
happens, a load ends in time with the weights that were deployed, from the peer or from the origin;
whoever is left loads again in the same process, and holds nothing that it did not hold before. An
opened mapping outlives the process that gave it, so a transfer by ``ipc`` may well be completed
although its sender is gone: what counts is that every byte is right.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.loader.faults.proxy import Proxy
from tests.loader.faults.scene import Scene, Worker
from tests.loader.faults.worker import Outcome, Survey

GIVEN = 8.0
"""Seconds that a load may take, of which peers may take half."""

PATIENT = 30.0

TRANSPORTS = [
    pytest.param("ipc", marks=pytest.mark.gpu(1)),
    pytest.param("nccl", marks=pytest.mark.gpu(2)),
]
SENDING = ("asked", "answered", "confirmed", "creating", "sending")
RECEIVING = ("found", "agreed", "begun", "creating", "receiving", "verifying")
FAULTS = ("kill", "stop", "partition")

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


class Stage:
    """Two workers, each on its GPU where the transport needs two, each behind a proxy."""

    def __init__(self, scene: Scene, transport: str) -> None:
        self.scene = scene
        self.transport = transport
        self._proxies: dict[int, Proxy] = {}

    def worker(self, place: int) -> Worker:
        """A worker that has used its GPU and its transport before."""
        device = f"cuda:{place if self.transport == 'nccl' else 0}"
        proxy = Proxy(self.scene.registry.port)
        proxy.__enter__()
        env = {"TEST_DEVICE": device, "WARMCAST_TRANSPORTS": self.transport}
        worker = self.scene.worker(registry=proxy.url, env=env)
        self._proxies[worker.pid] = proxy
        return worker

    def harm(self, worker: Worker, fault: str) -> None:
        {"kill": worker.kill, "stop": worker.stop, "partition": self._proxies[worker.pid].cut}[
            fault
        ]()

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.__exit__()


@pytest.fixture
def stage(scene: Scene, transport: str) -> Iterator[Stage]:
    stage = Stage(scene, transport)
    yield stage
    stage.close()


def serving(stage: Stage) -> tuple[Worker, Survey]:
    """A sender, and what it held when it had been one before."""
    sender = stage.worker(0).serve()
    right(stage, stage.worker(1).load(PATIENT), "peer")
    sender.ask("served")
    before = at_rest(sender)
    return sender.serve(), before


def warmed(stage: Stage, sender: Worker) -> tuple[Worker, Survey]:
    """A receiver that has received before, and what it holds then."""
    receiver = stage.worker(1)
    right(stage, receiver.load(PATIENT), "peer")
    return receiver, at_rest(receiver)


def at_rest(worker: Worker) -> Survey:
    """What a worker holds that is closed, when what ends by itself has ended."""
    worker.ask("close")
    for _ in range(200):
        now = worker.survey()
        if now.threads == ("MainThread",):
            return now
        time.sleep(0.05)
    raise AssertionError(now.threads)


def right(stage: Stage, outcome: Outcome, *routes: str) -> None:
    assert (outcome.error, outcome.weights) == ("", stage.scene.weights), outcome.tree
    assert outcome.route in (routes or ("peer", "origin")), outcome.tree


def nothing_left(worker: Worker, before: Survey, kept: int = 0) -> None:
    """What a worker holds is what it held, or soon is: CUDA's and NCCL's threads end by themselves,
    and nothing tells when; those who wait for a process that is stopped do so for 5 s. ``kept``:
    files that NCCL keeps, see :func:`kept_by_nccl`.
    """
    for _ in range(400):
        now = worker.survey()
        gone = len(now.files) <= len(before.files) + kept and now.tasks <= before.tasks
        memory = now.gpu <= before.gpu and now.opened == before.opened
        if gone and memory and now.threads == before.threads == ("MainThread",):
            return
        time.sleep(0.05)
    more = {name: now.sockets.get(name, "") for name in set(now.files) - set(before.files)}
    memory = (before.gpu, now.gpu, before.opened, now.opened)
    raise AssertionError((before.threads, now.threads, before.tasks, now.tasks, more, memory))


def kept_by_nccl(stage: Stage, moment: str) -> int:
    """Files that NCCL (2.28) never closes of a communicator whose ranks had not met."""
    return 3 if stage.transport == "nccl" and moment == "creating" else 0


def loads_again(stage: Stage, worker: Worker, before: Survey, kept: int = 0) -> None:
    right(stage, worker.load(PATIENT))
    worker.ask("close")
    nothing_left(worker, before, kept)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("moment", SENDING)
def test_sender(stage: Stage, moment: str, fault: str) -> None:
    sender = stage.worker(0).serve()
    receiver, before = warmed(stage, sender)
    sender.halt_at(moment)
    receiver.begin(GIVEN)
    sender.halted(moment)
    stage.harm(sender, fault)
    if fault == "partition":
        sender.go_on()
    right(stage, receiver.end())
    loads_again(stage, receiver, before, kept_by_nccl(stage, moment))
    if fault == "stop":
        sender.signal(signal.SIGCONT)
        sender.go_on()
    if fault != "kill":
        assert sender.ask("weights") == stage.scene.weights


@pytest.mark.parametrize("fault", FAULTS)
def test_sender_while_its_receiver_verifies(stage: Stage, fault: str) -> None:
    sender = stage.worker(0).serve()
    receiver, before = warmed(stage, sender)
    receiver.halt_at("verifying")
    receiver.begin(GIVEN)
    receiver.halted("verifying")
    stage.harm(sender, fault)
    receiver.go_on()
    right(stage, receiver.end(), "peer")
    loads_again(stage, receiver, before)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("moment", RECEIVING)
def test_receiver(stage: Stage, moment: str, fault: str) -> None:
    sender, before = serving(stage)
    receiver, held = warmed(stage, sender)
    receiver.halt_at(moment)
    receiver.begin(GIVEN)
    receiver.halted(moment)
    stage.harm(receiver, fault)
    assert sender.ask("weights") == stage.scene.weights
    if fault == "partition":
        receiver.go_on()
        right(stage, receiver.end())
        loads_again(stage, receiver, held, kept_by_nccl(stage, moment))
    # The sender serves the next one, who comes to the lost one's GPU.
    right(stage, stage.worker(1).load(PATIENT), "peer")
    sender.ask("served", within=PATIENT)
    sender.ask("close")
    nothing_left(sender, before)


@pytest.mark.parametrize("fault", ["stop", "pause"])
@pytest.mark.parametrize("moment", RECEIVING)
def test_registry(stage: Stage, moment: str, fault: str) -> None:
    sender = stage.worker(0).serve()
    receiver, before = warmed(stage, sender)
    receiver.halt_at(moment)
    receiver.begin(GIVEN)
    receiver.halted(moment)
    getattr(stage.scene.registry, fault)()
    receiver.go_on()
    right(stage, receiver.end())
    loads_again(stage, receiver, before, kept_by_nccl(stage, moment))
    assert sender.ask("weights") == stage.scene.weights


@pytest.mark.parametrize("fault", ["stop", "pause"])
@pytest.mark.parametrize("moment", SENDING)
def test_registry_lost_to_a_sender(stage: Stage, moment: str, fault: str) -> None:
    sender, before = serving(stage)
    receiver, held = warmed(stage, sender)
    sender.halt_at(moment)
    receiver.begin(GIVEN)
    sender.halted(moment)
    getattr(stage.scene.registry, fault)()
    sender.go_on()
    right(stage, receiver.end())
    loads_again(stage, receiver, held, kept_by_nccl(stage, moment))
    assert sender.ask("weights") == stage.scene.weights
    sender.ask("served", within=PATIENT)
    sender.ask("close", within=PATIENT)
    nothing_left(sender, before)


CHAIN = {"kill": Worker.kill, "stop": Worker.stop}


@pytest.mark.parametrize("fault", CHAIN)
def test_one_of_several(stage: Stage, transport: str, fault: str) -> None:
    """Receivers that come while another is served: the one that fails drops out."""
    sender = stage.worker(0).serve()
    first, *others = (stage.worker(1) for _ in range(3 if transport == "ipc" else 1))
    first.halt_at("receiving")
    first.begin(GIVEN)
    first.halted("receiving")
    for other in others:
        other.begin(PATIENT)
    harm: Callable[[Worker], None] = CHAIN[fault]
    harm(first)
    for other in others:
        right(stage, other.end(), "peer")
    assert sender.ask("weights") == stage.scene.weights


def test_memory_that_cannot_be_given(
    stage: Stage,
    scene: Scene,
    transport: str,
    tmp_path: Path,
) -> None:
    """The sender says so, and another way is taken: NCCL on two GPUs, the origin on one."""
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    both = {"WARMCAST_TRANSPORTS": "ipc" if transport == "ipc" else "ipc,nccl"}
    where = {"TEST_DEVICE": "cuda:0"}
    scene.worker(env={**both, **where, **allocator}, fresh=True).serve()
    there = {"TEST_DEVICE": "cuda:1"} if transport == "nccl" else where
    outcome = scene.worker(env={**both, **there}).load(PATIENT)
    right(stage, outcome, "origin" if transport == "ipc" else "peer")
    assert "allocator that does not let it be exported" in outcome.tree


def test_a_sender_that_is_not_reached(stage: Stage, scene: Scene, transport: str) -> None:
    """Its socket is in another network namespace, say: another transport, or the origin."""
    both = {"WARMCAST_TRANSPORTS": "ipc" if transport == "ipc" else "ipc,nccl"}
    scene.worker(env={**both, "TEST_DEVICE": "cuda:0"}).serve()
    there = "cuda:1" if transport == "nccl" else "cuda:0"
    receiver = scene.worker(env={**both, "TEST_DEVICE": there})
    receiver.ask("refuse")
    outcome = receiver.load(PATIENT)
    right(stage, outcome, "origin" if transport == "ipc" else "peer")
    assert "the sender's socket in this network namespace" in outcome.tree
    before = at_rest(receiver)
    right(stage, receiver.load(PATIENT), "peer")
    receiver.ask("close")
    nothing_left(receiver, before)


def test_expandable_segments(stage: Stage, scene: Scene, transport: str) -> None:
    env = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "WARMCAST_TRANSPORTS": transport,
    }
    sender = scene.worker(env={**env, "TEST_DEVICE": "cuda:0"}).serve()
    device = "cuda:1" if transport == "nccl" else "cuda:0"
    receiver = scene.worker(env={**env, "TEST_DEVICE": device})
    right(stage, receiver.load(PATIENT), "peer")
    before = at_rest(receiver)
    right(stage, receiver.load(PATIENT), "peer")
    receiver.ask("close")
    nothing_left(receiver, before)
    assert sender.ask("served") == 2
