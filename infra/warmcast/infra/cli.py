"""The command ``warmcast demo``, as a function for typer."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError

DEADLINE = 600.0


class OriginKind(StrEnum):
    """Where the demo's origin is."""

    S3 = "s3"
    FILE = "file"


def demo(
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face folder to use instead of all-MiniLM-L6-v2.")
    ] = None,
    origin: Annotated[
        OriginKind | None,
        typer.Option(help="S3 from SeaweedFS, or a folder. S3 if SeaweedFS is installed."),
    ] = None,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which the demo gives up.")
    ] = DEADLINE,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the table to this file.")
    ] = None,
) -> None:
    """Deploy a real model, and boot four workers: from the origin, from peers, after their end."""
    if not deadline > 0:
        raise UsageError("--deadline", expected="more than 0 seconds", found=deadline)
    if json_file is not None and not json_file.parent.is_dir():
        raise UsageError(f"--json {json_file}", expected="a file in a folder", found="no folder")

    from warmcast.flows.cli import ended_by_sigterm
    from warmcast.infra.demo.run import run

    with ended_by_sigterm():
        result = run(model, origin and origin.value, Deadline.after(deadline))
    result.print()
    if json_file is not None:
        json_file.write_text(json.dumps(result.record(), indent=2) + "\n", encoding="utf-8")
    result.check()
