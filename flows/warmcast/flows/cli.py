"""The commands ``warmcast deploy``, ``inspect`` and ``verify``, as functions for typer."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from warmcast.flows.errors import DeployError
from warmcast.flows.progress import for_terminal, nbytes_text, printable
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError, WarmcastError
from warmcast.manifests.manifest import Manifest, parse_manifest
from warmcast.manifests.origin import Origin

_ROWS = 40
_MANIFEST_LIMIT = 1 << 30

OriginUrl = Annotated[
    str, typer.Option("--origin", envvar="WARMCAST_ORIGIN", help="The origin's URL.")
]
Seconds = Annotated[
    float | None, typer.Option("--deadline", help="Seconds after which the command gives up.")
]


def deploy(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="A folder in a Hugging Face repository's layout, or a URL of hf://, s3://, gs:// "
            "or https://; with --file, models of the file (all without)."
        ),
    ] = None,
    ref: Annotated[
        list[str] | None,
        typer.Option("--ref", help="What to point at it: model@name; may be repeated."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="A file that names models: warmcast.yaml."),
    ] = None,
    origin: OriginUrl = "",
    revision: Annotated[
        str | None, typer.Option(help="The upstream's revision, where its name does not tell.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="Deploy only files that match: a pattern as in .gitignore; repeatable."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Leave out files that match; may be repeated.")
    ] = None,
    mesh: Annotated[
        list[Path] | None,
        typer.Option(help="A JSON file of a mesh to lay tensors out for; may be repeated."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floats to bfloat16, float16 or float32.")
    ] = None,
    keep_dtype: Annotated[
        list[str] | None, typer.Option(help="Tensors that --dtype leaves; may be repeated.")
    ] = None,
    shard_by: Annotated[
        str, typer.Option(help="What converted files are cut by: size, or layer.")
    ] = "size",
    max_shard_size: Annotated[
        str, typer.Option(help="The most tensors that a converted file holds.")
    ] = "5GB",
    dequantise: Annotated[
        bool, typer.Option("--dequantise", help="Turn GGUF's quantised tensors into floats.")
    ] = False,
    merge: Annotated[
        Path | None,
        typer.Option(help="A file of rules to merge tensor-parallel shards by."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="What a LoRA adapter is merged into: a folder, URL or ref.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="A folder with space for converted files.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Re-read what the origin has; replace what is wrong.")
    ] = False,
    sign_key: Annotated[
        Path | None, typer.Option(help="Sign with this Ed25519 private key, in PEM.")
    ] = None,
    sign_command: Annotated[
        str | None,
        typer.Option(help="Sign with this command: message on its input, signature on its output."),
    ] = None,
    sign_public_key: Annotated[
        Path | None, typer.Option(help="The public key of --sign-command, in PEM.")
    ] = None,
    flow: Annotated[bool, typer.Option("--flow", help="Run as a Prefect flow.")] = False,
    dask: Annotated[
        str | None, typer.Option(help="With --flow: the Dask scheduler whose workers transfer.")
    ] = None,
    deadline: Seconds = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write what was done to this file.")
    ] = None,
) -> None:
    """Turn checkpoints into verified deployments, and point refs at them."""
    from warmcast.flows.deploy_cli import Flags, How, deploy_file, deploy_one

    flags = Flags(
        ref=tuple(ref or ()), revision=revision, allow=tuple(allow or ()),
        ignore=tuple(ignore or ()), mesh=tuple(mesh or ()), dtype=dtype,
        keep_dtype=tuple(keep_dtype or ()), shard_by=shard_by, max_shard_size=max_shard_size,
        dequantise=dequantise, merge=merge, base=base, sign_key=sign_key,
        sign_command=sign_command, sign_public_key=sign_public_key,
    )  # fmt: skip
    if json_file is not None and not json_file.parent.is_dir():
        raise UsageError(f"--json {json_file}", expected="a file in a folder", found="no folder")
    if dask is not None and not flow:
        raise UsageError("--dask", expected="--flow with it", found="none")
    how = How(origin, work, repair, deadline, flow, dask)
    with ended_by_sigterm():
        if file is not None:
            record = deploy_file(file, what or [], flags, how)
        else:
            record = deploy_one(what or [], flags, how)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(record["summary"])
    if record.get("failed"):
        raise DeployError(
            "deploy", expected="every model deployed", found=f"{', '.join(record['failed'])} failed"
        )


def inspect(
    target: Annotated[str, typer.Argument(help="A ref, a manifest's digest, or its file.")],
    origin: OriginUrl = "",
    everything: Annotated[bool, typer.Option("--all", help="Show every row.")] = False,
    deadline: Seconds = None,
) -> None:
    """Show a manifest in tables."""
    from warmcast.flows.tables import print_manifest

    print_manifest(
        manifest_of(target, origin, deadline_of(deadline)), None if everything else _ROWS
    )


def verify(
    ref: Annotated[str, typer.Argument(help="A ref, or a manifest's digest.")],
    origin: OriginUrl = "",
    deadline: Seconds = None,
) -> None:
    """Re-read every blob of a deployment, and name what is wrong."""
    from warmcast.flows.errors import Damaged
    from warmcast.flows.steps.verify import verify as run

    check_origin(origin)
    limit = deadline_of(deadline)
    progress = for_terminal()
    began = time.monotonic()
    with ended_by_sigterm(), Origin.open(origin) as opened:
        manifest = opened.resolve(ref, limit)
        with progress.stage("verify", manifest.nbytes):
            problems = run(opened, manifest, limit, progress.advance)
    for problem in problems:
        print(printable(str(problem)))
    if problems:
        raise Damaged(
            ref,
            expected=f"{len(manifest.files)} files as manifest {manifest.digest[:12]} says",
            found=f"{len(problems)} that are not",
            do="deploy it again with --repair",
        )
    print(
        f"{ref}: manifest {manifest.digest[:12]}: {len(manifest.files)} files, "
        f"{nbytes_text(manifest.nbytes)}: every byte is right, {time.monotonic() - began:.1f} s"
    )


def manifest_of(target: str, origin: str, deadline: Deadline) -> Manifest:
    """The manifest that a ref, a digest or a file names."""
    path = Path(target)
    if path.is_file():
        if path.stat().st_size > _MANIFEST_LIMIT:
            raise WarmcastError(target, expected="a manifest", found="a file too large for one")
        return parse_manifest(path.read_bytes(), None, target)
    if "@" not in target and not re.fullmatch(r"[0-9a-f]{64}", target):
        raise UsageError(
            repr(target), expected="model@name, a digest or a manifest's file", found="none of them"
        )
    check_origin(origin)
    with Origin.open(origin) as opened:
        return opened.resolve(target, deadline)


def check_origin(origin: str) -> None:
    """Raise :class:`UsageError` without an origin."""
    if not origin:
        raise UsageError(
            "origin", expected="a URL", found="none", do="give --origin or set WARMCAST_ORIGIN"
        )


def deadline_of(seconds: float | None) -> Deadline:
    """The deadline that an option gives; never without."""
    if seconds is None:
        return Deadline.never()
    if not seconds > 0:
        raise UsageError("--deadline", expected="more than 0 seconds", found=seconds)
    return Deadline.after(seconds)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: what was begun is taken away."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
