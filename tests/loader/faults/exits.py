"""A worker that loads, serves, and ends in the way that it is told.

    python -m tests.loader.faults.exits ORIGIN REGISTRY END

Prints "ready", waits for a line on standard input, ends.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

import torch

from tests.loader.faults.worker import REF, build
from warmcast.loader import Loader
from warmcast.manifests.stores.file_reader import FileReader

FIRST = 16 << 20
"""Bytes of the file's first chunk, which holds the first layer."""


def hold_back() -> threading.Event:
    """Have threads at work in torch before they read what comes after the first layer: until the
    event, and a bit longer.
    """
    told = threading.Event()
    read = FileReader.read_into
    square = torch.rand(1024, 1024)
    torch.set_num_threads(1)

    def held_back(reader: FileReader, offset: int, *rest: object) -> None:
        if offset >= FIRST:
            while not told.is_set():
                torch.mm(square, square)
            torch.mm(square, square)
        read(reader, offset, *rest)

    FileReader.read_into = held_back
    return told


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
    told = hold_back() if end == "progressive" else None
    loader.load(model, REF, deadline=20, progressive=told is not None)
    if end not in ("lease", "progressive"):
        loader.serve(model)
    print("ready", flush=True)
    sys.stdin.readline()
    if told is not None:
        told.set()
        sys.exit(4)
    if end == "sys.exit":
        sys.exit(3)
    if end == "exception":
        raise ValueError("of the worker's own")


if __name__ == "__main__":
    main(*sys.argv[1:])
