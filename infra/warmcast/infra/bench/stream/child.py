"""One loader in a process of its own: ``python -m warmcast.infra.bench.stream.child JSON``.

The JSON names the loader, the device, the files (paths, or URLs in an object store), the origin,
the ref, and whether the files are to be dropped from the page cache before each load. It loads a
few times, and tells the seconds of each, the processor time of the last, the host memory that it
took beyond what it had, and the names of tensors whose bytes are wrong.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warmcast.infra.bench.stream.checkpoint import drop
from warmcast.infra.bench.wire.models import Shape
from warmcast.infra.demo.channel import Channel, serve
from warmcast.loader import Loader
from warmcast.loader.containers import flat_bytes
from warmcast.loader.verify import crc32cs
from warmcast.manifests.checksum import to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.origin import Origin

Load = Callable[[], Mapping[str, Tensor]]

_LOADS = 4
_COLD_LOADS = 2


def main(channel: Channel) -> None:
    """Load, and tell."""
    told = json.loads(sys.argv[1])
    device = torch.device(told["device"])
    files = told["files"]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    load = LOADERS[told["loader"]](files, device, told)
    with Origin.open(told["origin"]) as origin:
        manifest = origin.resolve(told["ref"], Deadline.after(60))
    truths = {tensor.name: tensor.crc32c for tensor in manifest.tensors}
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    seconds, used = [], 0.0
    state: Mapping[str, Tensor] = {}
    for _ in range(_COLD_LOADS if told["cold"] else _LOADS):
        state = {}
        if told["cold"]:
            drop([Path(name) for name in files])
        cpu, began = time.process_time(), time.perf_counter()
        state = load()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        used = time.process_time() - cpu
    taken = _memory("VmHWM") - before
    names = list(state)
    found = crc32cs([flat_bytes(state[name].detach()) for name in names], Deadline.after(300))
    wrong = [n for n, crc in zip(names, found, strict=True) if truths.get(n) != to_hex(crc)]
    wrong += [name for name in truths if name not in state]
    channel.tell({"seconds": seconds, "cpu": used, "memory": taken, "wrong": wrong})
    channel.wait_for("end")


def _warmcast(_: Sequence[str], device: torch.device, told: Mapping[str, Any]) -> Load:
    loader = Loader(told["origin"])
    shape = Shape(**told["shape"])
    with loader.skeleton():  # the model's own, whoever loads its weights
        skeletons = [shape.build() for _ in range(_LOADS)]

    def load() -> Mapping[str, Tensor]:
        model = skeletons.pop()
        loader.load(model, told["ref"], device)
        state: Mapping[str, Tensor] = model.state_dict()
        return state

    return load


def _safetensors(files: Sequence[str], device: torch.device, _: Mapping[str, Any]) -> Load:
    from safetensors.torch import load_file

    def load() -> Mapping[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name in files:
            state |= load_file(name, device=str(device))
        if device.type == "cpu":  # until then it has only mapped the files
            state = {name: tensor.clone() for name, tensor in state.items()}
        return state

    return load


def _fastsafetensors(files: Sequence[str], device: torch.device, _: Mapping[str, Any]) -> Load:
    from fastsafetensors import fastsafe_open

    def load() -> Mapping[str, Tensor]:
        with fastsafe_open(list(files), nogds=True, device=str(device)) as opened:
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118

    return load


def _instanttensor(files: Sequence[str], device: torch.device, _: Mapping[str, Any]) -> Load:
    from instanttensor import safe_open

    def load() -> Mapping[str, Tensor]:
        with safe_open(list(files), framework="pt", device=device.index or 0) as opened:
            return dict(opened.tensors())

    return load


def _runai(files: Sequence[str], device: torch.device, _: Mapping[str, Any]) -> Load:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> Mapping[str, Tensor]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(list(files))
            return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}

    return load


LOADERS: Mapping[str, Callable[[Sequence[str], torch.device, Mapping[str, Any]], Load]] = {
    "warmcast": _warmcast,
    "safetensors": _safetensors,
    "fastsafetensors": _fastsafetensors,
    "instanttensor": _instanttensor,
    "runai_model_streamer": _runai,
}
"""By the name of the module that has to be there."""

_FILES = ("tmpfs", "warm", "cold")
_OVER_HTTP = {"runai_model_streamer": "runai_model_streamer_s3"}
"""The loaders that read from object stores by themselves, and the module which they need to."""


def reads_from(name: str) -> Sequence[str]:
    """The places that a loader reads from; none where it is not installed."""
    if name == "warmcast":
        return (*_FILES, "http")
    if importlib.util.find_spec(name) is None:
        return ()
    over_http = name in _OVER_HTTP and importlib.util.find_spec(_OVER_HTTP[name]) is not None
    return (*_FILES, "http") if over_http else _FILES


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    serve(main)
