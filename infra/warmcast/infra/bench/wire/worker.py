"""A worker of the benchmark: ``python -m warmcast.infra.bench.wire.worker MODEL DEVICE``.

MODEL is JSON: the name, the layer and the number of layers of a :class:`models.Shape`. Told
``load``, the worker loads and tells when it began, when it ended, and what the loader reports.
Told ``serve``, it becomes a sender. Told ``memory`` or ``compute``, it begins to work on its
device, step after step, until it is told ``rest``: then it tells how long each took, and when.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping

import torch

from warmcast.infra.bench.wire.models import Shape
from warmcast.infra.demo.channel import Channel, serve
from warmcast.loader import Loader

_WIDTH = 8192
_STEPS: Mapping[str, tuple[int, int]] = {"memory": (16, 12), "compute": (4096, 4)}
"""Rows of the input, and products in a row: bound by reading weights, or by multiplying."""


def main(channel: Channel) -> None:
    """Do as told until told to end."""
    text, device = json.loads(sys.argv[1]), torch.device(sys.argv[2])
    shape = Shape(text["name"], text["layer"], text["layers"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    with Loader.from_env() as loader:
        with loader.skeleton():
            model = shape.build()
        channel.tell({"ready": True})
        work: _Work | None = None
        while (word := channel.next_word()) != "end":
            if word == "load":
                began = time.monotonic()
                report = loader.load(model, shape.ref, device)
                ended = time.monotonic()
                channel.tell({"began": began, "ended": ended, "report": report.to_json()})
            elif word == "serve":
                channel.tell({"serving": loader.serve(model) is not None})
            elif word in _STEPS:
                work = _Work(device, *_STEPS[word])
                channel.tell({"working": word})
            elif word == "rest" and work is not None:
                channel.tell({"steps": work.end()})


class _Work:
    """What a worker does beside serving: a chain of products, from a thread."""

    def __init__(self, device: torch.device, rows: int, products: int) -> None:
        self._device = device
        weights = [self._random(_WIDTH, _WIDTH) for _ in range(products)]
        self._step = _chain(self._random(rows, _WIDTH), weights)
        self._over = threading.Event()
        self._steps: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, name="bench-work")
        self._thread.start()

    def end(self) -> list[tuple[float, float]]:
        """Stop; of each step when it ended (monotonic) and how long it took, in seconds."""
        self._over.set()
        self._thread.join()
        return self._steps

    def _run(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                self._step()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            while not self._over.is_set():
                begin.record()
                self._step()
                end.record()
                end.synchronize()
                self._steps.append((time.monotonic(), begin.elapsed_time(end) / 1000))

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, device=self._device, dtype=torch.float32)
        return (values / math.sqrt(columns)).to(torch.bfloat16)


def _chain(start: torch.Tensor, weights: list[torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        x = start
        for weight in weights:
            x = torch.matmul(x, weight)

    return step


if __name__ == "__main__":
    serve(main)
