"""Verify: re-read every blob of a manifest and name what is wrong.

It is the measuring pass over the origin's bytes, held against the manifest: the size, the SHA-256,
each chunk's CRC32C, each tensor's CRC32C and sampled hash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from warmcast.flows.runner import InProcess, Ticker
from warmcast.flows.steps.measure import Measured, measure
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import NotFound
from warmcast.manifests.manifest import FileEntry, Manifest, TensorEntry
from warmcast.manifests.origin import Origin


@dataclass(frozen=True, slots=True)
class Problem:
    """One file whose blob is not what the manifest says, and how."""

    path: str
    sha256: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: blob {self.sha256}: {self.what}"


def verify(
    origin: Origin,
    manifest: Manifest,
    deadline: Deadline,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Problem]:
    """Re-read all blobs, a few at once; the problems in order of the files.

    ``advance`` is told the bytes that were read. Raises what the store raises, but for a blob
    that is missing or too short, which is a problem to report.
    """
    ticker = Ticker(deadline, advance)
    found = InProcess(ticker).map(
        "verify",
        lambda file: _verify(origin, manifest, file, deadline, ticker),
        manifest.files,
        lambda file: file.path,
    )
    return [problem for problem in found if problem is not None]


def _verify(
    origin: Origin,
    manifest: Manifest,
    file: FileEntry,
    deadline: Deadline,
    tick: Callable[[int], None],
) -> Problem | None:
    info = origin.blob_info(file.sha256, deadline)
    if info is None:
        return Problem(file.path, file.sha256, "missing")
    if info.size != file.size:
        return Problem(
            file.path,
            file.sha256,
            f"expected {file.size} bytes, found {info.size}: truncated"
            if info.size < file.size
            else f"expected {file.size} bytes, found {info.size}",
        )
    tensors = [tensor for tensor in manifest.tensors if tensor.file == file.path]
    try:
        measured = measure(
            file.path,
            file.size,
            tensors,
            lambda offset, view: origin.read_blob(file.sha256, offset, view, deadline),
            tick,
            manifest.chunk_size,
        )
    except NotFound:
        return Problem(file.path, file.sha256, "missing: it was removed while it was read")
    what = _difference(measured, file, tensors, manifest.chunk_size)
    return Problem(file.path, file.sha256, what) if what else None


def _difference(
    measured: Measured, file: FileEntry, tensors: list[TensorEntry], chunk_size: int
) -> str:
    """What is wrong, in words; empty if nothing is."""
    found = measured.file
    chunks = [i for i, (a, b) in enumerate(zip(file.chunks, found.chunks, strict=True)) if a != b]
    by_name = {tensor.name: tensor for tensor in measured.tensors}
    wrong = [tensor.name for tensor in tensors if by_name[tensor.name] != tensor]
    parts = []
    if chunks:
        begin = chunks[0] * chunk_size
        parts.append(
            f"{len(chunks)} of {len(file.chunks)} chunks have another CRC32C, the first at bytes "
            f"{begin} to {min(begin + chunk_size, file.size)} (expected "
            f"{file.chunks[chunks[0]]}, found {found.chunks[chunks[0]]})"
        )
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        parts.append(f"wrong tensors: {', '.join(wrong[:5])}{more}")
    if found.sha256 != file.sha256:
        parts.append(f"SHA-256 is {found.sha256}")
    return "; ".join(parts)
