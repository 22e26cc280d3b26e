"""Mirror a file: measure it, and upload it if the origin does not have its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmcast.flows.local import LocalFile
from warmcast.flows.steps.measure import Measured, Stored, measure
from warmcast.manifests.checksum import from_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.manifest import FileEntry
from warmcast.manifests.origin import Origin, blob_key


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A file that the origin has; ``moved`` tells whether its bytes had to be sent."""

    measured: Measured
    moved: bool

    @property
    def file(self) -> FileEntry:
        """The file's entry in the manifest."""
        return self.measured.file


def mirror_file(
    origin: Origin,
    file: LocalFile,
    tensors: Sequence[Stored],
    deadline: Deadline,
    tick: Callable[[int], None],
    *,
    repair: bool = False,
) -> Mirrored:
    """Measure a file and put its blob into the origin.

    ``tick`` is told each byte twice: once measured, once sent or found there. With ``repair``,
    a blob that is there is read, and replaced if its bytes are wrong. Raises
    :class:`SourceChanged`, and what the store raises.
    """
    with file.opened() as opened:
        measured = measure(
            file.path,
            file.size,
            tensors,
            lambda offset, view: file.read_into(opened, offset, view),
            tick,
        )
    entry = measured.file
    if has_blob(origin, entry, deadline, reread=tick if repair else None):
        tick(entry.size)
        return Mirrored(measured, moved=False)
    # A blob of other bytes than its name says is worth nothing, and upload would keep it.
    origin.store.delete(blob_key(entry.sha256), deadline)
    with file.opened() as opened:
        moved = origin.put_blob(
            entry.sha256, opened, entry.size, from_hex(entry.crc32c), deadline, tick
        )
    return Mirrored(measured, moved)


def has_blob(
    origin: Origin,
    entry: FileEntry,
    deadline: Deadline,
    *,
    reread: Callable[[int], None] | None = None,
) -> bool:
    """Whether the origin has a blob of this size, and CRC32C where the store knows it.

    With ``reread``, which is called now and then and may raise, the blob is read instead of the
    store believed.
    """
    info = origin.blob_info(entry.sha256, deadline)
    if info is None or info.size != entry.size:
        return False
    if info.crc32c is not None and info.crc32c != from_hex(entry.crc32c):
        return False
    if reread is None:
        return True
    found = measure(
        entry.path,
        entry.size,
        (),
        lambda offset, view: origin.read_blob(entry.sha256, offset, view, deadline),
        lambda _: reread(0),
    )
    return found.file.sha256 == entry.sha256
