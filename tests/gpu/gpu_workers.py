"""Workers as processes of their own: one GPU each, told what to do over a pipe.

A worker can be told to stop at an exact moment of a transfer: it then says so and waits. The hook
makes the moment exact; the fault (a signal) is real and comes from the test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from warmcast.flows.run import deploy
from warmcast.manifests.deadline import Deadline

LAYERS, WIDTH = 64, 4096
REF = "big@prod"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))


def deploy_model(folder: Path, origin: Path) -> str:
    """Make a checkpoint of random weights and deploy it; the origin's URL."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(7)
    state = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in Model().to("meta").state_dict().items()
    }
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    deploy(folder, str(origin), REF, deadline=Deadline.after(300))
    return f"file://{origin}"


class Worker:
    """A worker's process, from the test's side."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    def said(self, what: str) -> Any:
        """The next thing the worker says, which has to be ``what``."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker ended: {self.log.read_text()[-3000:]}"
        message = json.loads(line)
        assert message[0] == what, (message, self.log.read_text()[-3000:])
        return message[1]

    def tell(self, command: str) -> None:
        """Have the worker do something; what it says is to be heard later."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def ask(self, command: str) -> Any:
        """Have the worker do something; its answer."""
        self.tell(command)
        return self.said(command.split(maxsplit=1)[0])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(30)


class Fleet:
    """Starts workers; ends them all."""

    def __init__(self, origin: str, registry: str, folder: Path, **env: str) -> None:
        self._env = dict(os.environ, WARMCAST_ORIGIN=origin, WARMCAST_REGISTRY=registry, **env)
        self._env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._folder = folder
        self._workers: list[Worker] = []

    def start(self, gpu: int, *options: str, **env: str) -> Worker:
        log = self._folder / f"worker{len(self._workers)}.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.worker", str(gpu), *options],
                env={**self._env, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        worker = Worker(process, log)
        self._workers.append(worker)
        return worker

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.communicate()
