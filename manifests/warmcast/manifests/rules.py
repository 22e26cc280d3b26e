"""What a manifest must satisfy beyond the types of its fields.

Each rule guards something that a loader relies on without looking again; a manifest that breaks
one is refused with the field named.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from warmcast.manifests import dtypes
from warmcast.manifests.canonical import digest
from warmcast.manifests.checksum import combine, from_hex, to_hex
from warmcast.manifests.errors import InvalidManifest, UsageError
from warmcast.manifests.identity import model_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmcast.manifests.manifest import (
        Layout,
        Manifest,
        Shard,
        SliceEntry,
        TensorEntry,
        TiedEntry,
    )


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raise :class:`InvalidManifest`, naming the field, for the first rule that is broken."""
    _check_files(manifest, where)
    _check_tensors(manifest, where)
    _check_tied(manifest, where)
    _check_keys(manifest, where)
    keys: set[str] = set()
    for index, layout in enumerate(manifest.layouts):
        field = f"{where}: layouts.{index}"
        if layout.mesh_key in keys:
            raise InvalidManifest(f"{field}.mesh_key", expected="one layout a mesh", found="two")
        keys.add(layout.mesh_key)
        _check_layout(manifest, layout, field)


def unsafe_path(path: str) -> str | None:
    """What makes a path unsafe to create under a folder, or None if nothing does."""
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "a control character"
    if "\\" in path or ":" in path.split("/", 1)[0]:
        return "a backslash or a drive"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "an empty part, '.' or '..'"
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in path.split("/")):
        return "a part over 255 bytes"
    return None


