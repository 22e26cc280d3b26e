"""The command ``warmcast bench deliver``, as a function for typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError

DEADLINE = 600.0
_FAILING_AT = 0.5


def deliver(
    nodes: Annotated[int, typer.Option(help="Nodes of the fleet.")] = 20,
    replicas: Annotated[
        int, typer.Option(help="Replicas of one model, started at once over the nodes.")
    ] = 50,
    size: Annotated[str, typer.Option(help="Of the model: 140GB, 256MiB.")] = "256MiB",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Forecast a fleet that this machine cannot hold.")
    ] = False,
    failing: Annotated[
        float, typer.Option(help="Share of the nodes that fails; with --simulate.")
    ] = 0.0,
    failing_at: Annotated[
        float, typer.Option(help="How much of all has arrived when they fail; 0: at the start.")
    ] = _FAILING_AT,
    kill: Annotated[
        int, typer.Option(help="Agents that are killed in the middle of the cold burst.")
    ] = 0,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which the benchmark gives up.")
    ] = DEADLINE,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Deliver one model to a fleet of nodes at once, cold and warm: by agents here, or forecast."""
    for option, value in {
        "--nodes": nodes,
        "--replicas": replicas,
        "--deadline": deadline,
    }.items():
        if not value > 0:
            raise UsageError(option, expected="more than 0", found=value)
    if kill and simulate:
        raise UsageError("--kill", expected="no --simulate with it", found="--simulate")
    if failing and not simulate:
        raise UsageError("--failing", expected="--simulate with it", found="none")

    from warmcast.flows.config import parse_size
    from warmcast.infra.bench import record

    nbytes = parse_size(size, "--size")
    record.check_destination(json_file)
    limit = Deadline.after(deadline)
    if simulate:
        from warmcast.infra.bench.deliver import simulation
        from warmcast.infra.bench.deliver.forecast import Settings

        settings = Settings(nodes, replicas, nbytes, failing=failing, failing_at=failing_at)
        forecast = simulation.simulate(settings, limit)
        forecast.print()
        if json_file is not None:
            record.write(forecast.record(), json_file)
        return

    from warmcast.flows.cli import ended_by_sigterm
    from warmcast.infra.bench.deliver.burst import run

    with ended_by_sigterm():
        result = run(nodes=nodes, replicas=replicas, size=nbytes, deadline=limit, kill=kill)
    result.print()
    if json_file is not None:
        record.write(result.record(), json_file)
