"""Compare two manifests: what they share, by tensor and by file, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from warmcast.manifests.manifest import Manifest, TensorEntry


@dataclass(frozen=True, slots=True)
class Difference:
    """Names by what became of them, from A to B, and bytes of B; files are blobs of B.

    ``moved_nbytes`` is what a deploy of B sends to an origin that has A.
    """

    same: tuple[str, ...]
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    same_nbytes: int
    changed_nbytes: int
    added_nbytes: int
    shared_files: tuple[str, ...]
    moved_files: tuple[str, ...]
    shared_nbytes: int
    moved_nbytes: int


def compare(a: Manifest, b: Manifest) -> Difference:
    """What became of A's tensors in B. Two are the same if type, shape and every byte are."""
    of_a = {tensor.name: tensor for tensor in a.tensors}
    of_b = {tensor.name: tensor for tensor in b.tensors}
    same = [name for name, tensor in of_b.items() if _same(of_a.get(name), tensor)]
    known = set(same)
    changed = [name for name in of_b if name in of_a and name not in known]
    added = [name for name in of_b if name not in of_a]
    blobs = {file.sha256 for file in a.files}
    shared = [file for file in b.files if file.sha256 in blobs]
    moved = {file.sha256: file for file in b.files if file.sha256 not in blobs}

    def nbytes(names: list[str]) -> int:
        return sum(of_b[name].nbytes for name in names)

    return Difference(
        tuple(same),
        tuple(changed),
        tuple(added),
        tuple(name for name in of_a if name not in of_b),
        nbytes(same),
        nbytes(changed),
        nbytes(added),
        tuple(file.path for file in shared),
        tuple(file.path for file in moved.values()),
        sum(file.size for file in shared),
        sum(file.size for file in moved.values()),
    )


def _same(a: TensorEntry | None, b: TensorEntry) -> bool:
    return a is not None and (
        (a.dtype, a.shape, a.nbytes, a.crc32c, a.sample)
        == (b.dtype, b.shape, b.nbytes, b.crc32c, b.sample)
    )
