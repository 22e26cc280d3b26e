"""Tensors to deploy, and what makes two of them the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from warmcast.flows.convert import process
from warmcast.flows.convert.archive import Checksums
from warmcast.flows.convert.child import Format, open_format
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.convert.state_dict import DTYPES
from warmcast.flows.convert.tensors import Checkpoint, Files
from warmcast.flows.local import LocalFile

TORCH = {name: getattr(torch, dtype) for dtype, name in DTYPES.items()}
"""torch's dtypes by safetensors' names."""


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """What makes two tensors the same, to the bit."""
    flat = tensor.detach().contiguous().reshape(-1)
    raw = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
    return tensor.dtype, tuple(tensor.shape), raw


def every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of random bits of each dtype that torch can pickle and safetensors store."""
    generator = torch.Generator().manual_seed(7)
    state = {}
    for name, dtype in TORCH.items():
        raw = torch.randint(0, 256, (24,), dtype=torch.uint8, generator=generator)
        if dtype == torch.bool:
            raw = raw % 2
        state[f"layers.0.{name}"] = raw.view(dtype)
    return state


def values(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The stored tensors of an open checkpoint."""
    state = {}
    for tensor in checkpoint.tensors:
        data = bytearray()
        for piece in tensor.pieces():
            data += piece
        raw = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
        state[tensor.name] = raw.view(TORCH[tensor.dtype]).reshape(tensor.shape)
    return state


def opened(
    format_: Format,
    paths: Iterable[Path],
    options: ConvertOptions | None = None,
    change=lambda checkpoint: checkpoint,
) -> tuple[dict[str, torch.Tensor], Checkpoint]:
    """What the child reads of files, in this process; ``change`` is done before it is read."""
    sources = [process.source_of(LocalFile.of(path.name, path)) for path in paths]
    with Files(sources) as files, Checksums() as checksums:
        found = open_format(
            format_, files, range(len(sources)), options or ConvertOptions(), checksums
        )
        found = change(found)
        state = values(found)
        checksums.result()
    return state, found
