"""The commands ``warmcast deploy``, ``inspect`` and ``verify``, as functions for typer."""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warmcast.flows.progress import for_terminal, nbytes_text, printable
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError, WarmcastError
from warmcast.manifests.manifest import Manifest, parse_manifest
from warmcast.manifests.origin import Origin

if TYPE_CHECKING:
    from warmcast.flows.steps.publish import Signing

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.I)
_ROWS = 40
_MANIFEST_LIMIT = 1 << 30

OriginUrl = Annotated[
    str, typer.Option("--origin", envvar="WARMCAST_ORIGIN", help="The origin's URL.")
]
Seconds = Annotated[
    float | None, typer.Option("--deadline", help="Seconds after which the command gives up.")
]


def deploy(
    source: Annotated[str, typer.Argument(help="A folder in a Hugging Face repository's layout.")],
    ref: Annotated[str, typer.Option("--ref", help="What to point at it: model@name.")],
    origin: OriginUrl = "",
    revision: Annotated[
        str | None, typer.Option(help="The upstream's revision, where the folder does not tell.")
    ] = None,
    mesh: Annotated[
        list[Path] | None,
        typer.Option(help="A JSON file of a mesh to lay tensors out for; may be repeated."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="The most tensors that a converted file holds.")
    ] = "5GB",
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
    deadline: Seconds = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write what was done to this file.")
    ] = None,
) -> None:
    """Turn a checkpoint into a verified deployment, and point a ref at it."""
    meshes = [_read_mesh(path) for path in mesh or ()]
    shard_nbytes = parse_size(max_shard_size, "--max-shard-size")
    check_origin(origin)
    signing = _signing(sign_key, sign_command, sign_public_key)
    if signing is not None and flow:
        raise UsageError("--flow", expected="no --sign-... with it", found="one")
    if json_file is not None and not json_file.parent.is_dir():
        raise UsageError(f"--json {json_file}", expected="a file in a folder", found="no folder")
    with ended_by_sigterm():
        if flow:
            record = _run_flow(
                source, origin, ref, revision=revision, meshes=meshes,
                max_shard_nbytes=shard_nbytes, work=str(work) if work else None, repair=repair,
                deadline_s=deadline,
            )  # fmt: skip
        else:
            from warmcast.flows.convert.options import ConvertOptions
            from warmcast.flows.run import deploy as run
            from warmcast.flows.steps.meshes import parse_mesh

            record = run(
                source,
                origin,
                ref,
                revision=revision,
                meshes=[
                    parse_mesh(m, f"mesh {p}") for m, p in zip(meshes, mesh or (), strict=True)
                ],
                convert=ConvertOptions(max_shard_nbytes=shard_nbytes),
                work=work,
                repair=repair,
                signing=signing,
                deadline=deadline_of(deadline),
                progress=for_terminal(),
            ).record()
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(record["summary"])


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


def _signing(
    sign_key: Path | None, sign_command: str | None, public_key: Path | None
) -> Signing | None:
    """How to sign, from the options that say so."""
    if sign_key is None and sign_command is None:
        return None
    if sign_key is not None and sign_command is not None:
        raise UsageError("--sign-key", expected="no --sign-command with it", found="one")
    from warmcast.flows.steps.publish import Signing
    from warmcast.manifests.trust import PublicKey, command_signer, key_signer

    try:
        if sign_key is not None:
            return Signing(key_signer(sign_key), PublicKey.read(sign_key))
        words = shlex.split(sign_command or "")
        if not words or public_key is None:
            raise UsageError("--sign-command", expected="a command, and --sign-public-key")
        return Signing(command_signer(words), PublicKey.read(public_key))
    except ModuleNotFoundError as cause:
        raise UsageError(
            "--sign-key",
            expected=f"the package {cause.name!r}",
            found="it is not installed",
            do="pip install 'warmcast[trust]'",
        ) from cause


def _run_flow(source: str, origin: str, ref: str, **options: Any) -> dict[str, Any]:
    try:
        from warmcast.flows.deploy import deploy_flow
    except ModuleNotFoundError as cause:
        raise UsageError(
            "--flow",
            expected=f"the package {cause.name!r}",
            found="it is not installed",
            do="pip install 'warmcast[flows]'",
        ) from cause
    record: dict[str, Any] = deploy_flow(source, origin, ref, **options)
    return record


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


def parse_size(text: str, option: str) -> int:
    """Bytes of ``5GB`` (1e9 bytes each), ``5GiB`` (2**30) or ``5000000000``.

    Raises :class:`UsageError`, naming the option.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not (size := _scaled(*match.groups())):
        raise UsageError(option, expected="a size such as 5GB", found=repr(text))
    return size


def _scaled(number: str, unit: str, binary: str) -> int:
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))


def _read_mesh(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise UsageError(f"--mesh {path}", expected="a JSON file", found=cause.strerror) from None
    except (ValueError, RecursionError) as cause:
        raise UsageError(f"--mesh {path}", expected="JSON", found=str(cause)) from None


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
