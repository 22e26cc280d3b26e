"""NCCL between GPUs: one broadcast to several receivers, and what happens when a side breaks."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import nccl_hooks
from tests.gpu.gpu_workers import Fleet, Worker
from warmcast.loader.transports import nccl_library, nccl_packing
from warmcast.loader.transports.nccl_broadcast import Payload
from warmcast.loader.transports.nccl_communicator import Communicator
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded

pytestmark = pytest.mark.gpu(2)

Left = dict[str, Any]

SLACK = {signal.SIGKILL: 64 << 20, signal.SIGSTOP: 512 << 20}
"""Bytes of a GPU that may be in use beyond what was: what the driver keeps for itself; and NCCL's
buffers as long as a process has them open, though it be stopped.
"""


@pytest.fixture
def fleet(origin: str, valkey_url: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(origin, valkey_url, tmp_path, WARMCAST_TRANSPORTS="nccl") as fleet:
        yield fleet


def started(*workers: Worker) -> tuple[Worker, ...]:
    """Workers that are ready; the first has loaded from the origin, and serves."""
    for worker in workers:
        worker.said("ready")
    assert workers[0].ask("load")["route"] == "origin"
    assert workers[0].ask("serve")
    return workers


def from_peer(report: dict[str, object]) -> bool:
    """Whether a load came over NCCL, and was right."""
    assert (report["route"], report["transport"], report["verified"]) == ("peer", "nccl", True), (
        report
    )
    return True


def the_same(
    left: Callable[[], Left], before: Left, *, files: int = 0, lost: int = signal.SIGKILL
) -> bool:
    """Whether a worker has what it had, or soon has: no thread, file or memory more.

    NCCL's threads end by themselves, and nothing tells when.
    """
    for _ in range(100):
        now = left()
        if (
            now["threads"] <= before["threads"]
            and len(now["files"]) <= len(before["files"]) + files
            and now["bytes"] <= before["bytes"]
            and now["used"] <= before["used"] + SLACK[lost]
        ):
            return True
        time.sleep(0.05)
    more = Counter(now.pop("files")) - Counter(before.pop("files"))
    raise AssertionError((before, now, more))


def test_from_gpu_to_gpu_and_on_to_the_next(fleet: Fleet) -> None:
    sender, receiver = started(fleet.start(0), fleet.start(1))
    third = fleet.start(0)
    assert from_peer(receiver.ask("load"))
    right = sender.ask("sum")
    assert receiver.ask("sum") == right
    assert receiver.ask("serve")
    # Whoever has received is a sender: the first one goes, a new worker comes to its GPU.
    sender.signal(signal.SIGKILL)
    third.said("ready")
    assert from_peer(third.ask("load"))
    assert third.ask("sum") == right
    for worker in (receiver, third):
        worker.ask("close")
        worker.ask("left")
        assert worker.ask("threads") == []


def test_tensors_that_lie_one_by_one(fleet: Fleet) -> None:
    sender, receiver = started(fleet.start(0), fleet.start(1, "--no-arena"))
    before = sender.ask("left")["bytes"]
    assert from_peer(receiver.ask("load"))
    assert receiver.ask("sum") == sender.ask("sum")
    assert sender.ask("left")["bytes"] == before  # without the staging


def test_other_versions_of_nccl_do_not_meet(fleet: Fleet) -> None:
    sender, receiver = started(fleet.start(0), fleet.start(1, "--nccl", "22800"))
    before = sender.ask("left")
    report = receiver.ask("load")
    assert report["route"] == "origin"
    assert "here, 22800 there" in str(report["stages"])
    assert the_same(lambda: sender.ask("left"), before)


@pytest.mark.parametrize("bounded", ["sender", "receiver"])
def test_the_bound_of_ctas_holds_for_both(fleet: Fleet, tmp_path: Path, bounded: str) -> None:
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
    bound = {"WARMCAST_NCCL_MAX_CTAS": "3"}
    envs = [{**debug, "NCCL_DEBUG_FILE": str(tmp_path / f"nccl{n}.log")} for n in (0, 1)]
    envs[bounded == "receiver"].update(bound)
    _, receiver = started(fleet.start(0, **envs[0]), fleet.start(1, **envs[1]))
    assert from_peer(receiver.ask("load"))
    for number in (0, 1):
        assert " 3 coll channels" in (tmp_path / f"nccl{number}.log").read_text()


def test_a_wrong_bound_of_ctas(fleet: Fleet) -> None:
    worker = fleet.start(0, WARMCAST_NCCL_MAX_CTAS="65")
    worker.said("ready")
    assert worker.ask("load")["error"] == "UsageError"


def test_sender_killed_in_the_middle(fleet: Fleet) -> None:
    sender, receiver = started(fleet.start(0), fleet.start(1))
    sender.ask("hold")
    receiver.tell("load")
    sender.said("held")
    sender.signal(signal.SIGKILL)
    report = receiver.said("load")
    assert (report["route"], report["verified"]) == ("origin", True)
    assert "signs of life" in str(report["stages"]) or "nccl" in str(report["stages"])
    receiver.ask("close")
    receiver.ask("left")
    assert receiver.ask("threads") == []


def test_sender_stopped_in_the_middle_and_continued(fleet: Fleet) -> None:
    sender, receiver = started(fleet.start(0), fleet.start(1))
    third = fleet.start(1)
    third.said("ready")
    sender.ask("hold")
    receiver.tell("load")
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
    assert from_peer(third.ask("load"))
    assert third.ask("sum") == right


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_only_receiver_gone_in_the_middle(fleet: Fleet, number: int) -> None:
    sender, receiver = started(fleet.start(0), fleet.start(1))
    third = fleet.start(1)
    third.said("ready")
    # First what comes but once: the worker's own work, and a transfer.
    right = sender.ask("sum")
    sender.ask("step")
    assert from_peer(third.ask("load"))
    before = sender.ask("left")
    receiver.ask("hold")
    receiver.tell("load")
    receiver.said("held")
    receiver.signal(number)
    sender.ask("step")
    assert from_peer(third.ask("load"))
    assert third.ask("sum") == sender.ask("sum") == right
    assert the_same(lambda: sender.ask("left"), before, lost=number)
    sender.ask("close")
    assert sender.ask("threads") == []


def test_no_time_for_a_transfer(fleet: Fleet) -> None:
    sender, receiver = started(fleet.start(0), fleet.start(1, "--deadline", "4"))
    sender.ask("hold")
    before = receiver.ask("memory")
    receiver.tell("load")
    sender.said("held")
    report = receiver.said("load")
    # Half of the time is the peers'; what is left suffices for the origin, or the load says no.
    assert report.get("route") == "origin" or report["error"] == "DeadlineExceeded"
    if "error" in report:
        receiver.ask("left")
        assert receiver.ask("memory") == before
    sender.ask("go")
    sender.ask("step")


@pytest.mark.gpu(4)
def test_one_to_three_by_one_broadcast(fleet: Fleet) -> None:
    sender, *receivers = started(*(fleet.start(gpu) for gpu in range(4)))
    sender.ask("gather 3")
    for worker in receivers:
        worker.tell("load")
    for worker in receivers:
        assert from_peer(worker.said("load"))
    assert {worker.ask("sum") for worker in receivers} == {sender.ask("sum")}
    assert "sent to 3 receivers by one broadcast" in sender.log.read_text()
    for worker in (sender, *receivers):
        worker.ask("close")
        worker.ask("left")
        assert worker.ask("threads") == []


@pytest.mark.gpu(4)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_three_gone_in_the_middle(fleet: Fleet, number: int) -> None:
    sender, first, lost, last = started(*(fleet.start(gpu) for gpu in range(4)))
    # First what comes but once.
    right = sender.ask("sum")
    sender.ask("step")
    sender.ask("gather 2")
    for worker in (first, last):
        worker.tell("load")
    for worker in (first, last):
        assert from_peer(worker.said("load"))
    before = [worker.ask("left") for worker in (sender, first, last)]
    lost.ask("hold")
    sender.ask("gather 3")
    for worker in (first, lost, last):
        worker.tell("load")
    lost.said("held")
    lost.signal(number)
    sender.ask("step")
    for worker in (first, last):
        assert from_peer(report := worker.said("load"))
        assert "PartyBroken" not in str(report["stages"])
        assert worker.ask("sum") == right
    assert "sent to 2 receivers by one broadcast" in sender.log.read_text()
    for worker, then in zip((sender, first, last), before, strict=True):
        assert the_same(partial(worker.ask, "left"), then, lost=number)


# Below the workers: ranks as threads of this process


def communicators(deadline: Deadline) -> list[Communicator]:
    """One a GPU, not created yet."""
    return [Communicator(torch.device("cuda", rank), deadline.check) for rank in (0, 1)]


def test_small_regions_of_any_length_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = partial(nccl_packing.packed, small=1 << 20, first=1 << 20, chunk=4 << 20)
    monkeypatch.setattr(nccl_packing, "packed", plan)
    lengths = [1 + 37_411 * n % (2 << 20) for n in range(200)]
    sides = []
    for rank in (0, 1):
        device = torch.device("cuda", rank)
        room = torch.zeros(sum(lengths) + len(lengths), dtype=torch.uint8, device=device)
        pieces = room.split([length + 1 for length in lengths])
        regions = [piece[n % 2 :][: lengths[n]] for n, piece in enumerate(pieces)]
        sides.append((room, regions, Payload(regions, device)))
    source, target = sides[0][0], sides[1][0]
    source.random_(0, 256)
    expected = torch.zeros_like(target)
    for mine, theirs in zip(sides[1][1], sides[0][1], strict=True):
        mine_at = mine.data_ptr() - target.data_ptr()
        expected[mine_at : mine_at + mine.numel()] = theirs.to(expected.device)
    unique = nccl_library.unique_id()
    comms = communicators(Deadline.after(60))

    def run(rank: int) -> tuple[float, float]:
        comms[rank].create(unique, rank, 2, None)
        comms[rank].connect()
        return sides[rank][2].move(comms[rank], sending=rank == 0, packed=True)

    with ThreadPoolExecutor(2) as pool:
        spans = list(pool.map(run, (0, 1)))
    for comm in comms:
        comm.close()
    assert all(begin < end for begin, end in spans)
    assert torch.equal(target, expected)


def test_ranks_that_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL keeps three files of each, which is why a sender is the last to join."""
    monkeypatch.setenv("WARMCAST_REGISTRY", "redis://127.0.0.1:1")
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)

    def wait_in_vain() -> None:
        unique = nccl_library.unique_id()
        comm = communicators(Deadline.after(1))[0]
        comm.create(unique, 0, 2, None)
        with pytest.raises(DeadlineExceeded, match="creating the communicator"):
            comm.connect()
        nccl_library.release(unique)
        assert comm.abort()

    wait_in_vain()  # what comes but once
    before = nccl_hooks.left(device)
    for _ in range(2):
        wait_in_vain()
    assert the_same(lambda: nccl_hooks.left(device), before, files=6)


def test_an_id_that_nobody_joins_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMCAST_REGISTRY", "redis://127.0.0.1:1")
    device = torch.device("cuda", 0)
    nccl_library.release(nccl_library.unique_id())
    before = nccl_hooks.left(device)
    for _ in range(5):
        nccl_library.release(nccl_library.unique_id())
    assert the_same(lambda: nccl_hooks.left(device), before)
