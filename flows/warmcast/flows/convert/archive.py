"""The zip archive that ``torch.save`` writes, read as hostile input.

Stored entries only (a compressed one could be a bomb), each inside the file, no two of them over
the same bytes, none named twice, each with its right CRC-32. An archive may stand inside a larger
file, as those of a distributed checkpoint do.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from warmcast.flows.convert.tensors import Extent, Files
from warmcast.flows.errors import InvalidCheckpoint

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_SMALL = 1 << 18
_WINDOW = 1 << 26
_MAP = mmap.MAP_SHARED | mmap.MAP_POPULATE
_WORKERS = 2
_SHARE, _SHARES = 1 << 26, 64


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive's entries by their names below its root folder, and their CRC-32s.

    ``checksums`` is empty where ``torch.save`` was told to write none.
    """

    path: str
    entries: Mapping[str, Extent]
    checksums: Mapping[str, int]


def open_archive(files: Files, extent: Extent, path: str) -> Archive:
    """The archive in an extent; ``path`` names it in errors (:class:`InvalidCheckpoint`)."""
    try:
        with zipfile.ZipFile(_View(files, extent)) as archive:
            found = archive.infolist()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, struct.error) as cause:
        raise InvalidCheckpoint(
            path, expected="a whole checkpoint", found=cause, do="fetch it again"
        ) from None
    roots = {e.filename.partition("/")[0] for e in found if e.filename.endswith("/data.pkl")}
    entries: dict[str, Extent] = {}
    checksums: dict[str, int] = {}
    for entry in found:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise InvalidCheckpoint(
                f"{path}: {entry.filename}",
                expected="entries that are not compressed, as torch.save writes them",
                found="a compressed one",
                do="save it again with torch.save",
            )
        root, _, name = entry.filename.partition("/")
        if len(roots) != 1 or root not in roots or name in entries:
            raise InvalidCheckpoint(
                path,
                expected="a checkpoint as torch.save writes it, with one data.pkl",
                found=f"an archive with {entry.filename!r:.80}",
            )
        entries[name] = _extent_of(files, extent, entry, path)
        checksums[name] = entry.CRC
    if "data.pkl" not in entries:
        raise InvalidCheckpoint(path, expected="a data.pkl in it", found="none")
    _check_disjoint(entries, path)
    # torch.save leaves them all out on demand (set_crc32_options).
    return Archive(path, entries, checksums if any(checksums.values()) else {})


class Checksums:
    """Holds archives' entries to their CRC-32s in threads of its own, beside the conversion."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_WORKERS, "checksums")
        self._ended = threading.Event()
        self._waiting: list[Future[None]] = []

    def __enter__(self) -> Checksums:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)

    def add(self, files: Files, archive: Archive) -> None:
        """Begin with an archive; a large one is divided among the threads."""
        names = sorted(archive.checksums, key=lambda name: archive.entries[name].offset)
        whole = sum(archive.entries[name].nbytes for name in names)
        shares: list[list[str]] = [[]]
        share = 0
        for name in names:
            share += archive.entries[name].nbytes
            shares[-1].append(name)
            if share >= max(_SHARE, whole // _SHARES):
                shares.append([])
                share = 0
        for part in shares:
            if part:
                location = files.sources[archive.entries[part[0]].file].location
                self._waiting.append(self._pool.submit(self._check, archive, part, location))

    def result(self) -> None:
        """Wait; raise :class:`InvalidCheckpoint` for the first entry that is wrong."""
        for future in self._waiting:
            future.result()

    def _check(self, archive: Archive, names: Iterable[str], location: str) -> None:
        descriptor = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for name in names:
                if self._ended.is_set():
                    return
                if _crc32(descriptor, archive.entries[name]) != archive.checksums[name]:
                    raise _damaged(archive.path, name)
        finally:
            os.close(descriptor)


def _crc32(descriptor: int, extent: Extent) -> int:
    """An extent's CRC-32: of small ones as they are read, of others as they are mapped."""
    if extent.nbytes <= _SMALL:
        return zlib.crc32(os.pread(descriptor, extent.nbytes, extent.offset))
    found = 0
    end = extent.offset + extent.nbytes
    # Windows begin where pages do, but for the first, which begins in one.
    start = extent.offset - extent.offset % mmap.ALLOCATIONGRANULARITY
    for begin in range(start, end, _WINDOW):
        length = min(_WINDOW, end - begin)
        with (
            mmap.mmap(descriptor, length, flags=_MAP, prot=mmap.PROT_READ, offset=begin) as window,
            memoryview(window) as view,
        ):
            found = zlib.crc32(view[max(0, extent.offset - begin) :], found)
    return found


def check_entry(files: Files, archive: Archive, name: str) -> bytes:
    """A small entry's bytes, held to its CRC-32 at once."""
    data = files.read(archive.entries[name])
    if archive.checksums and zlib.crc32(data) != archive.checksums[name]:
        raise _damaged(archive.path, name)
    return data


def _damaged(path: str, name: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(
        f"{path}: {name}",
        expected="bytes that match their CRC-32",
        found="others",
        do="the file is damaged; fetch it again",
    )


def _extent_of(files: Files, within: Extent, entry: zipfile.ZipInfo, path: str) -> Extent:
    """Where an entry's bytes lie in the file; the local header tells where they begin."""
    header = Extent(within.file, within.offset + entry.header_offset, _LOCAL_HEADER.size)
    begin = entry.header_offset + _LOCAL_HEADER.size
    if entry.header_offset >= 0 and begin <= within.nbytes:
        magic, name_length, extra_length = _LOCAL_HEADER.unpack(files.read(header))
        begin += name_length + extra_length
        if magic == b"PK\x03\x04" and begin + entry.file_size <= within.nbytes:
            return Extent(within.file, within.offset + begin, entry.file_size)
    raise InvalidCheckpoint(
        f"{path}: {entry.filename}",
        expected="an entry inside the archive",
        found=f"{entry.file_size} bytes at {entry.header_offset} of {within.nbytes}",
        do="the file is damaged; fetch it again",
    )


def _check_disjoint(entries: Mapping[str, Extent], path: str) -> None:
    end = 0
    for name, extent in sorted(entries.items(), key=lambda item: item[1].offset):
        if extent.nbytes and extent.offset < end:
            raise InvalidCheckpoint(
                f"{path}: {name}", expected="entries side by side", found="one over another"
            )
        end = max(end, extent.offset + extent.nbytes)


class _View(io.RawIOBase):
    """An extent as a file of its own, as :mod:`zipfile` wants one."""

    def __init__(self, files: Files, extent: Extent) -> None:
        self._files, self._extent, self._position = files, extent, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._extent.nbytes}
        position = start[whence] + offset
        if position < 0:
            raise ValueError("a position before the archive")
        self._position = position
        return position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        count = max(0, min(len(view), self._extent.nbytes - self._position))
        where = Extent(self._extent.file, self._extent.offset + self._position, count)
        view[:count] = self._files.read(where)
        self._position += count
        return count