def _check_files(manifest: Manifest, where: str) -> None:
    paths: set[str] = set()
    for index, file in enumerate(manifest.files):
        field = f"{where}: files.{index}.path"
        if problem := unsafe_path(file.path):
            raise InvalidManifest(
                field, expected="a relative path", found=f"{problem} in {file.path!r}"
            )
        # Two spellings of one Unicode text look the same to people, and are one file to file
        # systems that normalise. Upper and lower case differ, as they do on Linux and in git.
        path = unicodedata.normalize("NFC", file.path)
        if path in paths:
            raise InvalidManifest(field, expected="paths that differ", found=f"{file.path!r} twice")
        paths.add(path)
    for path in paths:
        parents = path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            if "/".join(parents[:depth]) in paths:
                raise InvalidManifest(
                    f"{where}: files",
                    expected="a path to be a file or a folder",
                    found=f"{'/'.join(parents[:depth])!r} as both",
                )
    for index, file in enumerate(manifest.files):
        field = f"{where}: files.{index}.chunks"
        needed = -(-file.size // manifest.chunk_size)
        if len(file.chunks) != needed:
            raise InvalidManifest(
                field, expected=f"{needed} checksums for {file.size} bytes", found=len(file.chunks)
            )
        whole = 0
        for number, chunk in enumerate(file.chunks):
            length = min(manifest.chunk_size, file.size - number * manifest.chunk_size)
            whole = combine(whole, from_hex(chunk), length)
        if whole != from_hex(file.crc32c):
            raise InvalidManifest(
                field, expected=f"checksums that combine to {file.crc32c}", found=to_hex(whole)
            )


def _check_tensors(manifest: Manifest, where: str) -> None:
    by_file: dict[str, list[TensorEntry]] = {}
    names: set[str] = set()
    for index, tensor in enumerate(manifest.tensors):
        field = f"{where}: tensors.{index}"
        if tensor.name in names:
            raise InvalidManifest(f"{field}.name", expected="unique names", found=repr(tensor.name))
        names.add(tensor.name)
        if tensor.dtype not in dtypes.BITS:
            raise InvalidManifest(
                f"{field}.dtype", expected="a safetensors dtype", found=repr(tensor.dtype)[:40]
            )
        file = manifest.file.get(tensor.file)
        if file is None:
            raise InvalidManifest(
                f"{field}.file", expected="a path among the files", found=repr(tensor.file)
            )
        if not 0 <= tensor.begin <= tensor.end <= file.size:
            raise InvalidManifest(
                f"{field}.end",
                expected=f"a range inside the {file.size} bytes of {file.path!r}",
                found=f"{tensor.begin} to {tensor.end}",
            )
        numel = dtypes.numel(tensor.shape)
        needed = None if numel is None else dtypes.nbytes(tensor.dtype, numel)
        if needed != tensor.nbytes:
            raise InvalidManifest(
                f"{field}.shape",
                expected=f"a shape of {tensor.nbytes} bytes of {tensor.dtype}",
                found=f"{list(tensor.shape)}: {'no number of' if needed is None else needed} bytes",
            )
        by_file.setdefault(tensor.file, []).append(tensor)
    for path, tensors in by_file.items():
        tensors.sort(key=lambda t: (t.begin, t.end))
        # The header's length is not in the manifest; the first tensor begins where it ends.
        position = tensors[0].begin
        for tensor in tensors:
            if tensor.begin != position:
                kind = "a gap" if tensor.begin > position else "an overlap"
                raise InvalidManifest(
                    f"{where}: tensors: {tensor.name!r} in {path!r}",
                    expected=f"to begin at byte {position}",
                    found=f"{tensor.begin}, {kind}",
                )
            position = tensor.end
        if position != manifest.file[path].size:
            raise InvalidManifest(
                f"{where}: tensors of {path!r}",
                expected=f"to fill the file's {manifest.file[path].size} bytes",
                found=f"an end at byte {position}",
            )


def _check_tied(manifest: Manifest, where: str) -> None:
    names = set(manifest.tensor)
    for index, tied in enumerate(manifest.tied):
        field = f"{where}: tied.{index}"
        if tied.name in names:
            raise InvalidManifest(f"{field}.name", expected="unique names", found=repr(tied.name))
        names.add(tied.name)
        base = manifest.tensor.get(tied.of)
        if base is None:
            raise InvalidManifest(
                f"{field}.of", expected="a stored tensor's name", found=repr(tied.of)
            )
        _check_view(tied, base, field)


def _check_view(tied: TiedEntry, base: TensorEntry, field: str) -> None:
    if len(tied.stride) != len(tied.shape):
        raise InvalidManifest(
            f"{field}.stride", expected=f"{len(tied.shape)} strides", found=len(tied.stride)
        )
    if dtypes.numel(tied.shape) is None:
        raise InvalidManifest(
            f"{field}.shape", expected="a shape that fits memory", found=list(tied.shape)
        )
    base_numel = dtypes.numel(base.shape) or 0
    if 0 in tied.shape:
        last = tied.offset - 1  # a view of nothing may stand at the end
    else:
        last = tied.offset + sum(
            (length - 1) * stride for length, stride in zip(tied.shape, tied.stride, strict=True)
        )
    if last >= base_numel:
        raise InvalidManifest(
            f"{field}.offset",
            expected=f"a view inside the {base_numel} elements of {tied.of!r}",
            found=f"one that reaches element {last}",
        )


def _check_keys(manifest: Manifest, where: str) -> None:
    hashed = digest(manifest.config)
    if manifest.config_hash != hashed:
        raise InvalidManifest(f"{where}: config_hash", expected=hashed, found=manifest.config_hash)
    key = model_key(manifest.config, ((f.path, f.size, f.crc32c, f.sha256) for f in manifest.files))
    if manifest.model_key != key:
        raise InvalidManifest(f"{where}: model_key", expected=key, found=manifest.model_key)


def _check_layout(manifest: Manifest, layout: Layout, field: str) -> None:
    try:
        mesh = layout.mesh.mesh()
    except UsageError as cause:
        raise InvalidManifest(f"{field}: {cause}") from None
    if layout.mesh_key != mesh.key:
        raise InvalidManifest(f"{field}.mesh_key", expected=mesh.key, found=layout.mesh_key)
    if len(layout.ranks) != mesh.size:
        raise InvalidManifest(
            f"{field}.ranks", expected=f"{mesh.size} ranks", found=len(layout.ranks)
        )
    for rank, slices in enumerate(layout.ranks):
        seen: set[str] = set()
        for entry in slices:
            place = f"{field}.ranks.{rank}: {entry.name!r}"
            tensor = manifest.tensor.get(entry.name)
            if tensor is None or entry.name in seen:
                raise InvalidManifest(place, expected="each a stored tensor's name, once")
            seen.add(entry.name)
            _check_slice(entry, tensor, place)
    if layout.shards and len(layout.shards) != mesh.size:
        raise InvalidManifest(
            f"{field}.shards",
            expected=f"one for each of {mesh.size} ranks",
            found=len(layout.shards),
        )
    for rank, shard in enumerate(layout.shards):
        slices_of = {entry.name: entry for entry in layout.ranks[rank]}
        _check_shard(manifest, shard, slices_of, f"{field}.shards.{rank}")


def _check_shard(
    manifest: Manifest, shard: Shard, slices: Mapping[str, SliceEntry], field: str
) -> None:
    """Each copy is as long as what the rank holds, and the copies fill the file to its end."""
    file = manifest.file.get(shard.file)
    if file is None:
        raise InvalidManifest(
            f"{field}.file", expected="a path among the files", found=repr(shard.file)
        )
    if not shard.tensors:
        raise InvalidManifest(f"{field}.tensors", expected="what the file holds", found="nothing")
    seen: set[str] = set()
    position = shard.tensors[0].begin
    for copy in shard.tensors:
        place = f"{field}: {copy.name!r}"
        entry = slices.get(copy.name)
        if entry is None or copy.name in seen:
            raise InvalidManifest(place, expected="each a tensor that the rank holds, once")
        seen.add(copy.name)
        tensor = manifest.tensor[copy.name]
        numel = dtypes.numel(entry.shape_of(tensor.shape))
        needed = None if numel is None else dtypes.nbytes(tensor.dtype, numel)
        if copy.end - copy.begin != needed:
            raise InvalidManifest(
                place,
                expected=f"{needed} bytes, as the rank holds of it",
                found=copy.end - copy.begin,
            )
        if copy.begin != position:
            kind = "a gap" if copy.begin > position else "an overlap"
            raise InvalidManifest(
                place, expected=f"to begin at byte {position}", found=f"{copy.begin}, {kind}"
            )
        position = copy.end
    if position != file.size:
        raise InvalidManifest(
            f"{field}.tensors",
            expected=f"to fill the {file.size} bytes of {file.path!r}",
            found=f"an end at byte {position}",
        )


def _check_slice(entry: SliceEntry, tensor: TensorEntry, place: str) -> None:
    if entry.axis is None:
        if entry.start or entry.length:
            raise InvalidManifest(
                place,
                expected="start and length 0 where there is no axis",
                found=f"{entry.start} and {entry.length}",
            )
    elif entry.axis >= len(tensor.shape):
        raise InvalidManifest(place, expected=f"an axis of {list(tensor.shape)}", found=entry.axis)
    elif entry.start + entry.length > tensor.shape[entry.axis]:
        raise InvalidManifest(
            place,
            expected=f"a slice of {tensor.shape[entry.axis]} along axis {entry.axis}",
            found=f"{entry.start} to {entry.start + entry.length}",
        )
    elif dtypes.BITS[tensor.dtype] % 8:
        # Elements narrower than a byte cannot be cut at an arbitrary place.
        raise InvalidManifest(place, expected="whole bytes an element to slice", found=tensor.dtype)
    whole = entry.shape_of(tensor.shape) == tensor.shape
    truth, found = (tensor.crc32c, tensor.sample), (entry.crc32c, entry.sample)
    if whole and truth != found:
        raise InvalidManifest(
            place,
            expected=f"the whole tensor's truth {' '.join(truth)}",
            found=" ".join(found),
        )
