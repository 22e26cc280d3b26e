"""What a machine's parts allow: the link to the GPU, and the disk."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from warmcast.infra.bench.stream.checkpoint import drop

_PINNED = 1 << 30
_TRIES = 4
_READS = {
    "O_DIRECT, 1 thread, 16 MiB": (os.O_DIRECT, 1, 16 << 20),
    "O_DIRECT, 4 threads, 16 MiB": (os.O_DIRECT, 4, 16 << 20),
    "O_DIRECT, 16 threads, 4 MiB": (os.O_DIRECT, 16, 4 << 20),
    "cached, 4 threads, 16 MiB": (0, 4, 16 << 20),
}


def pinned_copy(device: torch.device) -> float:
    """Bytes a second from pinned memory to a GPU, the best of some tries."""
    source = torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_PINNED, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(_TRIES):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best = max(best, _PINNED / (time.perf_counter() - began))
    return best


def disk_reads(files: Sequence[Path]) -> dict[str, float]:
    """Bytes a second of raw reads of files that are not in the cache, by each way that works."""
    found = {}
    for way, (flags, threads, block) in _READS.items():
        drop(files)
        try:
            found[way] = _read(files, flags, threads, block)
        except OSError:  # a file system without O_DIRECT
            continue
    return found


def _read(files: Sequence[Path], flags: int, threads: int, block: int) -> float:
    jobs = iter(
        [
            (path, at)
            for path in files
            for at in range(0, path.stat().st_size // block * block, block)
        ]
    )
    lock = threading.Lock()
    counts: list[int] = []
    errors: list[OSError] = []

    def work() -> None:
        opened: dict[Path, int] = {}
        count = 0
        with mmap.mmap(-1, block) as buffer:
            try:
                while True:
                    with lock:
                        job = next(jobs, None)
                    if job is None:
                        break
                    path, at = job
                    if path not in opened:
                        opened[path] = os.open(path, os.O_RDONLY | flags)
                    count += os.preadv(opened[path], [buffer], at)
            except OSError as cause:
                errors.append(cause)
            finally:
                for fd in opened.values():
                    os.close(fd)
        counts.append(count)

    began = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return sum(counts) / (time.perf_counter() - began)
