"""Broadcasts and their faults: the protocol over a real registry, ranks as threads.

The communicator is one of this file's: its ranks meet in memory, and like NCCL's they wait for each
other until they abort. NCCL's own is tested on GPUs (``tests/gpu/test_nccl.py``).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from warmcast.loader.errors import PartyBroken, TransferFailed
from warmcast.loader.registry import Registry
from warmcast.loader.transports import Transfer, nccl, nccl_party, nccl_receive, nccl_send
from warmcast.loader.transports.nccl_broadcast import Payload
from warmcast.loader.transports.nccl_messages import Ticket
from warmcast.loader.transports.nccl_receive import Receiver
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, UsageError

CPU = torch.device("cpu")


def assert_(holds: bool) -> None:
    assert holds


@dataclass
class Room:
    """A communicator, as all its ranks see it."""

    size: int = 0
    here: set[int] = field(default_factory=set)
    moving: set[int] = field(default_factory=set)
    regions: list[torch.Tensor] = field(default_factory=list)


class Machine:
    """Where ranks meet; ``moments`` are what a test does when a thread joins or moves bytes."""

    def __init__(self) -> None:
        self.rooms: dict[bytes, Room] = {}
        self.released: list[bytes] = []
        self.moments: dict[str, Callable[[], None]] = {}
        self.ctas: list[int | None] = []
        self.packed: list[bool] = []
        self.sizes: list[int] = []

    def at(self, moment: str) -> None:
        happen = self.moments.pop(f"{threading.current_thread().name} {moment}", None)
        if happen is not None:
            happen()

    def unique_id(self) -> bytes:
        unique = secrets.token_bytes(128)
        self.rooms[unique] = Room()
        return unique

    def communicator(self, _device: torch.device, check: Callable[[str], None]) -> Comm:
        return Comm(self, check)


class Comm:
    def __init__(self, machine: Machine, check: Callable[[str], None]) -> None:
        self._machine = machine
        self._check = check
        self.connected = False
        self.room: Room | None = None

    def create(self, unique: bytes, rank: int, size: int, max_ctas: int | None) -> None:
        self._machine.at("joins")
        self.room = self._machine.rooms[unique]
        self.rank = rank
        self.size = size
        self.room.here.add(rank)
        if rank == 0:
            self._machine.sizes.append(size)
            self._machine.ctas.append(max_ctas)

    def connect(self) -> None:
        self._until(lambda: len(self.room.here) == self.size, "creating")
        self.connected = True

    def move(self, payload: Payload, *, sending: bool, packed: bool) -> tuple[float, float]:
        self._machine.at("moves")
        if sending:
            self.room.regions = list(payload._regions)
            self._machine.packed.append(packed)
        self.room.moving.add(self.rank)
        self._until(lambda: len(self.room.moving) == self.size, "moving")
        for mine, theirs in zip(payload._regions, self.room.regions, strict=True):
            mine.copy_(theirs)
        return 1.0, 2.0

    def abort(self, _held: object) -> bool:
        if self.room is not None:
            self.room.moving.discard(self.rank)
        return True

    def close(self) -> None:
        assert self.connected

    def _until(self, done: Callable[[], bool], doing: str) -> None:
        while not done():
            self._check(doing)
            time.sleep(0.001)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    # Who was answered is waited for, however slow this machine is.
    monkeypatch.setattr(nccl_party, "COMING", 20.0)
    monkeypatch.setattr(nccl_send, "Communicator", machine.communicator)
    monkeypatch.setattr(nccl_receive, "Communicator", machine.communicator)
    monkeypatch.setattr(nccl_send.nccl, "unique_id", machine.unique_id)
    monkeypatch.setattr(nccl_send.nccl, "release", machine.released.append)
    monkeypatch.setattr(Payload, "move", lambda self, comm, **how: comm.move(self, **how))
    return machine


@pytest.fixture
def registry(valkey_url: str) -> Iterator[Registry]:
    registry = Registry(valkey_url)
    yield registry
    registry.close()


class Peers:
    """A sender, and receivers in threads that are named for their GPU."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.transport = nccl.Nccl()
        generator = torch.Generator().manual_seed(3)
        self.source = [
            torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8)
            for n in (7, 100_000, *[50] * 40)
        ]
        self.dead: set[str] = set()
        self.seconds: dict[str, float] = {}
        self.sent: dict[str, Future[None]] = {}
        self.got: dict[str, list[torch.Tensor]] = {}
        self._pool = ThreadPoolExecutor(16)

    def start(
        self,
        *gpus: str,
        staging: bool = True,
        max_ctas: int | None = None,
    ) -> list[Future[Any]]:
        """Receivers that are answered together, and then confirm."""
        answered = threading.Barrier(len(gpus))
        futures = []
        for gpu in gpus:
            request = secrets.token_hex(16)
            ticket = Ticket(gpu=gpu, staging=staging, max_ctas=max_ctas).model_dump_json()
            self.sent[gpu] = self._pool.submit(self._send, request, gpu, ticket, answered)
            futures.append(self._pool.submit(self._receive, request, gpu))
        return futures

    def transfer(
        self, request: str, regions: list[torch.Tensor], seconds: float, of: str
    ) -> Transfer:
        def alive() -> None:
            if of in self.dead:
                raise TransferFailed("peer", expected="signs of life", found="none")

        return Transfer(request, regions, CPU, self.registry, "", Deadline.after(seconds), alive)

    def _send(self, request: str, gpu: str, ticket: str, answered: threading.Barrier) -> None:
        threading.current_thread().name = f"to {gpu}"
        with self.transport.sending(self.transfer(request, self.source, 30, gpu)) as sending:
            answered.wait(10)
            sending.run(ticket)

    def _receive(self, request: str, gpu: str) -> tuple[float, float]:
        threading.current_thread().name = gpu
        self.got[gpu] = [torch.zeros_like(region) for region in self.source]
        seconds = self.seconds.get(gpu, 30.0)
        transfer = self.transfer(request, self.got[gpu], seconds, f"sender of {gpu}")
        return Receiver(transfer, Payload(self.got[gpu], CPU)).run()

    def check(self, *gpus: str) -> None:
        """These have every byte, and the sender knows it."""
        for gpu in gpus:
            self.sent[gpu].result(20)
            assert all(map(torch.equal, self.got[gpu], self.source)), gpu


