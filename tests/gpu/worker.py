"""A worker: ``python -m tests.gpu.worker GPU [--deadline S] [--no-arena] [--nccl VERSION]``; see
:mod:`gpu_workers`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time

import torch

from tests.gpu import nccl_hooks
from tests.gpu.gpu_workers import REF, Model
from warmcast.loader import Loader, WarmcastError
from warmcast.loader.transports import nccl_library


def say(what: str, value: object = None) -> None:
    sys.stdout.write(json.dumps([what, value]) + "\n")
    sys.stdout.flush()


go_on = threading.Event()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gpu", type=int)
    parser.add_argument("--no-arena", action="store_true")
    parser.add_argument("--nccl")
    parser.add_argument("--deadline", type=float, default=120.0)
    options = parser.parse_args()
    if options.nccl:
        nccl_library.version = lambda: options.nccl
    logging.basicConfig(level=logging.INFO)
    device = torch.device("cuda", options.gpu)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    loader = Loader.from_env()
    with loader.skeleton():
        model = Model()

    def load() -> dict[str, object]:
        try:
            report = loader.load(
                model, REF, device, arena=not options.no_arena, deadline=options.deadline
            )
        except WarmcastError as cause:
            return {"error": type(cause).__name__, "message": str(cause)}
        print(report, file=sys.stderr, flush=True)
        return report.to_json()

    say("ready")
    for line in sys.stdin:
        command = line.split()[0]
        if command == "load":
            say(command, load())
        elif command == "serve":
            sender = loader.serve(model)
            say(command, sender is not None and sender.name)
        elif command == "sum":
            say(command, float(sum(p.double().sum().item() for p in model.parameters())))
        elif command == "flip":
            with torch.no_grad():
                data = model.layers[9].up.weight.data.view(torch.int16)
                data[17, 23] ^= 1
            torch.cuda.synchronize()
            say(command)
        elif command == "step":
            # The worker's own work goes on: a product on the GPU that serves.
            began = time.perf_counter()
            x = torch.ones(64, 4096, device=device, dtype=torch.bfloat16)
            for layer in model.layers:
                x = layer.norm(layer.up(x))
            torch.cuda.synchronize()
            say(command, time.perf_counter() - began)
        elif command == "threads":
            names = sorted(t.name for t in threading.enumerate() if t.name.startswith("warmcast"))
            say(command, names)
        elif command == "memory":
            say(command, torch.cuda.memory_allocated(device))
        elif command == "hold":
            nccl_hooks.hold(say, go_on)
            say(command)
        elif command == "gather":
            nccl_hooks.gather(int(line.split()[1]))
            say(command)
        elif command == "left":
            say(command, nccl_hooks.left(device))
        elif command == "go":
            go_on.set()
            say(command)
        elif command == "close":
            loader.close()
            say(command)


if __name__ == "__main__":
    main()
