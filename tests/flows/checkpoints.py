"""Tensors to deploy, and what makes two of them the same."""

from __future__ import annotations

import torch

from warmcast.flows.convert.state_dict import DTYPES

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
