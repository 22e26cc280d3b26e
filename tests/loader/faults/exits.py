"""A worker that loads, serves, and ends in the way that it is told.

    python -m tests.loader.faults.exits ORIGIN REGISTRY END

Prints "ready", waits for a line on standard input, ends.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import torch

from tests.loader.faults.worker import REF, build
from warmcast.loader import Loader
from warmcast.manifests.stores.file_reader import FileReader

FIRST = 16 << 20
"""Bytes of the file's first chunk, which holds the first layer."""


class HoldBack:
    """Lets what comes after the first layer be read only when it is told so, the first of it after
    long work of torch's.
    """

    def __init__(self) -> None:
        self._told, self._working = threading.Event(), threading.Event()
        FileReader.read_into = self._wait_and_read(FileReader.read_into)

    def go_on(self) -> None:
        """Return when a thread is at that work."""
        self._told.set()
        self._working.wait()

    def _wait_and_read(self, read: Callable[..., None]) -> Callable[..., None]:
        square = torch.rand(2048, 2048)
        first = threading.Lock()

        def wait_and_read(reader: FileReader, offset: int, *rest: object) -> None:
            if offset >= FIRST:
                self._told.wait()
                if first.acquire(blocking=False):
                    self._working.set()
                    torch.mm(square, square)
            read(reader, offset, *rest)

        return wait_and_read


def main(origin: str, registry: str, end: str) -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        print("handled", flush=True)
        sys.exit(7)

    if end == "handler before":
        signal.signal(signal.SIGTERM, handler)
    loader = Loader(origin, registry)
    if end == "handler after":
        signal.signal(signal.SIGTERM, handler)
    if end == "ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with loader.skeleton():
        model = build()
    held = HoldBack() if end == "progressive" else None
    loader.load(model, REF, deadline=20, progressive=held is not None)
    if end not in ("lease", "progressive"):
        loader.serve(model)
    print("ready", flush=True)
    sys.stdin.readline()
    if held is not None:
        held.go_on()
        sys.exit(4)
    if end == "sys.exit":
        sys.exit(3)
    if end == "exception":
        raise ValueError("of the worker's own")


if __name__ == "__main__":
    main(*sys.argv[1:])