@pytest.fixture
def peers(machine: Machine, registry: Registry) -> Peers:
    return Peers(registry)


def test_three_by_one_broadcast(machine: Machine, peers: Peers) -> None:
    for future in peers.start("A", "B", "C"):
        assert future.result(20) == (1.0, 2.0)
    peers.check("A", "B", "C")
    assert (machine.sizes, machine.packed, machine.ctas) == ([4], [True], [None])
    assert not machine.released


def test_one_after_the_other(machine: Machine, peers: Peers) -> None:
    for gpu in "AB":
        peers.start(gpu)[0].result(20)
        peers.check(gpu)
    assert machine.sizes == [2, 2]


def test_without_staging_nothing_is_packed(machine: Machine, peers: Peers) -> None:
    peers.start("A", staging=False)[0].result(20)
    assert machine.packed == [False]


def test_no_room_for_staging(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **how: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", full)
    payload = Payload(peers.source, CPU)
    assert not payload.can_pack
    payload.prepare()
    assert payload.memory == peers.source


def test_the_least_bound_of_ctas_holds_for_all(
    machine: Machine, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMCAST_NCCL_MAX_CTAS", "16")
    peers = Peers(registry)
    peers.start("A")[0].result(20)
    peers.start("B", max_ctas=4)[0].result(20)
    peers.start("C", max_ctas=32)[0].result(20)
    assert machine.ctas == [16, 4, 16]


@pytest.mark.parametrize("text", ["0", "65", "-1", "8.0", "many", "²", " 8"])
def test_a_wrong_bound_of_ctas(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMCAST_NCCL_MAX_CTAS", text)
    with pytest.raises(UsageError, match="WARMCAST_NCCL_MAX_CTAS: expected an integer from 1 to"):
        nccl.Nccl()


def test_a_receiver_that_dies_in_the_middle(machine: Machine, peers: Peers) -> None:
    stuck = threading.Event()

    def die() -> None:
        peers.dead.add("B")
        stuck.wait(20)
        raise SystemExit

    machine.moments["B moves"] = die
    a, b, c = peers.start("A", "B", "C")
    assert a.result(20) == c.result(20) == (1.0, 2.0)
    peers.check("A", "C")
    with pytest.raises(TransferFailed, match="signs of life"):
        peers.sent["B"].result(20)
    assert machine.sizes == [4, 3]
    stuck.set()
    assert isinstance(b.exception(20), SystemExit)


def test_a_receiver_that_dies_before_the_communicator_is_made(
    machine: Machine, peers: Peers
) -> None:
    peers.dead.add("sender of B")  # the receiver gives up, and says so to nobody
    futures = peers.start("A", "B")
    peers.dead.add("B")
    assert futures[0].result(20) == (1.0, 2.0)
    assert isinstance(futures[1].exception(20), TransferFailed)
    peers.check("A")


def test_a_receiver_that_does_not_join(
    machine: Machine, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_send, "_JOIN", 0.5)
    stuck = threading.Event()
    machine.moments["B joins"] = lambda: assert_(stuck.wait(20))
    a, b = peers.start("A", "B")
    assert a.result(20) == (1.0, 2.0)
    peers.check("A")
    # The sender began nothing for the party that B was to be in.
    assert machine.sizes == [2]
    assert len(machine.released) == 1
    stuck.set()
    with pytest.raises(TransferFailed, match="to join in time"):
        b.result(20)


def test_a_receiver_that_gives_up_says_so(machine: Machine, peers: Peers) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: something of this GPU's")

    machine.moments["B moves"] = fail
    a, b, c = peers.start("A", "B", "C")
    with pytest.raises(TransferFailed, match="something of this GPU's"):
        b.result(20)
    with pytest.raises(TransferFailed, match="something of this GPU's"):
        peers.sent["B"].result(20)
    assert a.result(20) == c.result(20) == (1.0, 2.0)
    peers.check("A", "C")


def test_a_receiver_whose_time_is_over(machine: Machine, peers: Peers) -> None:
    given_up = threading.Event()
    machine.moments["A moves"] = lambda: assert_(given_up.wait(20))
    peers.seconds["B"] = 0.5
    a, b = peers.start("A", "B")
    assert isinstance(b.exception(20), DeadlineExceeded)
    given_up.set()
    assert a.result(20) == (1.0, 2.0)
    peers.check("A")
    with pytest.raises(TransferFailed, match="gave up: no time left"):
        peers.sent["B"].result(20)
    assert machine.sizes == [3, 2]


def test_an_error_of_nccl_at_one_receiver_ends_its_part_only(
    machine: Machine, peers: Peers
) -> None:
    def fail() -> None:
        machine.moments["B moves"] = fail
        raise TransferFailed("nccl: starting the transfer", found="unhandled system error")

    machine.moments["B moves"] = fail
    a, b, c = peers.start("A", "B", "C")
    assert a.result(20) == c.result(20) == (1.0, 2.0)
    peers.check("A", "C")
    with pytest.raises(TransferFailed, match="sent away"):
        b.result(20)
    assert machine.sizes == [4, 4, 3]


def test_an_error_of_nccl_at_the_sender(machine: Machine, peers: Peers) -> None:
    failures = []

    def fail() -> None:
        failures.append(threading.current_thread().name)
        raise TransferFailed("nccl: starting the transfer", found="unhandled system error")

    def fail_always() -> None:
        for gpu in "AB":
            machine.moments[f"to {gpu} moves"] = fail_always
        fail()

    for gpu in "AB":
        machine.moments[f"to {gpu} moves"] = fail_always
    for future in peers.start("A", "B"):
        error = future.exception(20)
        assert isinstance(error, TransferFailed)
        assert "sent away" in str(error)
    assert len(failures) == 3
    machine.moments.clear()
    peers.start("C")[0].result(20)
    peers.check("C")


def test_parties_that_others_break_are_not_the_senders_fault(
    machine: Machine, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_send, "_PARTIES", 1)

    def fail() -> None:
        raise RuntimeError("CUDA error")

    machine.moments["B moves"] = fail
    a, b = peers.start("A", "B")
    assert isinstance(a.exception(20), PartyBroken)
    assert isinstance(b.exception(20), TransferFailed)


def test_the_sender_dies(machine: Machine, peers: Peers) -> None:
    stuck = threading.Event()

    def die() -> None:
        peers.dead.update(("sender of A", "sender of B"))
        stuck.wait(20)
        raise SystemExit

    for gpu in "AB":
        machine.moments[f"to {gpu} moves"] = die
    for future in peers.start("A", "B"):
        with pytest.raises(TransferFailed, match="signs of life"):
            future.result(20)
    stuck.set()


def test_a_ticket_that_is_none(peers: Peers) -> None:
    transfer = peers.transfer(secrets.token_hex(16), peers.source, 5, "A")
    for ticket in ("", "{}", "ff" * 128, '{"gpu":"A","staging":true,"max_ctas":0}'):
        with (
            peers.transport.sending(transfer) as sending,
            pytest.raises(TransferFailed, match="no ticket"),
        ):
            sending.run(ticket)
