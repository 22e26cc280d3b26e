"""The command ``warmcast bench serve``, as a function for typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError

DEADLINE = 600.0
_GIGABYTES = 2.0


def serve(
    gigabytes: Annotated[
        float, typer.Option("--gb", help="Size of what is served, twice on the disk.")
    ] = _GIGABYTES,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which the benchmark gives up.")
    ] = DEADLINE,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Measure how fast an agent serves what it has, beside nginx or a plain loop of sendfile."""
    for option, value in {"--gb": gigabytes, "--deadline": deadline}.items():
        if not value > 0:
            raise UsageError(option, expected="more than 0", found=value)

    from warmcast.flows.cli import ended_by_sigterm
    from warmcast.infra.bench import record
    from warmcast.infra.bench.deliver.serving import run

    record.check_destination(json_file)
    with ended_by_sigterm():
        result = run(int(gigabytes * 1e9), Deadline.after(deadline))
    result.print()
    if json_file is not None:
        record.write(result.record(), json_file)
