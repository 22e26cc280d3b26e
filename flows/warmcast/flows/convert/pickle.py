"""Torch checkpoints (``.bin``, ``.pt``, ``.pth``), converted to safetensors in a child process.

A pickle is a program. It is opened with ``weights_only=True``, which runs none of it, in a process
of its own (:mod:`pickle_child`) whose memory is bounded and whose end, however it comes, is an
error that names the file. The parent reads nothing but the child's report and the safetensors
files it wrote, which are measured like any others.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

from warmcast.flows.convert.pickle_child import ALLOWANCE, Job
from warmcast.flows.errors import (
    ConversionFailed,
    InvalidCheckpoint,
    UnsafePickle,
    WorkFolderFull,
)
from warmcast.flows.local import LocalFile
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded
from warmcast.manifests.manifest import TiedEntry

VERSION = 1
"""Raised when the same pickle would become other bytes, so that none are reused."""

_POLL = 0.2
"""Seconds between two looks at whether the deploy was ended, while the child says nothing."""

_KINDS = {kind.__name__: kind for kind in (UnsafePickle, InvalidCheckpoint)}


@dataclass(frozen=True, slots=True)
class Converted:
    """What became of one pickle: files with the tensors in each, ties, and what was left out."""

    files: tuple[tuple[Path, tuple[str, ...]], ...]
    tied: tuple[TiedEntry, ...]
    left_out: tuple[str, ...]


def convert_pickle(
    source: LocalFile,
    out: Path,
    *,
    max_shard_nbytes: int,
    first_hidden: int,
    deadline: Deadline,
    tick: Callable[[int], None],
) -> Converted:
    """Convert one pickle into files in the folder ``out``, which is empty.

    ``tick`` is told the bytes that were written, and may raise to end the work. Raises
    :class:`UnsafePickle`, :class:`InvalidCheckpoint`, :class:`ConversionFailed`,
    :class:`WorkFolderFull` and :class:`SourceChanged`; the child has ended by then.
    """
    job = Job(
        source=str(source.location.absolute()),
        path=source.path,
        out=str(out),
        max_shard_nbytes=max_shard_nbytes,
        first_hidden=first_hidden,
        parent=os.getpid(),
    )
    with source.opened(), tempfile.TemporaryFile(dir=out.parent) as errors:
        answer = _run(job, errors, deadline, tick)
    if failed := answer.get("failed"):
        raise _failure(job, failed["kind"], failed["message"], source.size)
    done = answer["done"]
    return Converted(
        files=tuple((out / str(n), tuple(names)) for n, names in enumerate(done["files"])),
        tied=tuple(TiedEntry.model_validate_json(json.dumps(tie)) for tie in done["tied"]),
        left_out=tuple(done["ignored"]),
    )


def _run(
    job: Job, errors: IO[bytes], deadline: Deadline, tick: Callable[[int], None]
) -> dict[str, Any]:
    """Run the child to its end; its last report."""
    # -P keeps the working folder, which may be the checkpoint's own, off the module path.
    command = [sys.executable, "-P", "-m", "warmcast.flows.convert.pickle_child"]
    last: dict[str, Any] = {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
    ) as child:
        try:
            request, report = cast(IO[bytes], child.stdin), cast(IO[bytes], child.stdout)
            request.write(json.dumps(asdict(job)).encode())
            request.close()
            for line in _lines(report, job.path, deadline, tick):
                last = json.loads(line)
                tick(last.get("progress", 0))
            child.wait(None if math.isinf(deadline.at) else deadline.remaining())
        except (BrokenPipeError, subprocess.TimeoutExpired):
            last = {}
        finally:
            child.kill()
            child.wait()
    if "done" not in last and "failed" not in last:
        deadline.check(f"converting {job.path}")
        raise ConversionFailed(
            job.path,
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


def _failure(job: Job, kind: str, message: str, size: int) -> Exception:
    if kind in _KINDS:
        return _KINDS[kind](message)
    if kind == "full":
        return WorkFolderFull(
            f"converting {job.path}",
            found=message,
            do="free space in the work folder, or name another with --work",
        )
    return ConversionFailed(
        job.path,
        expected=f"to open with {2 * size + ALLOWANCE:,} bytes of memory for its {size:,}",
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
