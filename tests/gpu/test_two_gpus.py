"""Between the GPUs of one host: pulled from the sender's memory, and from each other's."""

from __future__ import annotations

import signal

import pytest

from tests.gpu.gpu_workers import Fleet, Worker

pytestmark = pytest.mark.gpu(2)


def sender_and_receiver(fleet: Fleet) -> list[Worker]:
    """A sender on GPU 0 that serves, and a worker on GPU 1 that has loaded nothing yet."""
    sender, receiver = fleet.start(0), fleet.start(1)
    for worker in (sender, receiver):
        worker.said("ready")
    assert sender.ask("load")["route"] == "origin"
    assert sender.ask("serve")
    return [sender, receiver]


def test_from_gpu_to_gpu_and_on_to_the_next(fleet: Fleet) -> None:
    sender, receiver = sender_and_receiver(fleet)
    report = receiver.ask("load")
    assert (report["route"], report["transport"], report["verified"]) == ("peer", "ipc", True)
    assert receiver.ask("sum") == sender.ask("sum")
    assert receiver.ask("serve")
    # Whoever has received is a sender: the first one goes, its GPU starts a new worker.
    sender.signal(signal.SIGKILL)
    third = fleet.start(0)
    third.said("ready")
    report = third.ask("load")
    assert (report["route"], report["transport"]) == ("peer", "ipc")
    assert third.ask("sum") == receiver.ask("sum")
    for worker in (receiver, third):
        worker.ask("close")
        assert worker.ask("threads") == []


def test_wrong_bytes_in_the_senders_memory_are_found(fleet: Fleet) -> None:
    sender, receiver = sender_and_receiver(fleet)
    right = sender.ask("sum")
    sender.ask("flip")
    report = receiver.ask("load")
    assert (report["route"], report["verified"]) == ("origin", True)
    assert "layers.9.up.weight has CRC32C" in str(report["stages"])
    assert receiver.ask("sum") == right


def test_receivers_that_ask_together(fleet: Fleet) -> None:
    sender, first = sender_and_receiver(fleet)
    others = [fleet.start(number % 2) for number in range(3)]
    receivers = [first, *others]
    for worker in others:
        worker.said("ready")
    for worker in receivers:
        worker.process.stdin.write("load\n")
        worker.process.stdin.flush()
    for worker in receivers:
        report = worker.said("load")
        assert (report["route"], report["transport"]) == ("peer", "ipc")
    assert {worker.ask("sum") for worker in receivers} == {sender.ask("sum")}
    for worker in receivers:
        worker.ask("close")
        assert worker.ask("threads") == []
