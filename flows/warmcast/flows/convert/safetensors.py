"""Writing safetensors as a stream: memory is bounded by the largest tensor, not by the file.

The library's own writer wants the whole state in memory. The header needs only names, dtypes and
shapes, so it is written first, and each tensor's bytes as they come. Tensors stand in order of
their elements' width, widest first, so that each is aligned to its elements, and in load order
among equals. The same tensors give the same bytes, which is what lets a deploy be run again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from warmcast.flows.errors import InvalidCheckpoint
from warmcast.flows.steps.order import load_order
from warmcast.manifests import dtypes
from warmcast.manifests.header import MAX_NBYTES


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor to be written: its name, safetensors dtype and shape in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The tensor's length in bytes."""
        length = dtypes.nbytes(self.dtype, math.prod(self.shape))
        if length is None:
            raise InvalidCheckpoint(
                f"tensor {self.name!r}",
                expected=f"a shape that fills whole bytes of {self.dtype}",
                found=list(self.shape),
            )
        return length


def shard(tensors: Iterable[StoredTensor], max_nbytes: int) -> list[list[StoredTensor]]:
    """Divide tensors, in load order, into files of at most ``max_nbytes`` bytes of tensors.

    A tensor is never cut: one that is longer has a file of its own.
    """
    files: list[list[StoredTensor]] = [[]]
    filled = 0
    for tensor in sorted(tensors, key=lambda t: load_order(t.name)):
        if files[-1] and filled + tensor.nbytes > max_nbytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.nbytes
    return files


def write_safetensors(
    location: Path,
    tensors: Sequence[StoredTensor],
    data: Callable[[StoredTensor], memoryview],
    metadata: Mapping[str, str],
) -> None:
    """Write a new file; ``data`` gives a tensor's row-major bytes, and is called once for each.

    Raises ``OSError``, and :class:`InvalidCheckpoint` for a header beyond the format's limit.
    """
    ordered = sorted(tensors, key=lambda t: (-dtypes.BITS[t.dtype], load_order(t.name)))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_NBYTES:
        raise InvalidCheckpoint(
            "safetensors header", expected=f"{MAX_NBYTES} bytes at most", found=len(text)
        )
    with location.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            view = data(tensor)
            if len(view) != tensor.nbytes:
                raise InvalidCheckpoint(
                    f"tensor {tensor.name!r}", expected=f"{tensor.nbytes} bytes", found=len(view)
                )
            file.write(view)
