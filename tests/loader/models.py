"""Small models, and what tests say about their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A layer with a buffer that is saved and one that is computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positions", torch.arange(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu()) * self.scale + self.positions


class Encoder(nn.Module):
    """An embedding, blocks, and a head tied to the embedding, as language models are built."""

    def __init__(self, width: int = 16, depth: int = 2, words: int = 40, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Bag(nn.Module):
    """Named tensors, as parameters (floats) or buffers."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.empty_like(tensor))


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with random weights and saved buffers, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))
    return model


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """What makes two tensors the same, to the bit."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
    return tensor.dtype, tuple(tensor.shape), raw


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Two state dicts hold the same names, dtypes, shapes and bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert bits(found[name]) == bits(tensor), name


def snapshot(model: nn.Module) -> Callable[[], None]:
    """Asserts, when called, that the model holds the same tensor objects, unwritten."""
    rows = [
        (module, kind, name, tensor)
        for module in model.modules()
        for kind in ("_parameters", "_buffers")
        for name, tensor in getattr(module, kind).items()
    ]
    modules = [id(module) for module in model.modules()]
    before = [None if t is None or t.is_meta else t.detach().clone() for *_, t in rows]

    def check() -> None:
        assert [id(module) for module in model.modules()] == modules
        now = [
            (module, kind, name)
            for module in model.modules()
            for kind in ("_parameters", "_buffers")
            for name in getattr(module, kind)
        ]
        assert now == [(module, kind, name) for module, kind, name, _ in rows]
        for (module, kind, name, tensor), values in zip(rows, before, strict=True):
            assert getattr(module, kind)[name] is tensor, name
            assert values is None or bits(values) == bits(tensor), name

    return check


def resident(field: str) -> int:
    """Bytes, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
