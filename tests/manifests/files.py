"""What the file system of a test can do."""

from __future__ import annotations

import os
from pathlib import Path


def direct(folder: Path) -> bool:
    """Whether files in a folder can be read past the page cache."""
    probe = folder / "probe"
    probe.write_bytes(b"x")
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        probe.unlink()
    return True
