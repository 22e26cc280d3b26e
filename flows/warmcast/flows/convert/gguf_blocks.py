"""GGUF's block types to float32: blocks of bytes in, a row of values a block out.

Source: the layouts of ``block_*`` and ``dequantize_row_*`` in ggml's ``ggml-common.h`` and
``ggml-quants.c``. Each function takes ``uint8[blocks, bytes]`` and gives ``float32[blocks,
elements]``; the arithmetic is that of ggml, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dequantise(type_: str, blocks: torch.Tensor) -> torch.Tensor:
    """The values of blocks of a type in :data:`DEQUANTISERS`."""
    return DEQUANTISERS[type_](blocks)


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The float16 at a byte of each block, as ``float32[blocks, 1]``."""
    import torch

    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _bits(data: torch.Tensor, width: int, group: int) -> torch.Tensor:
    """Integers of ``width`` bits: the lowest of ``group`` bytes, then their next lowest, …

    ``uint8[blocks, n]`` gives ``uint8[blocks, n * 8 / width]``.
    """
    import torch

    shifts = torch.arange(0, 8, width, dtype=torch.uint8).reshape(1, 1, -1, 1)
    spread = data.reshape(len(data), -1, 1, group) >> shifts
    return (spread & ((1 << width) - 1)).reshape(len(data), -1)


def _each_bit(data: torch.Tensor) -> torch.Tensor:
    """Bits in order, the lowest of the first byte first: ``uint8[blocks, 8 * n]``."""
    import torch

    shifts = torch.arange(8, dtype=torch.uint8)
    return ((data.unsqueeze(-1) >> shifts) & 1).reshape(len(data), -1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_bits(blocks[:, 2:], 4, 16).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _bits(blocks[:, 4:], 4, 16).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    values = _bits(blocks[:, 6:], 4, 16) | (_each_bit(blocks[:, 2:6]) << 4)
    return _half(blocks, 0) * (values.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    values = _bits(blocks[:, 8:], 4, 16) | (_each_bit(blocks[:, 4:8]) << 4)
    return _half(blocks, 0) * values.float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16]
    scale = _half(blocks, 80) * (scales & 15).float()
    least = _half(blocks, 82) * (scales >> 4).float()
    values = _bits(blocks[:, 16:80], 2, 32).reshape(len(blocks), 16, 16).float()
    return (scale.unsqueeze(-1) * values - least.unsqueeze(-1)).reshape(len(blocks), 256)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _bits(blocks[:, 96:104], 4, 8)
    high = _bits(blocks[:, 104:108], 2, 4)
    scale = _half(blocks, 108) * ((low | (high << 4)).float() - 32)
    values = _bits(blocks[:, 32:96], 2, 32).float()
    # A bit of the mask that is not set means four less.
    values -= 4 * (1 - _bits(blocks[:, :32], 1, 32).float())
    return (scale.unsqueeze(-1) * values.reshape(len(blocks), 16, 16)).reshape(len(blocks), 256)


def _scales_and_mins(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q4_K's and Q5_K's scales and minima, times the block's: ``float32[blocks, 8, 1]`` each."""
    import torch

    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1)
    mins = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1)
    return (
        (_half(blocks, 0) * scales.float()).unsqueeze(-1),
        (_half(blocks, 2) * mins.float()).unsqueeze(-1),
    )


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least = _scales_and_mins(blocks)
    values = _bits(blocks[:, 16:], 4, 32).reshape(len(blocks), 8, 32).float()
    return (scale * values - least).reshape(len(blocks), 256)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, least = _scales_and_mins(blocks)
    values = _bits(blocks[:, 48:], 4, 32) | (_bits(blocks[:, 16:48], 1, 32) << 4)
    return (scale * values.reshape(len(blocks), 8, 32).float() - least).reshape(len(blocks), 256)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    scale = (_half(blocks, 208) * scales).unsqueeze(-1)
    values = _bits(blocks[:, :128], 4, 64) | (_bits(blocks[:, 128:192], 2, 32) << 4)
    return (scale * (values.reshape(len(blocks), 16, 16).float() - 32)).reshape(len(blocks), 256)


def _q8_k(blocks: torch.Tensor) -> torch.Tensor:
    import torch

    scale = blocks[:, :4].contiguous().view(torch.float32)
    return scale * blocks[:, 4:260].contiguous().view(torch.int8).float()


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _non_linear(_bits(blocks[:, 2:], 4, 16))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = _bits(blocks[:, 4:8], 4, 1)
    high = _bits(blocks[:, 2:4], 2, 1)
    scale = (_half(blocks, 0) * ((low | (high << 4)).float() - 32)).unsqueeze(-1)
    values = _non_linear(_bits(blocks[:, 8:], 4, 16)).reshape(len(blocks), 8, 32)
    return (scale * values).reshape(len(blocks), 256)


def _non_linear(values: torch.Tensor) -> torch.Tensor:
    import torch

    table = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return torch.tensor(table, dtype=torch.float32)[values.int()]


DEQUANTISERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q8_K": _q8_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
"""What can be dequantised, by the type's name."""
