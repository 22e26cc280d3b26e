"""Who is served together by one broadcast, and who leads it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from warmcast.loader.errors import TransferFailed
from warmcast.loader.transports import Transfer, nccl_party
from warmcast.loader.transports.nccl_messages import Ticket
from warmcast.loader.transports.nccl_party import Gathering, Member
from warmcast.manifests.deadline import Deadline

MEMORY = [torch.zeros(4, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)]


def transfer(
    regions: Sequence[torch.Tensor] = MEMORY, alive: Callable[[], None] = lambda: None
) -> Transfer:
    registry: Any = None  # a gathering asks it nothing
    device = torch.device("cpu")
    return Transfer("0" * 32, regions, device, registry, "", Deadline.after(30), alive)


class Sender:
    """Serves receivers in threads, as a sender's transfers do; the test leads."""

    def __init__(self) -> None:
        self.gathering = Gathering(self._lead)
        self.led: list[list[str]] = []
        self.leading = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.lead: Callable[[Sequence[Member]], None] = lambda party: [m.finish() for m in party]
        self._pool = ThreadPoolExecutor(8)

    def _lead(self, party: Sequence[Member]) -> None:
        self.led.append([member.ticket.gpu for member in party])
        self.leading.release()
        assert self.go_on.acquire(timeout=10)
        self.lead(party)

    def serve(self, gpu: str, what: Transfer | None = None) -> Future[None]:
        ticket = Ticket(gpu=gpu, staging=True, max_ctas=None)
        return self._pool.submit(self.gathering.serve, what or transfer(), ticket)

    def queued(self, count: int) -> None:
        """Wait until so many receivers wait or are served."""
        with self.gathering._changed:
            assert self.gathering._changed.wait_for(
                lambda: len(self.gathering._queue) == count, timeout=10
            )


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Sender:
    # Windows end when nobody is coming any more: the tests say who is.
    monkeypatch.setattr(nccl_party, "COMING", 10.0)
    return Sender()


def test_those_that_were_answered_are_waited_for(sender: Sender) -> None:
    with sender.gathering.coming() as first, sender.gathering.coming() as second:
        first()
        one = sender.serve("A")
        assert not sender.leading.acquire(blocking=False)
        second()
        two = sender.serve("B")
        sender.leading.acquire()
        sender.go_on.release()
        one.result(10)
        two.result(10)
    assert sorted(map(sorted, sender.led)) == [["A", "B"]]


def test_one_that_was_answered_and_does_not_come(sender: Sender) -> None:
    with sender.gathering.coming():
        one = sender.serve("A")
    sender.go_on.release()
    one.result(10)
    assert sender.led == [["A"]]


def test_those_who_come_meanwhile_are_one_party(sender: Sender) -> None:
    one = sender.serve("A")
    sender.leading.acquire()
    others = []
    for count, gpu in enumerate("BCD", 2):
        others.append(sender.serve(gpu))
        sender.queued(count)
    assert sender.led == [["A"]]
    sender.go_on.release(2)
    for future in (one, *others):
        future.result(10)
    assert sender.led == [["A"], ["B", "C", "D"]]


def test_two_on_one_gpu_and_other_memory(sender: Sender) -> None:
    one = sender.serve("A")
    sender.leading.acquire()
    others = []
    for count, (gpu, what) in enumerate(
        [("B", transfer()), ("B", transfer()), ("C", transfer(MEMORY[:1])), ("D", transfer())], 2
    ):
        others.append(sender.serve(gpu, what))
        sender.queued(count)
    sender.go_on.release(4)
    for future in (one, *others):
        future.result(10)
    assert sender.led == [["A"], ["B", "D"], ["B"], ["C"]]


def test_who_is_left_of_a_party_meets_those_that_wait(sender: Sender) -> None:
    def break_it(party: Sequence[Member]) -> None:
        sender.lead = lambda party: [member.finish() for member in party]
        party[0].finish(TransferFailed("it is gone"))

    one = sender.serve("A")
    sender.leading.acquire()
    others = []
    for count, gpu in enumerate("BCD", 2):
        others.append(sender.serve(gpu))
        sender.queued(count)
    sender.go_on.release()
    sender.leading.acquire()
    sender.lead = break_it
    late = sender.serve("E")
    sender.queued(4)
    sender.go_on.release(2)
    with pytest.raises(TransferFailed, match="it is gone"):
        others[0].result(10)
    for future in (one, *others[1:], late):
        future.result(10)
    assert sender.led == [["A"], ["B", "C", "D"], ["C", "D", "E"]]


def test_one_that_dies_while_it_waits(sender: Sender) -> None:
    def dead() -> None:
        raise TransferFailed("no signs of life")

    one = sender.serve("A")
    sender.leading.acquire()
    two = sender.serve("B", transfer(alive=dead))
    with pytest.raises(TransferFailed, match="signs of life"):
        two.result(10)
    three = sender.serve("C")
    sender.go_on.release(2)
    one.result(10)
    three.result(10)
    assert sender.led == [["A"], ["C"]]


def test_a_leader_that_fails_fails_its_party_only(sender: Sender) -> None:
    def fail(party: Sequence[Member]) -> None:
        sender.lead = lambda party: [member.finish() for member in party]
        raise ZeroDivisionError

    sender.lead = fail
    with sender.gathering.coming() as coming:
        one, two = sender.serve("A"), sender.serve("B")
        sender.queued(2)
        coming()
    sender.leading.acquire()
    three = sender.serve("C")
    sender.queued(3)
    sender.go_on.release(2)
    assert {type(one.exception(10)), type(two.exception(10))} == {ZeroDivisionError, TransferFailed}
    three.result(10)
    assert sorted(sender.led[0]) == ["A", "B"]
    assert sender.led[1:] == [["C"]]
