"""The commands ``warmcast refs``, ``promote``, ``rollback``, ``diff`` and ``gc``, for typer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from warmcast.flows.cli import OriginUrl, Seconds, check_origin, deadline_of, manifest_of
from warmcast.flows.progress import nbytes_text, printable
from warmcast.manifests.errors import NotFound, UsageError
from warmcast.manifests.origin import Origin, Ref

GRACE = 24.0
HISTORY = 5
_NAMES = 12

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write what was found or done to this file.")
]


def refs(
    ref: Annotated[str | None, typer.Argument(help="A ref, for its history; all without.")] = None,
    origin: OriginUrl = "",
    deadline: Seconds = None,
) -> None:
    """List refs and what they name, or the history of one."""
    check_origin(origin)
    limit = deadline_of(deadline)
    with Origin.open(origin) as opened:
        if ref is not None:
            wanted = Ref.parse(ref)
            state = opened.ref(wanted, limit)
            if state is None:
                raise NotFound(f"ref {ref!r}", expected=f"a ref in {origin}", found="none")
            for record in reversed(opened.history(wanted, limit) or [state.record]):
                star = "*" if record.manifest == state.record.manifest else " "
                print(f"{star} {record.manifest[:12]}  {record.updated_at}")
            return
        for name in opened.refs(limit):
            state = opened.ref(name, limit)
            if state is not None:
                print(f"{name}  {state.record.manifest[:12]}  {state.record.updated_at}")


def promote(
    source: Annotated[str, typer.Argument(help="A ref, or a manifest's digest.")],
    ref: Annotated[str, typer.Argument(help="What to point at it: model@name.")],
    origin: OriginUrl = "",
    deadline: Seconds = None,
) -> None:
    """Point a ref at what another names."""
    from warmcast.flows.steps.history import promote as run

    check_origin(origin)
    with Origin.open(origin) as opened:
        print(run(opened, source, Ref.parse(ref), deadline_of(deadline)).summary())


def rollback(
    ref: Annotated[str, typer.Argument(help="The ref: model@name.")],
    to: Annotated[
        str | None, typer.Option(help="The beginning of a digest in its history; the last one.")
    ] = None,
    origin: OriginUrl = "",
    deadline: Seconds = None,
) -> None:
    """Point a ref at what it named before."""
    from warmcast.flows.steps.history import roll_back

    check_origin(origin)
    with Origin.open(origin) as opened:
        print(roll_back(opened, Ref.parse(ref), to, deadline_of(deadline)).summary())


def diff(
    a: Annotated[str, typer.Argument(help="A ref, a manifest's digest, or its file.")],
    b: Annotated[str, typer.Argument(help="Another.")],
    origin: OriginUrl = "",
    everything: Annotated[bool, typer.Option("--all", help="Show every name.")] = False,
    deadline: Seconds = None,
    json_file: JsonFile = None,
) -> None:
    """Tell what two manifests share, by tensor and by bytes."""
    from warmcast.flows.steps.compare import compare

    limit = deadline_of(deadline)
    found = compare(manifest_of(a, origin, limit), manifest_of(b, origin, limit))
    print(
        f"tensors: {len(found.same)} the same ({nbytes_text(found.same_nbytes)}), "
        f"{len(found.changed)} changed ({nbytes_text(found.changed_nbytes)}), "
        f"{len(found.added)} new ({nbytes_text(found.added_nbytes)}), {len(found.removed)} gone"
    )
    print(
        f"files: {len(found.shared_files)} shared ({nbytes_text(found.shared_nbytes)}), "
        f"{len(found.moved_files)} to move ({nbytes_text(found.moved_nbytes)})"
    )
    for word, names in (("~", found.changed), ("+", found.added), ("-", found.removed)):
        shown = names if everything else names[:_NAMES]
        for name in shown:
            print(f"{word} {printable(name)}")
        if len(names) > len(shown):
            print(f"{word} and {len(names) - len(shown)} more (--all shows them)")
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")


def gc(
    origin: OriginUrl = "",
    delete: Annotated[
        bool, typer.Option("--delete", help="Do it. Without, it is told what would be done.")
    ] = False,
    grace: Annotated[
        float, typer.Option(help="Hours for which what nobody needs stays, from its first sight.")
    ] = GRACE,
    history: Annotated[
        int, typer.Option(help="Manifests of each ref's history that are kept.")
    ] = HISTORY,
    deadline: Seconds = None,
    json_file: JsonFile = None,
) -> None:
    """Delete blobs and manifests that no kept manifest names."""
    from warmcast.flows.steps.collect import collect

    check_origin(origin)
    if not grace >= 0:
        raise UsageError("--grace", expected="0 hours or more", found=grace)
    if history < 0:
        raise UsageError("--history", expected="0 or more", found=history)
    with Origin.open(origin) as opened:
        found = collect(opened, grace * 3600, history, deadline_of(deadline), dry_run=not delete)
    for problem in found.problems:
        print(printable(problem))
    print(found.summary())
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
