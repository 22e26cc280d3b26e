"""The state dict in what a checkpoint holds, and which of its tensors can be stored.

Accepted: a dict of tensors by name, or one such dict under a name that training frameworks use,
beside others that hold none. Values that are no tensors are left out, and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from warmcast.flows.convert.ties import HIDDEN
from warmcast.flows.errors import InvalidCheckpoint

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Names under which training frameworks keep the weights beside optimizer and step."""

PAIRS = "float4_e2m1fn_x2"  # torch counts pairs, safetensors single elements

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    PAIRS: "F4",
}
"""safetensors' names of torch's dtypes."""


def state_dict(loaded: Any, path: str, kind: type[T]) -> tuple[dict[str, T], list[str]]:
    """The tensors by name, and what was left out; ``kind`` is what a tensor is."""
    if not isinstance(loaded, Mapping):
        raise InvalidCheckpoint(path, expected="a dict of tensors", found=type(loaded).__name__)
    if _has_tensors(loaded, kind):
        return _flat(loaded, path, kind)
    wrapped = [key for key, value in loaded.items() if _is_state_dict(value, kind)]
    if len(wrapped) != 1 or wrapped[0] not in WRAPPERS:
        raise InvalidCheckpoint(
            path,
            expected=f"a dict of tensors, or one under {' or '.join(WRAPPERS)}",
            found=f"tensors under {_names(wrapped)}" if wrapped else f"keys {_names(loaded)}",
            do="save the state dict alone",
        )
    tensors, ignored = _flat(loaded[wrapped[0]], f"{path}: {wrapped[0]}", kind)
    others = [
        f"{path}: {key!r:.80} ({type(v).__name__})"
        for key, v in loaded.items()
        if key not in wrapped
    ]
    return tensors, ignored + others


def _flat(state: Mapping[Any, Any], path: str, kind: type[T]) -> tuple[dict[str, T], list[str]]:
    tensors: dict[str, T] = {}
    ignored = []
    for name, value in state.items():
        if isinstance(value, kind):
            if not isinstance(name, str) or not name:
                raise InvalidCheckpoint(path, expected="names of tensors", found=repr(name)[:80])
            tensors[name] = value
        elif isinstance(value, (Mapping, list, tuple)) and _has_tensors_within(value, kind):
            raise InvalidCheckpoint(
                f"{path}: {name!r}",
                expected="a tensor",
                found=f"a {type(value).__name__} that holds tensors",
                do="save a flat state dict",
            )
        else:
            ignored.append(f"{path}: {name!r:.80} ({type(value).__name__})")
    return tensors, ignored


def _has_tensors(value: Mapping[Any, Any], kind: type) -> bool:
    return any(isinstance(v, kind) for v in value.values())


def _is_state_dict(value: Any, kind: type) -> bool:
    return isinstance(value, Mapping) and _has_tensors(value, kind)


def _has_tensors_within(value: Any, kind: type) -> bool:
    """Whether a container holds tensors at any depth; each container is looked at once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, kind):
            return True
        if isinstance(item, (Mapping, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, Mapping) else item)
    return False


def _names(keys: Any) -> str:
    names = sorted(map(str, keys))
    return ", ".join(name[:40] for name in names[:8]) + (", …" if len(names) > 8 else "")


def dense(path: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, if it is one that can be stored, or :class:`InvalidCheckpoint`."""
    import torch

    check_name(path, name)
    dtype = dtype_of(tensor)
    problem = None
    if tensor.is_quantized:
        problem = "a quantized one"
    elif tensor.is_nested or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        problem = f"a {type(tensor).__name__}"
    elif tensor.layout != torch.strided:
        problem = f"a {str(tensor.layout).removeprefix('torch.')} one"
    elif dtype not in DTYPES or (dtype == PAIRS and not tensor.dim()):
        problem = f"one of {dtype}"
    if problem:
        raise InvalidCheckpoint(
            f"{path}: tensor {name!r}",
            expected="a dense tensor of a dtype that safetensors knows",
            found=problem,
            do="convert it before it is saved",
        )
    return tensor.detach()


def check_name(path: str, name: str) -> None:
    """Raise :class:`InvalidCheckpoint` for a name that is taken."""
    if name.startswith(HIDDEN):
        raise InvalidCheckpoint(
            f"{path}: tensor {name!r}",
            expected="a name of its own",
            found=f"a name that begins with {HIDDEN!r}, which is taken",
        )


def dtype_of(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype, as :data:`DTYPES` has it."""
    return str(tensor.dtype).removeprefix("torch.")
