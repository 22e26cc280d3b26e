"""The parent of the converting process: starts it, hears it out, and ends it.

A pickle is a program, and a header of any format may be made to harm. All are opened in a process
of its own (:mod:`child`) whose memory is bounded and whose end, however it comes, is an error. The
parent reads nothing but the child's report and the safetensors files that it wrote, which are
measured like any others.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from pydantic import TypeAdapter

from warmcast.flows.convert.child import ALLOWANCE, Adapter, Format, Job
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.convert.tensors import Source
from warmcast.flows.errors import (
    ConversionFailed,
    InvalidCheckpoint,
    InvalidIndex,
    SourceChanged,
    UnsafePickle,
    WorkFolderFull,
)
from warmcast.flows.local import LocalFile
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, InvalidHeader, InvalidManifest, UsageError
from warmcast.manifests.manifest import TiedEntry

VERSION = 2
"""Raised when the same sources would become other bytes, so that none are reused."""

_POLL = 0.2
"""Seconds between two looks at whether the deploy was ended, while the child says nothing."""

_KINDS = {
    kind.__name__: kind
    for kind in (
        InvalidCheckpoint, InvalidHeader, InvalidIndex, InvalidManifest, SourceChanged,
        UnsafePickle, UsageError,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Converted:
    """What became of a checkpoint: files with the tensors in each, ties, and what was left out.

    ``config`` is what the sources say of the model, where their format has such; ``extra``
    are small files to be deployed beside the weights, by name.
    """

    files: tuple[tuple[Path, tuple[str, ...]], ...]
    tied: tuple[TiedEntry, ...]
    left_out: tuple[str, ...]
    config: dict[str, Any]
    extra: tuple[tuple[str, Path], ...]


def source_of(file: LocalFile) -> Source:
    """A file as the child is told of it."""
    location = str(file.location.absolute())
    return Source(file.path, location, file.size, file.mtime_ns, file.inode)


def convert(
    format_: Format,
    sources: Sequence[LocalFile],
    out: Path,
    options: ConvertOptions,
    *,
    index: tuple[str, Mapping[str, str]] | None = None,
    tie_embeddings: bool = False,
    adapter: Adapter | None = None,
    deadline: Deadline,
    tick: Callable[[int], None],
) -> Converted:
    """Convert a checkpoint into files in the folder ``out``, which is empty.

    ``tick`` is told the bytes that were written, and may raise to end the work. Raises
    :class:`UnsafePickle`, :class:`InvalidCheckpoint`, :class:`InvalidIndex`,
    :class:`ConversionFailed`, :class:`WorkFolderFull` and :class:`SourceChanged`; the child has
    ended by then.
    """
    job = Job(
        format=format_,
        sources=tuple(source_of(file) for file in sources),
        options=options,
        out=str(out),
        parent=os.getpid(),
        index=index and (index[0], dict(index[1])),
        tie_embeddings=tie_embeddings,
        adapter=adapter,
    )
    with tempfile.TemporaryFile(dir=out.parent) as errors:
        answer = _run(job, errors, deadline, tick)
    if failed := answer.get("failed"):
        raise _failure(job, failed["kind"], failed["message"])
    done = answer["done"]
    return Converted(
        files=tuple((out / str(n), tuple(names)) for n, names in enumerate(done["files"])),
        tied=tuple(TiedEntry.model_validate_json(json.dumps(tie)) for tie in done["tied"]),
        left_out=tuple(done["left_out"]),
        config=done["config"],
        extra=tuple((name, out / name) for name in done["extra"]),
    )


def name_of(job: Job) -> str:
    """What the job's sources are called in messages."""
    first = job.sources[0].path if job.sources else "nothing"
    return first if len(job.sources) < 2 else f"{first} and {len(job.sources) - 1} more"


def _run(
    job: Job, errors: IO[bytes], deadline: Deadline, tick: Callable[[int], None]
) -> dict[str, Any]:
    """Run the child to its end; its last report."""
    # -P keeps the working folder, which may be the checkpoint's own, off the module path.
    command = [sys.executable, "-P", "-m", "warmcast.flows.convert.child"]
    last: dict[str, Any] = {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
    ) as child:
        try:
            request, report = cast(IO[bytes], child.stdin), cast(IO[bytes], child.stdout)
            request.write(TypeAdapter(Job).dump_json(job))
            request.close()
            for line in _lines(report, name_of(job), deadline, tick):
                last = json.loads(line)
                tick(last.get("progress", 0))
            child.wait(None if math.isinf(deadline.at) else deadline.remaining())
        except (BrokenPipeError, subprocess.TimeoutExpired):
            last = {}
        finally:
            child.kill()
            child.wait()
    if "done" not in last and "failed" not in last:
        deadline.check(f"converting {name_of(job)}")
        raise ConversionFailed(
            name_of(job),
            expected="the converting process to report",
            found=f"{_ending(child.returncode)}: {_tail(errors)}",
        )
    return last


def _lines(
    report: IO[bytes], path: str, deadline: Deadline, tick: Callable[[int], None]
) -> Iterator[bytes]:
    """The lines that the child writes, until it closes its standard output."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(report, selectors.EVENT_READ)
        while True:
            if deadline.expired:
                raise DeadlineExceeded(f"no time left while converting {path}")
            tick(0)
            if not selector.select(min(_POLL, deadline.remaining())):
                continue
            data = os.read(report.fileno(), 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from lines


def _failure(job: Job, kind: str, message: str) -> Exception:
    if kind in _KINDS:
        return _KINDS[kind](message)
    if kind == "full":
        return WorkFolderFull(
            f"converting {name_of(job)}",
            found=message,
            do="free space in the work folder, or name another with --work",
        )
    return ConversionFailed(
        name_of(job),
        expected=f"to be converted with {ALLOWANCE:,} bytes of memory beside its largest tensor",
        found="a wish for more",
        do="it may be made to do harm; if you trust it, save it again as safetensors",
    )


def _ending(code: int) -> str:
    return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _tail(errors: IO[bytes]) -> str:
    """The last line of what the child wrote to standard error."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 4096))
    lines = errors.read().decode("utf-8", "replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no message")
