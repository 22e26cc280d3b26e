"""Exact moments of a broadcast, in a worker's process, and what it leaves there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from warmcast.loader.transports import nccl_party
from warmcast.loader.transports.nccl_broadcast import Payload


def hold(say: Callable[[str], None], go_on: threading.Event) -> None:
    """Stop once with the communicator made and no weights sent, until the test goes on or kills."""
    real = Payload.move
    go_on.clear()

    def move(self: Payload, *args: object, **how: object) -> object:
        Payload.move = real
        say("held")
        go_on.wait()
        return real(self, *args, **how)

    Payload.move = move


def gather(count: int) -> None:
    """Let the next party wait for so many receivers."""
    real = nccl_party.Gathering._gather

    def wait(self: nccl_party.Gathering, first: nccl_party.Member) -> None:
        nccl_party.Gathering._gather = real
        assert self._changed.wait_for(lambda: len(self._queue) == count, timeout=60)

    nccl_party.Gathering._gather = wait


def left(device: torch.device) -> dict[str, Any]:
    """What the process has when all transfers are over: threads, open files, bytes of torch's and
    bytes in use on the GPU.
    """
    for name in ("warmcast-transfer", "warmcast-nccl-end"):  # the former start the latter
        for thread in threading.enumerate():
            if thread.name == name:
                thread.join(20)
    torch.cuda.empty_cache()  # what a load before had is torch's to use again, and nobody's loss
    free, total = torch.cuda.mem_get_info(device)
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": _open_files(),
        "bytes": torch.cuda.memory_allocated(device),
        "used": total - free,
    }


def _open_files() -> list[str]:
    """What is open, but for connections to the registry: of these there are as many as calls were
    ever made at one time.
    """
    port = urlsplit(os.environ["WARMCAST_REGISTRY"]).port
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    registry = {f"socket:[{line[9]}]" for line in lines if int(line[2].split(":")[1], 16) == port}
    targets = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            targets.append(str(fd.readlink()))
    return [target.split("[")[0] for target in targets if target not in registry]
