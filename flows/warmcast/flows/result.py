"""What a deploy did, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from warmcast.flows.progress import nbytes_text
from warmcast.manifests.manifest import (
    Manifest,
)


@dataclass(frozen=True, slots=True)
class DeployResult:
    """What a deploy did. ``changed``: the ref was moved. ``moved``: paths whose bytes were sent."""

    ref: str
    manifest: Manifest
    changed: bool
    moved: tuple[str, ...]
    left_out: tuple[str, ...]
    seconds: float

    @property
    def moved_nbytes(self) -> int:
        """Bytes that were sent to the origin."""
        return sum(self.manifest.file[path].size for path in self.moved)

    @property
    def kept_nbytes(self) -> int:
        """Bytes that the origin had already."""
        return self.manifest.nbytes - self.moved_nbytes

    def summary(self) -> str:
        """One line for people."""
        what = "published" if self.changed else "nothing changed"
        return (
            f"{self.ref}: {what}: manifest {self.manifest.digest[:12]}, "
            f"{len(self.moved)} of {len(self.manifest.files)} files moved "
            f"({nbytes_text(self.moved_nbytes)}), {nbytes_text(self.kept_nbytes)} already there, "
            f"{self.seconds:.1f} s"
        )

    def record(self) -> dict[str, Any]:
        """The same as a JSON value, for programs."""
        moved = set(self.moved)
        return {
            "ref": self.ref,
            "manifest": self.manifest.digest,
            "model_key": self.manifest.model_key,
            "changed": self.changed,
            "files": [
                {"path": f.path, "size": f.size, "sha256": f.sha256, "moved": f.path in moved}
                for f in self.manifest.files
            ],
            "moved_files": len(self.moved),
            "moved_bytes": self.moved_nbytes,
            "kept_bytes": self.kept_nbytes,
            "left_out": list(self.left_out),
            "seconds": round(self.seconds, 3),
            "summary": self.summary(),
        }
