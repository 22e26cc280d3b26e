"""The private folder for converted files: created when first asked for, removed at the end.

A process that was killed cannot remove its folder. Each holds a lock on a file in it, which the
system gives up whenever the process ends; the next deploy removes the folders whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from warmcast.flows.errors import WorkFolderFull
from warmcast.flows.progress import nbytes_text
from warmcast.manifests.errors import UsageError

_PREFIX = "warmcast-deploy-"
_LOCK = "lock"


class WorkFolder:
    """A context manager that owns the folder; ``parent`` is the system's default if None."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent or Path(tempfile.gettempdir())
        if not self._parent.is_dir():
            raise UsageError(f"work folder {self._parent}", expected="a folder", found="none")
        self._folder: Path | None = None
        self._lock = -1
        self._parts = 0

    def part(self) -> Path:
        """A new, empty folder inside."""
        if self._folder is None:
            _sweep(self._parent)
            self._folder, self._lock = _create(self._parent)
        self._parts += 1
        part = self._folder / str(self._parts)
        part.mkdir()
        return part

    def need(self, nbytes: int) -> None:
        """Raise :class:`WorkFolderFull` if fewer than ``nbytes`` bytes are free."""
        free = shutil.disk_usage(self._parent).free
        if free < nbytes:
            raise WorkFolderFull(
                f"work folder {self._parent}",
                expected=f"{nbytes_text(nbytes)} for converted files",
                found=f"{nbytes_text(free)} free",
                do="free space, or name another folder with --work",
            )

    def __enter__(self) -> WorkFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            try:
                shutil.rmtree(self._folder)
            finally:
                os.close(self._lock)
                self._folder = None


def _create(parent: Path) -> tuple[Path, int]:
    """A new folder and the lock on it, even if a sweeper takes the lock before us."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        # Another user's, one that is just being made or removed, or one in use.
        with suppress(FileNotFoundError, PermissionError, BlockingIOError, NotADirectoryError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
