"""GGUF: llama.cpp's files, one or numbered shards.

Unquantised tensors keep their bytes. Tensors of blocks become ``U8`` of the same bytes, a row of
blocks a row, with their type and their shape in elements in the header's metadata; or float32 on
request. Shapes are row-major, the other way round than GGUF writes them. What the file says of the
model becomes the config where there is no ``config.json``, but for long arrays (a tokenizer's);
all of it stands in ``gguf_metadata.json`` beside the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from warmcast.flows.convert import gguf_blocks
from warmcast.flows.convert.gguf_blocks import DEQUANTISERS
from warmcast.flows.convert.gguf_header import GgufTensor, read_header
from warmcast.flows.convert.tensors import Checkpoint, Files, Tensor, in_files, memory_of
from warmcast.flows.errors import InvalidCheckpoint
from warmcast.flows.steps.weights import add_names

METADATA = "gguf_metadata.json"

_PLAIN = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")
_LONGEST = 256
"""Elements of an array that is taken into the config, at most."""

_PIECE = 1 << 20
"""Bytes of blocks that are dequantised at a time: their values take up to ten times that."""


def open_gguf(files: Files, numbers: Sequence[int], *, dequantise: bool) -> Checkpoint:
    """The tensors of some files; raises :class:`InvalidCheckpoint`."""
    tensors: list[Tensor] = []
    pairs: dict[str, Any] = {}
    holder: dict[str, str] = {}
    for number in numbers:
        header = read_header(files, number)
        path = files.sources[number].path
        add_names(holder, (tensor.name for tensor in header.tensors), path)
        tensors += [_tensor(files, path, t, dequantise=dequantise) for t in header.tensors]
        pairs = header.pairs | pairs
    pairs = {key: _plain(value) for key, value in pairs.items()}
    text = json.dumps(pairs, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
    short = {
        key: value
        for key, value in pairs.items()
        if not isinstance(value, list) or len(value) <= _LONGEST
    }
    return Checkpoint(
        tuple(tensors), config=short, extra={METADATA: text.encode("utf-8", "replace")}
    )


def _tensor(files: Files, path: str, tensor: GgufTensor, *, dequantise: bool) -> Tensor:
    if tensor.type in _PLAIN:
        return in_files(files, tensor.name, tensor.type, tensor.shape, (tensor.extent,))
    elements, nbytes = tensor.block
    if not dequantise:
        shape = (*tensor.shape[:-1], tensor.shape[-1] // elements * nbytes)
        note = {"type": tensor.type, "shape": list(tensor.shape)}
        return in_files(files, tensor.name, "U8", shape, (tensor.extent,), note)
    if tensor.type not in DEQUANTISERS:
        raise InvalidCheckpoint(
            f"{path}: tensor {tensor.name!r}",
            expected=f"a type that can be dequantised: {', '.join(DEQUANTISERS)}",
            found=tensor.type,
            do="deploy its blocks as they are",
        )
    return Tensor(tensor.name, "F32", tensor.shape, lambda: _values(files, tensor))


def _values(files: Files, tensor: GgufTensor) -> Iterator[memoryview]:
    import torch

    _, nbytes = tensor.block
    for piece in files.pieces((tensor.extent,), _PIECE // nbytes * nbytes):
        blocks = torch.frombuffer(piece, dtype=torch.uint8).reshape(-1, nbytes)
        yield memory_of(gguf_blocks.dequantise(tensor.type, blocks).contiguous())


def _plain(value: Any) -> Any:
    """A value as JSON has it: what is no number is a string."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
