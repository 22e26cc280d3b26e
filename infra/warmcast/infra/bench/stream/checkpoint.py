"""The checkpoint that is streamed: safetensors files of random bytes, deployed where they lie.

The origin's blobs and the files that other loaders read are the same files, by hard links, so that
all of them read what is in the same places of the same page cache or disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from warmcast.infra.bench.wire.models import Shape
from warmcast.loader.containers import host_view
from warmcast.manifests.checksum import combine, crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.manifest import (
    CHUNK_SIZE,
    FileEntry,
    Manifest,
    TensorEntry,
    build_manifest,
)
from warmcast.manifests.origin import Origin, Ref, blob_key, now
from warmcast.manifests.sampling import sampled_hash_of

_THREADS = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk: its files, the origin that has them as blobs, and the manifest."""

    files: Sequence[Path]
    origin: str
    manifest: Manifest

    def copied(self, folder: Path, deadline: Deadline) -> Checkpoint:
        """The same in another place."""
        root, source = folder / "origin", self.files[0].parent / "origin"

        def copy(file: FileEntry) -> Path:
            deadline.check("copying the checkpoint")
            blob, path = root / blob_key(file.sha256), folder / file.path
            blob.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / blob_key(file.sha256), blob)
            os.link(blob, path)
            return path

        with ThreadPoolExecutor(_THREADS) as pool:
            files = list(pool.map(copy, self.manifest.files))
        shutil.copytree(source, root, ignore=lambda *_: ["blobs"], dirs_exist_ok=True)
        return Checkpoint(files, root.as_uri(), self.manifest)


def make(folder: Path, shape: Shape, deadline: Deadline) -> Checkpoint:
    """Write a file a layer below ``folder``, and deploy them there."""
    root = folder / "origin"
    # Small values, for a model that is run with them.
    values = torch.empty(shape.layer_nbytes // 2, dtype=torch.bfloat16)
    values.uniform_(-0.03, 0.03, generator=torch.Generator().manual_seed(1))
    unit = values.view(torch.uint8)
    with ThreadPoolExecutor(_THREADS) as pool:
        made = list(
            pool.map(lambda layer: _file(folder, root, shape, layer, unit), range(shape.layers))
        )
    manifest = build_manifest(
        model=shape.name,
        revision="bench",
        upstream="random",
        created_at=now(),
        chunk_size=CHUNK_SIZE,
        files=[file for _, file, _ in made],
        tensors=[tensor for _, _, tensors in made for tensor in tensors],
        config={},
    )
    with Origin.open(root.as_uri()) as origin:
        origin.put_manifest(manifest, deadline)
        origin.move_ref(Ref.parse(shape.ref), manifest.digest, None, deadline)
    return Checkpoint([path for path, _, _ in made], root.as_uri(), manifest)


def settle(files: Sequence[Path]) -> None:
    """Have files written to the disk now, and not while something is measured."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def drop(files: Sequence[Path]) -> None:
    """Have the page cache forget files, as far as it does."""
    settle(files)
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _file(
    folder: Path, root: Path, shape: Shape, layer: int, unit: torch.Tensor
) -> tuple[Path, FileEntry, list[TensorEntry]]:
    header, places = _header(shape, layer)
    # Each file's bytes are others, without making as many random numbers.
    body = host_view(unit.roll(4096 * layer))
    path = folder / f"layer-{layer:05}.safetensors"
    sha256 = hashlib.sha256(header)
    sha256.update(body)
    with path.open("wb") as file:
        file.write(header)
        file.write(body)
    blob = root / blob_key(sha256.hexdigest())
    blob.parent.mkdir(parents=True, exist_ok=True)
    os.link(path, blob)
    size = len(header) + len(body)
    chunks = [_chunk(header, body, begin) for begin in range(0, size, CHUNK_SIZE)]
    whole = 0
    for number, chunk in enumerate(chunks):
        whole = combine(whole, chunk, min(CHUNK_SIZE, size - number * CHUNK_SIZE))
    entry = FileEntry(
        path=path.name,
        size=size,
        sha256=sha256.hexdigest(),
        crc32c=to_hex(whole),
        chunks=tuple(map(to_hex, chunks)),
    )
    tensors = [
        TensorEntry(
            name=name,
            dtype="BF16",
            shape=shape.layer[name.split(".", 2)[2].removesuffix(".weight")],
            file=path.name,
            begin=len(header) + begin,
            end=len(header) + end,
            crc32c=to_hex(crc32c(body[begin:end])),
            sample=sampled_hash_of(name, "BF16", body[begin:end]),
        )
        for name, (begin, end) in places.items()
    ]
    return path, entry, tensors


def _header(shape: Shape, layer: int) -> tuple[bytes, Mapping[str, tuple[int, int]]]:
    places: dict[str, tuple[int, int]] = {}
    header: dict[str, object] = {}
    position = 0
    for name, size in shape.layer.items():
        nbytes = 2
        for length in size:
            nbytes *= length
        full = f"layers.{layer}.{name}.weight"
        places[full] = (position, position + nbytes)
        header[full] = {"dtype": "BF16", "shape": list(size), "data_offsets": list(places[full])}
        position += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _chunk(header: bytes, body: memoryview, begin: int) -> int:
    """The CRC32C of one chunk of the file."""
    end = begin + CHUNK_SIZE
    start = crc32c(header[begin:end]) if begin < len(header) else 0
    return crc32c(body[max(0, begin - len(header)) : max(0, end - len(header))], start)
