"""Between two GPUs: NCCL driven directly, and what happens when a side of it breaks."""

from __future__ import annotations

import signal

import pytest

from tests.gpu.gpu_workers import Fleet, Worker

pytestmark = pytest.mark.gpu(2)


def sender_and_receiver(fleet: Fleet, sending: str = "", receiving: str = "") -> list[Worker]:
    """A sender on GPU 0 that serves, and a worker on GPU 1 that has loaded nothing yet."""
    sender = fleet.start(0, *sending.split())
    receiver = fleet.start(1, *receiving.split())
    for worker in (sender, receiver):
        worker.said("ready")
    assert sender.ask("load")["route"] == "origin"
    assert sender.ask("serve")
    return [sender, receiver]


def test_from_gpu_to_gpu_and_on_to_the_next(fleet: Fleet) -> None:
    sender, receiver = sender_and_receiver(fleet)
    report = receiver.ask("load")
    assert (report["route"], report["transport"], report["verified"]) == ("peer", "nccl", True)
    assert receiver.ask("sum") == sender.ask("sum")
    assert receiver.ask("serve")
    # Whoever has received is a sender: the first one goes, its GPU starts a new worker.
    sender.signal(signal.SIGKILL)
    third = fleet.start(0)
    third.said("ready")
    report = third.ask("load")
    assert (report["route"], report["transport"]) == ("peer", "nccl")
    assert third.ask("sum") == receiver.ask("sum")
    for worker in (receiver, third):
        worker.ask("close")
        assert worker.ask("threads") == []


def test_sender_killed_with_the_communicator_made(fleet: Fleet) -> None:
    sender, receiver = sender_and_receiver(fleet, sending="--hold")
    receiver.process.stdin.write("load\n")
    receiver.process.stdin.flush()
    sender.said("held")
    sender.signal(signal.SIGKILL)
    report = receiver.said("load")
    assert (report["route"], report["verified"]) == ("origin", True)
    assert "signs of life" in str(report["stages"]) or "nccl" in str(report["stages"])


def test_sender_stopped_with_the_communicator_made_and_continued(fleet: Fleet) -> None:
    sender, receiver = sender_and_receiver(fleet, sending="--hold")
    receiver.process.stdin.write("load\n")
    receiver.process.stdin.flush()
    sender.said("held")
    sender.signal(signal.SIGSTOP)
    report = receiver.said("load")
    assert (report["route"], report["verified"]) == ("origin", True)
    sender.signal(signal.SIGCONT)
    sender.ask("go")
    right = sender.ask("sum")
    assert receiver.ask("sum") == right
    # The sender's own work goes on, and so does its serving.
    sender.ask("step")
    receiver.signal(signal.SIGKILL)
    third = fleet.start(1)
    third.said("ready")
    report = third.ask("load")
    assert (report["route"], report["transport"]) == ("peer", "nccl")
    assert third.ask("sum") == right


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_receiver_gone_with_the_communicator_made(fleet: Fleet, number: int) -> None:
    sender, receiver = sender_and_receiver(fleet, receiving="--hold")
    # First the worker's own work: the workspaces it leaves are its own.
    right = sender.ask("sum")
    sender.ask("step")
    memory = sender.ask("memory")
    receiver.process.stdin.write("load\n")
    receiver.process.stdin.flush()
    receiver.said("held")
    receiver.signal(number)
    sender.ask("step")
    third = fleet.start(1)
    third.said("ready")
    report = third.ask("load")
    assert (report["route"], report["transport"]) == ("peer", "nccl")
    assert third.ask("sum") == sender.ask("sum") == right
    assert sender.ask("memory") == memory
    sender.ask("close")
    assert sender.ask("threads") == []


def test_wrong_bytes_in_the_senders_memory_are_found(fleet: Fleet) -> None:
    sender, receiver = sender_and_receiver(fleet)
    right = sender.ask("sum")
    sender.ask("flip")
    report = receiver.ask("load")
    assert (report["route"], report["verified"]) == ("origin", True)
    assert "layers.9.up.weight has CRC32C" in str(report["stages"])
    assert receiver.ask("sum") == right


def test_no_time_for_a_transfer(fleet: Fleet) -> None:
    sender, receiver = sender_and_receiver(fleet, sending="--hold", receiving="--deadline 4")
    before = receiver.ask("memory")
    receiver.process.stdin.write("load\n")
    receiver.process.stdin.flush()
    sender.said("held")
    report = receiver.said("load")
    # Half of the time is the peers'; what is left suffices for the origin, or the load says no.
    assert report.get("route") == "origin" or report["error"] == "DeadlineExceeded"
    if "error" in report:
        assert receiver.ask("memory") == before
    sender.ask("go")
    sender.ask("step")
