"""A small deployment that is valid in every part, made of real bytes, for tests to use or break."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.header import parse_header
from warmcast.manifests.identity import Mesh
from warmcast.manifests.manifest import (
    FileEntry,
    Layout,
    Manifest,
    MeshRecord,
    SliceEntry,
    TensorEntry,
    TiedEntry,
    build_manifest,
)
from warmcast.manifests.sampling import sampled_hash_of

CHUNK_SIZE = 4096
CREATED_AT = "2026-01-31T23:59:59Z"
MESH = Mesh.grid({"tp": 2}, {"layers.*.weight": "tp:0"})


@dataclass(frozen=True, slots=True)
class Deployment:
    """A manifest, and its files' bytes by path."""

    manifest: Manifest
    files: Mapping[str, bytes]


def counting(nbytes: int) -> bytes:
    """Bytes of every value and no short period."""
    return bytes(i * 7 % 251 for i in range(nbytes))


def safetensors_file(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A file of ``(dtype, shape, bytes)`` by name, in that order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        end = position + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(t[2] for t in tensors.values())


def file_entry(path: str, data: bytes, chunk_size: int = CHUNK_SIZE) -> FileEntry:
    """What a manifest says of a file."""
    return FileEntry(
        path=path,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        crc32c=to_hex(crc32c(data)),
        chunks=tuple(
            to_hex(crc32c(data[start : start + chunk_size]))
            for start in range(0, len(data), chunk_size)
        ),
    )


def tensor_entries(path: str, data: bytes) -> list[TensorEntry]:
    """What a manifest says of a safetensors file's tensors, in order of their place."""
    return [
        TensorEntry(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            file=path,
            begin=tensor.begin,
            end=tensor.end,
            crc32c=to_hex(crc32c(data[tensor.begin : tensor.end])),
            sample=sampled_hash_of(tensor.name, tensor.dtype, data[tensor.begin : tensor.end]),
        )
        for tensor in parse_header(data, len(data), path).tensors
    ]


def slice_entry(tensor: TensorEntry, data: bytes, start: int, length: int) -> SliceEntry:
    """Rows ``start`` to ``start + length`` of a tensor; ``data`` is its file's bytes."""
    row = tensor.nbytes // tensor.shape[0]
    part = data[tensor.begin + start * row : tensor.begin + (start + length) * row]
    return SliceEntry(
        name=tensor.name,
        axis=0,
        start=start,
        length=length,
        crc32c=to_hex(crc32c(part)),
        sample=sampled_hash_of(tensor.name, tensor.dtype, part),
    )


def deployment() -> Deployment:
    """Two files, five tensors of several dtypes, one tied, and a layout for two ranks."""
    weights = safetensors_file(
        {
            "embed.weight": ("F32", (16, 8), counting(512)),
            "layers.0.weight": ("BF16", (64, 48), counting(6144)),
            "layers.0.scale": ("F8_E4M3", (), b"\x38"),
            "layers.0.empty": ("F32", (0, 4), b""),
            "layers.0.packed": ("F4", (3, 2), b"\x01\x23\x45"),
        }
    )
    config = {"hidden_size": 8, "rope_theta": 10000.0, "names": ["ä", "b"], "nested": {"x": None}}
    files = {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": weights,
        "empty/file": b"",
    }
    tensors = tensor_entries("model.safetensors", weights)
    split = tensors[1]
    ranks = tuple(
        tuple(
            slice_entry(tensor, weights, rank * 32, 32)
            if tensor is split
            else SliceEntry(name=tensor.name, crc32c=tensor.crc32c, sample=tensor.sample)
            for tensor in tensors
        )
        for rank in range(MESH.size)
    )
    layout = Layout(
        mesh=MeshRecord(
            dimensions=MESH.dimensions, coordinates=MESH.coordinates, plan=dict(MESH.plan)
        ),
        mesh_key=MESH.key,
        ranks=ranks,
    )
    manifest = build_manifest(
        model="minilm",
        revision="r1",
        upstream="file:///models/minilm",
        created_at=CREATED_AT,
        chunk_size=CHUNK_SIZE,
        files=[file_entry(path, data) for path, data in files.items()],
        tensors=tensors,
        tied=[
            TiedEntry(name="head.weight", of="embed.weight", shape=(16, 8), stride=(8, 1), offset=0)
        ],
        config=config,
        layouts=[layout],
    )
    return Deployment(manifest, files)
