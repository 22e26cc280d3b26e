"""A worker that loads, serves, and ends in the way that it is told.

    python -m tests.loader.faults.exits ORIGIN REGISTRY END

Prints "ready", waits for a line on standard input, ends.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from tests.loader.faults.worker import REF, build
from warmcast.loader import Loader


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
    loader.load(model, REF, deadline=20)
    if end != "lease":
        loader.serve(model)
    print("ready", flush=True)
    sys.stdin.readline()
    if end == "sys.exit":
        sys.exit(3)
    if end == "exception":
        raise ValueError("of the worker's own")


if __name__ == "__main__":
    main(*sys.argv[1:])
