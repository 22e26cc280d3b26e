"""Host memory for bytes on their way: bounded, shared, used again and given back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from warmcast.loader.environment import Settings
from warmcast.loader.staging import Staging
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, UsageError

PAGE = 1 << 20


def soon() -> Deadline:
    return Deadline.after(30)


def mapped() -> int:
    """Bytes of this process's address space."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def test_a_lane_uses_its_slot_again() -> None:
    staging = Staging(4 * PAGE)
    with staging.lane(2, None) as lane:
        slots = {lane.next(PAGE, soon()).buffer.data_ptr() for _ in range(10)}
    assert len(slots) == 1
    with staging.lane(2, None) as lane:
        assert lane.next(PAGE, soon()).buffer.data_ptr() in slots
    staging.close()


def test_what_is_written_is_what_is_read() -> None:
    staging = Staging()
    with staging.lane(1, None) as lane:
        slot = lane.next(PAGE, soon())
        slot.view[:5] = b"hello"
        assert bytes(slot.buffer[:5].tolist()) == b"hello"
    staging.close()


def test_the_bound_holds_for_all_lanes_together() -> None:
    staging = Staging(3 * PAGE)
    most = 0
    held = 0
    lock = threading.Lock()

    def work(_: int) -> None:
        nonlocal most, held
        for _ in range(50):
            with staging.lane(8, None) as lane:
                lane.next(PAGE, soon())
                with lock:
                    held += 1
                    most = max(most, held)
                with lock:
                    held -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert 1 <= most <= 3
    assert staging._made <= 3 * PAGE
    staging.close()
    assert staging._made == 0


def test_two_loads_with_slots_of_two_lengths_do_not_wait_for_ever() -> None:
    staging = Staging(4 * PAGE)

    def work(nbytes: int) -> None:
        for _ in range(30):
            with staging.lane(4, None) as lane:
                for _ in range(3):
                    lane.next(nbytes, soon())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [PAGE, 2 * PAGE, 4 * PAGE, PAGE] * 2))
    assert staging._made <= 4 * PAGE
    staging.close()


def test_who_waits_has_a_deadline() -> None:
    staging = Staging(PAGE)
    with staging.lane(1, None) as lane, staging.lane(1, None) as other:
        lane.next(PAGE, soon())
        with pytest.raises(DeadlineExceeded, match="host memory"):
            other.next(PAGE, Deadline.after(0))
    staging.close()


def test_a_piece_larger_than_the_bound_is_given_one_at_a_time() -> None:
    staging = Staging(PAGE)
    with staging.lane(1, None) as lane:
        assert len(lane.next(4 * PAGE, soon()).view) == 4 * PAGE
    staging.close()


def test_closing_gives_the_memory_back() -> None:
    before = mapped()
    staging = Staging()
    with staging.lane(1, None) as lane:
        lane.next(512 * PAGE, soon())
    assert mapped() - before >= 512 * PAGE
    staging.close()
    assert mapped() - before < 64 * PAGE


@pytest.mark.parametrize("text", ["", "0", "-5", "2GiB", "1e9"])
def test_a_setting_that_makes_no_sense(text: str) -> None:
    env = {"WARMCAST_ORIGIN": "file:///x", "WARMCAST_HOST_MEMORY": text}
    with pytest.raises(UsageError, match="WARMCAST_HOST_MEMORY"):
        Settings.from_env(env)


def test_the_setting() -> None:
    env = {"WARMCAST_ORIGIN": "file:///x", "WARMCAST_HOST_MEMORY": "1048576"}
    assert Settings.from_env(env).host_memory == PAGE
