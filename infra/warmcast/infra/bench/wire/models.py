"""The models that cross the wire: one of large tensors, one of many small ones.

Their bytes are random and their deployment is real, but for one thing: every layer has the same
bytes, so that one blob stands behind all of a model's files. A loader knows tensors by name and
place, and moves, checks and holds each; the disk holds one layer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO

import torch
from torch import nn

from warmcast.loader.containers import host_view
from warmcast.manifests.checksum import combine, crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.header import parse_header
from warmcast.manifests.manifest import (
    CHUNK_SIZE,
    FileEntry,
    Manifest,
    TensorEntry,
    build_manifest,
)
from warmcast.manifests.origin import Origin, Ref, now
from warmcast.manifests.sampling import sampled_hash_of

HIDDEN, INTERMEDIATE, KEYS = 8192, 28672, 1024

LARGE: Mapping[str, tuple[int, ...]] = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
"""A layer of Llama 70B."""

SMALL_TENSORS = 3000
SMALL: Mapping[str, tuple[int, ...]] = {f"part{i:02}": (433_408,) for i in range(30)}
"""A layer of the model of 3,000 tensors, of which there are a hundred: 2.6 GB in all."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: its name, a layer's tensors (bfloat16), and how many layers it has."""

    name: str
    layer: Mapping[str, tuple[int, ...]]
    layers: int

    @property
    def ref(self) -> str:
        """The ref it is deployed under."""
        return f"{self.name}@bench"

    @property
    def layer_nbytes(self) -> int:
        """Bytes of a layer's weights."""
        return sum(2 * math.prod(shape) for shape in self.layer.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the model's weights."""
        return self.layers * self.layer_nbytes

    @property
    def tensors(self) -> int:
        """How many tensors it has."""
        return self.layers * len(self.layer)

    def build(self) -> nn.Module:
        """The module, whose state dict has the tensors' names."""
        model = nn.Module()
        model.layers = nn.ModuleList(_layer(self.layer) for _ in range(self.layers))
        return model


def shapes(nbytes: int, *, scale: int = 1) -> tuple[Shape, Shape]:
    """The large model, of at most ``nbytes`` bytes and one layer at least, and the small one.

    ``scale`` divides every tensor's first dimension, for machines that only have to try it out.
    """
    large = Shape("large", _scaled(LARGE, scale), 1)
    large = Shape("large", large.layer, max(1, nbytes // large.layer_nbytes))
    return large, Shape("small", _scaled(SMALL, scale), SMALL_TENSORS // len(SMALL))


def deploy(origin: Origin, shape: Shape, deadline: Deadline) -> Manifest:
    """Deploy a model of random weights."""
    names = list(shape.layer)
    data = _blob(shape)
    sha256 = hashlib.sha256(data).hexdigest()
    origin.put_blob(sha256, BytesIO(data), len(data), crc32c(data), deadline)
    view = memoryview(data)
    truths = [
        (stored, to_hex(crc32c(view[stored.begin : stored.end])))
        for stored in parse_header(data, len(data), "layer").tensors
    ]
    chunks = tuple(
        to_hex(crc32c(view[begin : begin + CHUNK_SIZE]))
        for begin in range(0, len(data), CHUNK_SIZE)
    )
    whole = _combined(chunks, len(data))
    files, tensors = [], []
    for layer in range(shape.layers):
        path = f"layer-{layer:05}.safetensors"
        files.append(
            FileEntry(path=path, size=len(data), sha256=sha256, crc32c=whole, chunks=chunks)
        )
        for (stored, checksum), name in zip(truths, names, strict=True):
            full = f"layers.{layer}.{name}.weight"
            tensors.append(
                TensorEntry(
                    name=full,
                    dtype="BF16",
                    shape=stored.shape,
                    file=path,
                    begin=stored.begin,
                    end=stored.end,
                    crc32c=checksum,
                    sample=sampled_hash_of(full, "BF16", view[stored.begin : stored.end]),
                )
            )
    manifest = build_manifest(
        model=shape.name,
        revision="bench",
        upstream="random",
        created_at=now(),
        chunk_size=CHUNK_SIZE,
        files=files,
        tensors=tensors,
        config={},
    )
    origin.put_manifest(manifest, deadline)
    origin.move_ref(Ref.parse(shape.ref), manifest.digest, None, deadline)
    return manifest


def _layer(tensors: Mapping[str, tuple[int, ...]]) -> nn.Module:
    root = nn.Module()
    for name, shape in tensors.items():
        module = root
        for part in name.split("."):
            if not hasattr(module, part):
                setattr(module, part, nn.Module())
            module = getattr(module, part)
        weight = torch.empty(shape, dtype=torch.bfloat16)
        module.weight = nn.Parameter(weight, requires_grad=False)
    return root


def _scaled(layer: Mapping[str, tuple[int, ...]], scale: int) -> dict[str, tuple[int, ...]]:
    return {name: (max(1, shape[0] // scale), *shape[1:]) for name, shape in layer.items()}


def _blob(shape: Shape) -> bytes:
    """One layer as a safetensors file."""
    generator = torch.Generator().manual_seed(1)
    position, header, parts = 0, {}, []
    for name, size in shape.layer.items():
        values = torch.empty(size, dtype=torch.bfloat16).uniform_(-1, 1, generator=generator)
        piece = bytes(host_view(values.view(-1).view(torch.uint8)))
        end = position + len(piece)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [position, end]}
        parts.append(piece)
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _combined(chunks: tuple[str, ...], size: int) -> str:
    whole = 0
    for number, chunk in enumerate(chunks):
        whole = combine(whole, int(chunk, 16), min(CHUNK_SIZE, size - number * CHUNK_SIZE))
    return to_hex(whole)
