"""The names of element types: torch's own, and safetensors'."""

from __future__ import annotations

import torch

_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

# A dtype that this torch does not have is one that no container can have either.
_TORCH: dict[str, torch.dtype] = {
    name: getattr(torch, spelled) for name, spelled in _NAMES.items() if hasattr(torch, spelled)
}
_SAFETENSORS = {dtype: name for name, dtype in _TORCH.items()}


def torch_dtype(name: str) -> torch.dtype | None:
    """The torch dtype that safetensors calls ``name``; None if this torch has none."""
    return _TORCH.get(name)


def safetensors_name(dtype: torch.dtype) -> str | None:
    """What safetensors calls a torch dtype; None if it does not know it."""
    return _SAFETENSORS.get(dtype)


def torch_name(dtype: torch.dtype) -> str:
    """A torch dtype's name without the prefix: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a torch tensor of a stored ``(dtype, shape)`` has.

    Torch packs two F4 elements into one; all other types keep their shape.
    """
    if name == "F4" and shape:
        return (*shape[:-1], shape[-1] // 2)
    return shape
