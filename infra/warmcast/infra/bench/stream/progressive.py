"""A model that runs while it is loaded: ``python -m warmcast.infra.bench.stream.progressive JSON``.

The JSON names the device, the origin, the ref, the widths and the number of layers, and the tokens
of a prompt. Told are the seconds of a whole load, of a forward alone, and from the beginning of a
progressive load to the forward's output; which part of the bytes was there when the first layer
ran; and whether the outputs were the same, bit by bit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from warmcast.infra.bench.stream.decoder import Decoder, Sizes
from warmcast.infra.demo.channel import Channel, serve
from warmcast.loader import Loader

_TIMES = 4
"""How often each is done; the first has what comes but once in a process, the best is told."""


def main(channel: Channel) -> None:
    """Load, run, tell."""
    told = json.loads(sys.argv[1])
    device = torch.device(told["device"])
    sizes = Sizes(**told["sizes"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randn((1, told["tokens"], sizes.hidden), generator=generator)
    prompt = prompt.to(device, torch.bfloat16)
    loader = Loader(told["origin"])

    def skeleton() -> Decoder:
        with loader.skeleton():
            return Decoder(sizes, told["layers"])

    load = partial(loader.load, ref=told["ref"], device=device)
    loads, forwards, outputs, first = [], [], [], 0.0
    same = True
    with torch.no_grad(), loader:
        for _ in range(_TIMES):
            model = skeleton()
            loads.append(_seconds(device, partial(load, model))[0])
        for _ in range(_TIMES):
            seconds, expected = _seconds(device, partial(model, prompt))
            forwards.append(seconds)
        for _ in range(_TIMES):
            model = skeleton()
            seconds, (output, arrived) = _seconds(
                device, partial(_progressively, loader, load, model, prompt)
            )
            outputs.append(seconds)
            first = max(first, arrived / loader.finish(model).bytes)
            same = same and torch.equal(output, expected)
    channel.tell(
        {
            "load": min(loads),
            "compute": min(forwards),
            "first_output": min(outputs),
            "first_layer": first,
            "same": same,
        }
    )
    channel.wait_for("end")


def _progressively(
    loader: Loader, load: Callable[..., Any], model: Decoder, prompt: Tensor
) -> tuple[Tensor, int]:
    """The output, and the bytes that were there when the first layer multiplied."""
    there: list[int] = []
    load(model, progressive=True)
    attention: Any = model.layers[0].self_attn
    hook = attention.q_proj.register_forward_pre_hook(
        lambda *_: there.append(loader.arrived(model))
    )
    output = model(prompt)
    hook.remove()
    return output, there[0]


def _seconds(device: torch.device, do: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = do()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, result


if __name__ == "__main__":
    serve(main)
