"""Several workers of one node that load one file at once: the disk is read once."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.loader.models import Bag
from warmcast.loader import Loader

WORKERS = 3
NBYTES = 48 << 20


def build() -> Bag:
    import torch

    return Bag({f"part{i}": torch.empty(NBYTES // 4, dtype=torch.uint8) for i in range(4)})


def work(pipe: Connection, url: str, ref: str) -> None:
    with Loader(url) as loader:
        with loader.skeleton():
            model = build()
        pipe.send("ready")
        pipe.recv()
        before = _read_bytes()
        loader.load(model, ref)
        pipe.send(_read_bytes() - before)


def _read_bytes() -> int:
    """Bytes that this process had the storage read."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError


def _cold(path: Path) -> bool:
    """Drop a file from the page cache; whether a read then goes to a disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            return os.preadv(fd, [bytearray(1)], NBYTES // 2, os.RWF_NOWAIT) == 0
        except BlockingIOError:
            return True
        except OSError:  # a file system that is memory
            return False
    finally:
        os.close(fd)


def test_one_read_for_all(publish) -> None:
    import torch

    model = build()
    for buffer in model.buffers():
        buffer.random_(generator=torch.Generator().manual_seed(1))
    deployed = publish(model.state_dict())
    context = multiprocessing.get_context("spawn")
    ends = []
    for _ in range(WORKERS):
        mine, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, deployed.url, deployed.ref))
        process.start()
        theirs.close()
        ends.append((process, mine))
    for _, mine in ends:
        assert mine.recv() == "ready"
    cold = _cold(deployed.blob)
    for _, mine in ends:
        mine.send("go")
    read = [mine.recv() for _, mine in ends]
    for process, mine in ends:
        process.join(30)
        assert process.exitcode == 0
        mine.close()
    if not cold:
        pytest.skip("this file system keeps the file in memory: there is no disk to be read")
    # A page that two ask for at one moment may be counted for both; each alone would read all.
    assert NBYTES * 0.9 <= sum(read) <= NBYTES * 1.3, read
