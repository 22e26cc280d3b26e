"""Casting floating-point tensors on request, a piece at a time.

Only floats of 16, 32 and 64 bits are cast. Narrower ones come with scales that stand beside them,
without which a wider value means nothing. A finite value that the new dtype cannot hold is an
error: it would become an infinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from warmcast.flows.convert.tensors import Checkpoint, Tensor, memory_of
from warmcast.flows.errors import InvalidCheckpoint
from warmcast.manifests.errors import UsageError

if TYPE_CHECKING:
    import torch

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""torch's names of the dtypes that are cast, and of those that they are cast to."""


def cast(checkpoint: Checkpoint, dtype: str, keep: Iterable[str]) -> Checkpoint:
    """The checkpoint with its floats as ``dtype``, but for names that match one of ``keep``.

    A tensor that is kept under one of its tied names is kept. Raises :class:`UsageError` for a
    pattern that matches no name.
    """
    names: dict[str, list[str]] = {tensor.name: [tensor.name] for tensor in checkpoint.tensors}
    for tie in checkpoint.tied:
        names[tie.of].append(tie.name)
    target = next(name for name, torch_name in FLOATS.items() if torch_name == dtype)
    keep = tuple(keep)
    matched = {p for all_ in names.values() for n in all_ for p in keep if fnmatchcase(n, p)}
    if unmatched := [pattern for pattern in keep if pattern not in matched]:
        raise UsageError(
            f"keep dtype {unmatched[0]!r}", expected="a pattern of tensors' names", found="no match"
        )
    return replace(
        checkpoint,
        tensors=tuple(
            tensor
            if any(fnmatchcase(name, p) for name in names[tensor.name] for p in keep)
            else _cast(tensor, target)
            for tensor in checkpoint.tensors
        ),
    )


def _cast(tensor: Tensor, target: str) -> Tensor:
    if tensor.dtype not in FLOATS or tensor.dtype == target:
        return tensor

    def pieces() -> Iterator[memoryview]:
        import torch

        before, after = getattr(torch, FLOATS[tensor.dtype]), getattr(torch, FLOATS[target])
        for piece in tensor.pieces():
            yield memory_of(cast_values(torch.frombuffer(piece, dtype=before), after, tensor.name))

    return replace(tensor, dtype=target, pieces=pieces, extents=None)


def cast_values(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Values as ``dtype``; :class:`InvalidCheckpoint`, naming the tensor, if one grows infinite."""
    cast_ = values.to(dtype)
    if not cast_.isfinite().all():
        grown = cast_.isinf() & values.isfinite()
        if grown.any():
            raise InvalidCheckpoint(
                f"tensor {name!r}",
                expected=f"values that {str(dtype).removeprefix('torch.')} can hold",
                found=f"{float(values[grown][0]):g}",
                do="cast to bfloat16 or float32, or keep this tensor's dtype",
            )
    return cast_
