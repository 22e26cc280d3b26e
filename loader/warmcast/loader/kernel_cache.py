"""Compiled kernels, kept on disk for the next process.

At a machine's first boot the compiler is read from disk, and takes 0.6 to 0.9 s. The folder is
``WARMCAST_KERNELS``, else ``warmcast/kernels`` in the user's cache folder; set to nothing, nothing
is kept. What is read is as trusted as the code is: the folder has to be this user's or root's (as
in a container's image), nobody else may write to it, and each file tells its own SHA-256. A folder
that cannot be had is no error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def kept(*about: str) -> bytes | None:
    """The kernels that were compiled from this; None where there are none, or not as they were."""
    folder = _folder()
    if folder is None:
        return None
    try:
        data = (folder / _name(about)).read_bytes()
    except OSError:
        return None
    digest, image = data[:_DIGEST], data[_DIGEST:]
    return image if image and hashlib.sha256(image).digest() == digest else None


def keep(image: bytes, *about: str) -> None:
    """Keep what was compiled from this, if that can be done."""
    folder = _folder(make=True)
    if folder is None:
        return
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(hashlib.sha256(image).digest() + image)
        file.flush()
        # Whole or not at all. Where another process has the same by now, it may be damaged.
        new = f"{file.name}.new"
        os.link(file.name, new)
        Path(new).replace(folder / _name(about))


def _name(about: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(about).encode()).hexdigest() + ".cubin"


def _folder(*, make: bool = False) -> Path | None:
    told = os.environ.get("WARMCAST_KERNELS")
    try:
        if told is None:
            caches = os.environ.get("XDG_CACHE_HOME")
            base = Path(caches) if caches else Path.home() / ".cache"
            folder = base / "warmcast" / "kernels"
        elif told:
            folder = Path(told)
        else:
            return None
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except (OSError, RuntimeError):  # nobody's home
        return None
    trusted = about.st_uid in (0, os.geteuid()) and not about.st_mode & 0o022
    return folder if trusted else None
