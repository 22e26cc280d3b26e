"""The commands ``warmcast bench ...``, as functions for typer; each measures when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from warmcast.infra.bench.deliver.command import deliver
from warmcast.infra.bench.deliver.serving_command import serve
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError

DEADLINE = 600.0

bench = typer.Typer(rich_markup_mode=None)


@bench.callback()
def root() -> None:
    """Measure this machine: each figure beside the limit of the same run."""


@bench.command()
def verify(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N. A GPU, where there is one.")
    ] = None,
    gigabytes: Annotated[
        float | None,
        typer.Option("--gb", help="Size of the large model. 16 on a GPU, 1.6 on a CPU, or less."),
    ] = None,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which the benchmark gives up.")
    ] = DEADLINE,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Measure the checks that end every load, beside the speed of the memory."""
    if not deadline > 0:
        raise UsageError("--deadline", expected="more than 0 seconds", found=deadline)

    from warmcast.infra.bench import record
    from warmcast.infra.bench.verify import pick_device, run

    record.check_destination(json_file)
    result = run(pick_device(device), gigabytes, Deadline.after(deadline))
    result.print()
    if json_file is not None:
        record.write(result.record(), json_file)


@bench.command()
def wire(
    gigabytes: Annotated[
        float | None,
        typer.Option("--gb", help="Size of the large model; a third of a GPU's memory."),
    ] = None,
    transport: Annotated[
        str, typer.Option(help="Transports to measure, one after another.")
    ] = "ipc,nccl",
    receivers: Annotated[
        int | None, typer.Option(help="Receivers at most; all GPUs but one.")
    ] = None,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which the benchmark gives up.")
    ] = DEADLINE,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Measure loads from peers, beside what the wire between the GPUs allows."""
    names = [name.strip() for name in transport.split(",")]
    if not set(names) <= {"ipc", "nccl"}:
        raise UsageError("--transport", expected="names of ipc, nccl", found=repr(transport))
    bounds = {"--deadline": deadline, "--gb": gigabytes, "--receivers": receivers}
    for option, value in bounds.items():
        if value is not None and not value > 0:
            raise UsageError(option, expected="more than 0", found=value)

    from warmcast.flows.cli import ended_by_sigterm
    from warmcast.infra.bench import record
    from warmcast.infra.bench.wire import run

    record.check_destination(json_file)
    with ended_by_sigterm():
        result = run(gigabytes, names, receivers, Deadline.after(deadline))
    result.print()
    if json_file is not None:
        record.write(result.record(), json_file)


@bench.command()
def stream(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N. A GPU, where there is one.")
    ] = None,
    gigabytes: Annotated[
        float | None, typer.Option("--gb", help="Size of the checkpoint. 12 to a GPU, else 1.8.")
    ] = None,
    where: Annotated[
        str, typer.Option(help="Places to load from, one after another.")
    ] = "tmpfs,warm,cold,http",
    loaders: Annotated[
        str | None, typer.Option(help="Loaders to measure; all that are installed.")
    ] = None,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which the benchmark gives up.")
    ] = DEADLINE,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Measure loads from storage, by this loader and those installed beside it."""
    for option, value in {"--deadline": deadline, "--gb": gigabytes}.items():
        if value is not None and not value > 0:
            raise UsageError(option, expected="more than 0", found=value)

    from warmcast.flows.cli import ended_by_sigterm
    from warmcast.infra.bench import record
    from warmcast.infra.bench.stream import INTERRUPTED, PLACES, run
    from warmcast.infra.bench.stream.child import LOADERS, reads_from
    from warmcast.infra.bench.verify import pick_device

    places = [name.strip() for name in where.split(",")]
    if not set(places) <= set(PLACES):
        raise UsageError("--where", expected=f"names of {', '.join(PLACES)}", found=repr(where))
    installed = [name for name in LOADERS if reads_from(name)]
    names = installed if loaders is None else [name.strip() for name in loaders.split(",")]
    if not set(names) <= set(installed):
        expected = f"names of {', '.join(installed)}"
        raise UsageError("--loaders", expected=expected, found=repr(loaders))
    record.check_destination(json_file)

    def so_far(found: Mapping[str, Any]) -> None:
        if json_file is not None:
            record.write(found, json_file)

    limit = Deadline.after(deadline)
    with ended_by_sigterm():
        result = run(
            pick_device(device), gigabytes, limit, where=places, loaders=names, so_far=so_far
        )
    result.print()
    if json_file is not None:
        record.write(result.record(), json_file)
    if result.unfinished is not None:
        raise typer.Exit(130 if result.unfinished == INTERRUPTED else 1)


bench.command()(deliver)
bench.command()(serve)
