"""An upstream whose files do not lie on this machine, as far as a deploy can tell.

They are read from a folder; each read is written down in a log, which processes share, before
``on_read`` is called with how many reads there were in this process.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from warmcast.flows.errors import SourceChanged
from warmcast.flows.upstreams import UpstreamFile
from warmcast.manifests.checksum import crc32c
from warmcast.manifests.deadline import Deadline

CURRENT: Elsewhere | None = None
"""What ``elsewhere://`` is, where a test has named it among the upstreams."""


def reopen(source: str, deadline: Deadline) -> Elsewhere:
    assert CURRENT is not None
    return CURRENT


class Elsewhere:
    """An ``Upstream``. ``tells``: which of ``sha256``, ``crc32c`` and ``version`` are published."""

    revision = ""

    def __init__(
        self,
        folder: Path,
        tells: str = "version",
        *,
        log: Path | None = None,
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.folder = folder
        self.name = f"elsewhere:{folder.name}"
        self.tells = tells
        self.on_read = on_read
        self.at = threading.local()
        """``path`` and ``offset`` of the read that ``on_read`` is called for."""
        self.reading = 0
        self.most_reading = 0
        self._log = log or folder.with_name(f"{folder.name}.log")
        self._reads = 0
        self._lock = threading.Lock()

    def files(self, deadline: Deadline) -> tuple[UpstreamFile, ...]:
        paths = sorted(p for p in self.folder.rglob("*") if p.is_file())
        return tuple(self.file(str(p.relative_to(self.folder))) for p in paths)

    def file(self, path: str) -> UpstreamFile:
        location = self.folder / path
        data = location.read_bytes() if self.tells != "version" else b""
        return UpstreamFile(
            path,
            location.stat().st_size,
            sha256=hashlib.sha256(data).hexdigest() if "sha256" in self.tells else None,
            crc32c=crc32c(data) if "crc32c" in self.tells else None,
            version=version(location) if "version" in self.tells else "",
        )

    def reader(self, file: UpstreamFile, deadline: Deadline) -> Ranges:
        return Ranges(self, self.folder / file.path, file)

    def local(self, file: UpstreamFile, deadline: Deadline) -> None:
        return None

    def close(self) -> None:
        pass

    @property
    def reads(self) -> list[tuple[str, int, int]]:
        """Path, offset and length of what was read, by all processes."""
        if not self._log.exists():
            return []
        lines = (line.rsplit(" ", 2) for line in self._log.read_text().splitlines())
        return [(path, int(offset), int(length)) for path, offset, length in lines]

    def read_of(self, path: str) -> int:
        """Bytes that were read of a file."""
        return sum(length for found, _, length in self.reads if found == path)

    def note(self, path: str, offset: int, length: int) -> None:
        fd = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{path} {offset} {length}\n".encode())
        os.close(fd)
        with self._lock:
            self._reads += 1
            number = self._reads
            self.reading += 1
            self.most_reading = max(self.reading, self.most_reading)
        self.at.path, self.at.offset = path, offset
        self.on_read(number)
        with self._lock:
            self.reading -= 1


class Ranges:
    local = False
    step = 1 << 20

    def __init__(self, upstream: Elsewhere, location: Path, file: UpstreamFile) -> None:
        self.size = file.size
        self._upstream = upstream
        self._location = location
        self._file = file

    def read_into(self, offset: int, buffer: memoryview, deadline: Deadline) -> None:
        deadline.check("reading")
        if self._file.version and version(self._location) != self._file.version:
            raise SourceChanged(self._file.path, expected=self._file.version, found="another")
        self._upstream.note(self._file.path, offset, len(buffer))
        with self._location.open("rb", buffering=0) as file:
            assert os.preadv(file.fileno(), [buffer], offset) == len(buffer)

    def close(self) -> None:
        pass


def version(location: Path) -> str:
    found = location.stat()
    return f"{found.st_mtime_ns:x}-{found.st_size:x}"
