"""What ``warmcast deploy`` does with its options: one deploy, or those of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from warmcast.flows.cli import check_origin, deadline_of
from warmcast.flows.config import (
    ConvertSection,
    Job,
    MeshSection,
    SignSection,
    parse_size,
    read_config,
    source_of,
)
from warmcast.flows.jobs import run_job, run_jobs
from warmcast.flows.progress import Progress, for_terminal
from warmcast.flows.steps.meshes import parse_mesh
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError
from warmcast.manifests.origin import Ref


@dataclass(frozen=True, slots=True)
class Flags:
    """The options that say what is deployed and what is made of it; a file says them instead."""

    ref: tuple[str, ...] = ()
    revision: str | None = None
    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    mesh: tuple[Path, ...] = ()
    dtype: str | None = None
    keep_dtype: tuple[str, ...] = ()
    shard_by: str = "size"
    max_shard_size: str = "5GB"
    dequantise: bool = False
    merge: Path | None = None
    base: str | None = None
    sign_key: Path | None = None
    sign_command: str | None = None
    sign_public_key: Path | None = None

    def job(self, words: Sequence[str]) -> Job:
        """The one deploy that is asked for. Raises :class:`UsageError`, naming the option."""
        if len(words) != 1:
            raise UsageError(
                "deploy", expected="one source, or --file", found=", ".join(words) or "none"
            )
        if not self.ref:
            raise UsageError("--ref", expected="model@name", found="none")
        source, revision = source_of(words[0], self.revision, Path())
        return Job(
            source=source,
            refs=tuple(str(Ref.parse(ref)) for ref in dict.fromkeys(self.ref)),
            revision=revision,
            allow=self.allow,
            ignore=self.ignore,
            convert=self._convert(),
            meshes=tuple(_read_mesh(path) for path in self.mesh),
            sign=self._sign(),
        )

    def check_unused(self) -> None:
        """Raise :class:`UsageError` for an option that a file says instead."""
        for each in fields(self):
            if getattr(self, each.name) != each.default:
                option = f"--{each.name.replace('_', '-')}"
                raise UsageError(option, expected="it in the file", found="it beside --file")

    def _convert(self) -> ConvertSection:
        try:
            section = ConvertSection(
                dtype=self.dtype,  # type: ignore[arg-type]
                keep_dtype=list(self.keep_dtype),
                shard_by=self.shard_by,  # type: ignore[arg-type]
                max_shard_size=parse_size(self.max_shard_size, "--max-shard-size"),
                dequantise=self.dequantise,
                merge=None if self.merge is None else str(self.merge),
                base=self.base,
            )
        except ValidationError as cause:
            first = cause.errors(include_url=False)[0]
            option = str(first["loc"][0]).replace("_", "-")
            expected = first["msg"].removeprefix("Input should be ")
            raise UsageError(f"--{option}", expected=expected, found=repr(first["input"])) from None
        located = section.located(Path.cwd())
        located.options()
        return located

    def _sign(self) -> SignSection | None:
        key, command, public = self.sign_key, self.sign_command, self.sign_public_key
        if key is None and command is None and public is None:
            return None
        if key is not None and command is not None:
            raise UsageError("--sign-key", expected="no --sign-command with it", found="one")
        if (command is None) != (public is None):
            raise UsageError("--sign-command", expected="a command, and --sign-public-key")
        return SignSection(
            key=None if key is None else str(key.absolute()),
            command=command,
            public_key=None if public is None else str(public.absolute()),
        )


@dataclass(frozen=True, slots=True)
class How:
    """The options that say how deploys are run; ``dask`` is the address of a scheduler."""

    origin: str
    work: Path | None
    repair: bool
    deadline_s: float | None
    flow: bool
    dask: str | None

    def run(self, job: Job, origin: str, deadline: Deadline, progress: Progress) -> dict[str, Any]:
        """Run one deploy; what was done, as a JSON value."""
        if not self.flow:
            done = run_job(
                job, origin, work=self.work, repair=self.repair, deadline=deadline,
                progress=progress,
            )  # fmt: skip
            return done.record()
        try:
            from warmcast.flows.prefect.deploy import run_in_flow
        except ModuleNotFoundError as cause:
            raise UsageError(
                "--flow" if self.dask is None else "--dask",
                expected=f"the package {cause.name!r}",
                found="it is not installed",
                do="pip install 'warmcast[flows]'"
                + ("" if self.dask is None else ", 'warmcast[dask]'"),
            ) from cause
        return run_in_flow(
            job, origin, work=self.work, repair=self.repair, deadline=deadline, dask=self.dask
        )


def deploy_one(words: Sequence[str], flags: Flags, how: How) -> dict[str, Any]:
    """Deploy what the options say; what was done, as a JSON value."""
    job = flags.job(words)
    check_origin(how.origin)
    return how.run(job, how.origin, deadline_of(how.deadline_s), for_terminal())


def deploy_file(file: Path, names: Sequence[str], flags: Flags, how: How) -> dict[str, Any]:
    """Deploy the models of a file, all or those named; what was done, as a JSON value."""
    flags.check_unused()
    config = read_config(file)
    origin = how.origin or config.origin or ""
    check_origin(origin)
    limit = deadline_of(how.deadline_s)
    progress = for_terminal()

    def run(name: str, job: Job) -> dict[str, Any]:
        progress.note(f"{name}:")
        record = how.run(job, origin, limit, progress)
        print(record["summary"], flush=True)
        return record

    def failed(name: str, why: str) -> None:
        print(f"warmcast: {name}: {why}", file=sys.stderr, flush=True)

    return run_jobs(config.chosen(names), run, limit, failed).record()


def _read_mesh(path: Path) -> MeshSection:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise UsageError(f"--mesh {path}", expected="a JSON file", found=cause.strerror) from None
    except (ValueError, RecursionError) as cause:
        raise UsageError(f"--mesh {path}", expected="JSON", found=str(cause)) from None
    request = parse_mesh(value, f"mesh {path}")
    return MeshSection.model_validate(request.record())
