"""Folders whose entries are on the disk when a call returns."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def make_folders(folder: Path) -> None:
    """Create a folder and those above it, each synced into its parent."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
        sync(folder.parent)


def sync(folder: Path) -> None:
    """Have a folder's entries on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
