"""What a deploy leaves in Prefect: a table of files, a link to the manifest, the time by stage.

Keys end with the ref, so that each ref has its own row of versions.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect.artifacts import create_link_artifact, create_table_artifact

from warmcast.flows.progress import Progress
from warmcast.manifests.origin import manifest_key


class Timed:
    """A :class:`Progress` that also keeps how long each stage took, in seconds."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}

    @contextmanager
    def stage(self, what: str, total: int) -> Iterator[None]:
        """Time the stage."""
        began = time.monotonic()
        try:
            with self._progress.stage(what, total):
                yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - began
            self.nbytes[what] = self.nbytes.get(what, 0) + total

    def advance(self, nbytes: int) -> None:
        """Pass it on."""
        self._progress.advance(nbytes)

    def note(self, line: str) -> None:
        """Pass it on."""
        self._progress.note(line)

    def rows(self, seconds: float) -> list[dict[str, Any]]:
        """Stages with their seconds and bytes; the last is the rest of ``seconds``."""
        rows = [
            {"stage": stage, "seconds": round(spent, 3), "bytes": self.nbytes[stage]}
            for stage, spent in self.seconds.items()
        ]
        rest = max(0.0, seconds - sum(self.seconds.values()))
        return [*rows, {"stage": "the rest", "seconds": round(rest, 3), "bytes": 0}]


def artifact_key(kind: str, ref: str) -> str:
    """A key as Prefect allows them: lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"warmcast-{kind}-{ref}".lower()).strip("-")


def publish_deploy(record: Mapping[str, Any], origin: str, timed: Timed) -> None:
    """Create the artifacts of a deploy from its record."""
    ref, digest = record["ref"], record["manifest"]
    create_table_artifact(
        key=artifact_key("deploy", ref),
        table=[
            {
                "file": file["path"],
                "bytes": file["size"],
                "moved": "yes" if file["moved"] else "already there",
                "sha256": file["sha256"],
            }
            for file in record["files"]
        ],
        description=record["summary"],
    )
    create_link_artifact(
        key=artifact_key("manifest", ref),
        link=f"{origin.rstrip('/')}/{manifest_key(digest)}",
        link_text=f"manifest {digest[:12]}",
        description=f"What {ref} names since this run.",
    )
    create_table_artifact(
        key=artifact_key("stages", ref),
        table=timed.rows(record["seconds"]),
        description=f"The time of {ref} by stage.",
    )
