"""A file of a server that reads no ranges: its bytes, kept as they come.

They come once, front to back, and lie in a temporary file without a name, so that ranges can be
read in any order; it goes with whoever holds it, killed or not. If the connection breaks, the
server is asked again from the first byte, and what comes must be what came.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from urllib3 import BaseHTTPResponse

from warmcast.flows.errors import SourceChanged, WorkFolderFull
from warmcast.flows.progress import nbytes_text
from warmcast.flows.upstreams.locks import held
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.stores.http import Attempts, Transient, read_into

_PIECE = 1 << 20

Open = Callable[[Deadline], AbstractContextManager[BaseHTTPResponse]]
"""The answer with the whole file; its body is unread."""


class Spool:
    """The first bytes of a file, more whenever more are asked for. Safe between threads."""

    def __init__(self, open_: Open, size: int, where: str, *, idle: float) -> None:
        self._open = open_
        self._size = size
        self._where = where
        self._idle = idle
        self._file = tempfile.TemporaryFile(prefix="warmcast-", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()
        self._done = 0  # bytes that are kept
        self._place = 0  # where in the file the open answer is
        self._held = ExitStack()
        self._response: BaseHTTPResponse | None = None

    def read_into(self, offset: int, view: memoryview, deadline: Deadline) -> None:
        """Fill ``view`` from ``offset``; both are within the file."""
        end = offset + len(view)
        if self._done < end:
            with held(self._lock, deadline, f"reading {self._where}"):
                self._fetch(end, deadline)
        done = 0
        while done < len(view):
            done += os.preadv(self._file.fileno(), [view[done:]], offset + done)

    def close(self) -> None:
        """Forget the bytes, and end the connection."""
        self._end()
        self._file.close()

    def _fetch(self, end: int, deadline: Deadline) -> None:
        attempts = Attempts(self._where, deadline)
        buffer = memoryview(bytearray(_PIECE))
        while self._done < end:
            try:
                self._take(self._next(buffer, deadline))
            except Transient as failure:
                self._end()
                attempts.wait(failure)
            except BaseException:
                self._end()  # in the middle of a piece
                raise
        if self._done == self._size:
            self._end()

    def _next(self, buffer: memoryview, deadline: Deadline) -> memoryview:
        """The next piece of the open answer; of what came before, not beyond it."""
        deadline.check(f"reading {self._where}")
        if self._response is None:
            self._response = self._held.enter_context(self._open(deadline))
            self._place = 0
        limit = self._done if self._place < self._done else self._size
        piece = buffer[: min(_PIECE, limit - self._place)]
        for _ in read_into(self._response, piece, deadline, self._where, idle=self._idle):
            deadline.check(f"reading {self._where}")
        return piece

    def _take(self, piece: memoryview) -> None:
        if self._place < self._done:
            if os.pread(self._file.fileno(), len(piece), self._place) != piece:
                raise SourceChanged(
                    self._where,
                    expected="to stay as it is while it is deployed",
                    found="other bytes when it was read again",
                    do="deploy it again",
                )
        else:
            self._write(piece)
            self._done += len(piece)
        self._place += len(piece)

    def _write(self, piece: memoryview) -> None:
        written = 0
        try:
            while written < len(piece):
                place = self._done + written
                written += os.pwrite(self._file.fileno(), piece[written:], place)
        except OSError as cause:
            if cause.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise WorkFolderFull(
                tempfile.gettempdir(),
                expected=f"{nbytes_text(self._size)} for {self._where}",
                found="no space left",
                do="free space, or name another folder in TMPDIR",
            ) from cause

    def _end(self) -> None:
        self._response = None
        self._held.close()
