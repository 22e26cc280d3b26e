"""``warmcast bench stream``: from storage to the device, beside what each part on the way allows.

A checkpoint of random bytes is written, and loaded from memory (tmpfs), from the page cache
(``warm``), from the disk (``cold``) and from an object server on loopback (``http``), by this
loader and by every public one that is installed and can read there, each in a process of its own,
several times. The bytes of each are checked; wrong ones are no
figure. And a transformer is run while it is loaded, beside a load and a forward after each other.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from warmcast.flows.workfolder import WorkFolder
from warmcast.infra.bench import record
from warmcast.infra.bench.stream import http, limits
from warmcast.infra.bench.stream.checkpoint import Checkpoint, make, settle
from warmcast.infra.bench.stream.child import LOADERS, reads_from
from warmcast.infra.bench.stream.decoder import sizes
from warmcast.infra.bench.wire.models import Shape, shapes
from warmcast.infra.demo.channel import Child
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, UsageError, one_line

GB = 1e9
INTERRUPTED = "interrupted"
MEASURING = "still measuring"
PLACES = ("tmpfs", "warm", "cold", "http")
_LIMITS = {"cold": "disk_read_GBps", "http": "http_read_GBps"}
"""What binds a load from a place, where it is not the link to the GPU."""

_MEMORY = Path("/dev/shm")  # noqa: S108
_TOKENS = {"cuda": 8192, "cpu": 16}
"""Of the prompt that a progressive load is measured with: about as long to compute as to load."""


@dataclass(frozen=True, slots=True)
class Case:
    """A loader, from a place: the best of a process's later loads, and its first beside it."""

    loader: str
    where: str
    bytes: int
    seconds: float
    GBps: float
    ratio_to_limit: float | None
    checked: bool
    first_seconds: float
    cpu_seconds_per_gb: float
    host_memory: int


@dataclass(frozen=True, slots=True)
class Progressive:
    """A forward while the weights come. ``ratio`` is of ``first_output_seconds`` to the longer of
    load and compute; ``first_layer`` is the part of the bytes there when the first layer ran.
    """

    where: str
    bytes: int
    load_seconds: float
    compute_seconds: float
    first_output_seconds: float
    ratio: float
    first_layer: float
    checked: bool


@dataclass(slots=True)
class Result:
    """The figures of one run."""

    device: str
    limits: dict[str, float]
    disk: dict[str, float]
    http: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Places that were not measured, and why."""
    cases: list[Case] = field(default_factory=list)
    progressive: Progressive | None = None
    unfinished: str | None = None
    """Why not everything was measured."""

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "machine": {**record.machine(), "device": self.device},
            "limits": self.limits,
            "disk_reads_GBps": self.disk,
            "http_reads_GBps": self.http,
            "skipped": self.skipped,
            "cases": [asdict(case) for case in self.cases],
            "progressive": asdict(self.progressive) if self.progressive is not None else None,
            "unfinished": self.unfinished,
        }

    def print(self) -> None:
        """A table for people, and which part of the machine is the slowest."""
        bounds = ", ".join(f"{name} {rate}" for name, rate in self.limits.items())
        print(f"To {self.device}: {bounds or 'no limit measured'}")
        columns = (
            "loader",
            "where",
            "GB",
            "s",
            "GB/s",
            "of limit",
            "first, s",
            "CPU s/GB",
            "bytes",
        )
        rows = [
            (
                case.loader,
                case.where,
                f"{case.bytes / GB:.2f}",
                f"{case.seconds:.3f}",
                f"{case.GBps:.2f}",
                "-" if case.ratio_to_limit is None else f"{case.ratio_to_limit:.2f}",
                f"{case.first_seconds:.3f}",
                f"{case.cpu_seconds_per_gb:.2f}",
                "right" if case.checked else "WRONG",
            )
            for case in self.cases
        ]
        record.print_table(columns, rows, words=2)
        for place, reason in self.skipped.items():
            print(f"Not measured: {place}: {reason}")
        if (found := self.progressive) is not None:
            print(
                f"Progressive, {found.bytes / GB:.2f} GB from {found.where}: first output after "
                f"{found.first_output_seconds:.3f} s, "
                f"{found.ratio:.2f} of the longer of load ({found.load_seconds:.3f} s) and compute "
                f"({found.compute_seconds:.3f} s); first layer with "
                f"{100 * found.first_layer:.1f}% of the bytes there; outputs "
                f"{'the same' if found.checked else 'DIFFER'}"
            )
        slowest = min(self.limits, key=lambda name: self.limits[name], default=None)
        if slowest is not None:
            print(f"The slowest part here: {slowest.removesuffix('_GBps').replace('_', ' ')}")
        if self.unfinished is not None:
            print(f"Not finished: {self.unfinished}")


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint in a place: its origin, its files (paths, or URLs), and the environment of the
    processes that load it from there.
    """

    origin: str
    files: Sequence[str]
    env: Mapping[str, str]

    @classmethod
    def on_disk(cls, checkpoint: Checkpoint) -> _Source:
        """A checkpoint that is files of this machine."""
        return cls(checkpoint.origin, [str(path) for path in checkpoint.files], _environment())


def run(
    device: torch.device,
    gigabytes: float | None,
    deadline: Deadline,
    *,
    where: Sequence[str] = PLACES,
    loaders: Collection[str] = tuple(LOADERS),
    scale: int = 1,
    so_far: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Result:
    """Measure loads to ``device`` from some of :data:`PLACES`, by some of those installed.

    ``so_far`` is given the record after each load: this process may be killed. What was measured
    when the time is up, or somebody interrupts, is told all the same. Raises :class:`UsageError`
    where there is no room, and what ended it before there was a figure.
    """
    wanted = gigabytes if gigabytes is not None else (12.0 if device.type == "cuda" else 1.8)
    result = Result(str(device), {}, {})

    def measured(case: Case) -> None:
        result.cases.append(case)
        so_far({**result.record(), "unfinished": MEASURING})

    names = [name for name in LOADERS if name in loaders]
    try:
        _measure(result, measured, device, int(wanted * GB), deadline, where, names, scale)
    except (DeadlineExceeded, KeyboardInterrupt) as cause:
        if not result.cases:
            raise
        result.unfinished = one_line(cause) if str(cause) else INTERRUPTED
    return result


def _measure(
    result: Result,
    measured: Callable[[Case], None],
    device: torch.device,
    nbytes: int,
    deadline: Deadline,
    where: Sequence[str],
    loaders: Sequence[str],
    scale: int,
) -> None:
    """Measure into ``result``; loads are told one by one."""
    shape = shapes(nbytes, scale=scale)[0]
    if device.type == "cuda":
        result.limits["pinned_copy_GBps"] = round(limits.pinned_copy(device) / GB, 2)
    with WorkFolder() as disk:
        folder = disk.part()
        _need(folder, shape, copies=2 if "http" in where else 1)
        checkpoint = make(folder, shape, deadline)
        settle(checkpoint.files)
        for place in where:
            with ExitStack() as stack:
                source = _source(stack, place, checkpoint, shape, result, disk, deadline)
                if source is None:
                    continue
                for name in loaders:
                    if place in reads_from(name):
                        part = disk.part()
                        measured(_case(name, place, source, shape, result, part, deadline))
    result.progressive = _progressive(device, nbytes, scale, deadline)


def _source(
    stack: ExitStack,
    where: str,
    checkpoint: Checkpoint,
    shape: Shape,
    result: Result,
    disk: WorkFolder,
    deadline: Deadline,
) -> _Source | None:
    """The checkpoint in a place, until ``stack`` ends, and the place's limit in ``result``.

    None, and the reason in ``result``, where this machine has no such place.
    """
    if where == "http":
        if (package := http.lacking()) is not None:
            result.skipped[where] = f"the package {package!r} is not installed"
            return None
        server = stack.enter_context(http.served(checkpoint, shape.ref, disk.part(), deadline))
        result.http = _rates(server.reads)
        result.limits["http_read_GBps"] = max(result.http.values())
        return _Source(server.origin, server.files, server.env)
    if where == "tmpfs":
        if not _room_in_memory(shape):
            result.skipped[where] = f"no room in {_MEMORY}"
            return None
        memory = stack.enter_context(WorkFolder(_MEMORY)).part()
        checkpoint = checkpoint.copied(memory, deadline)
    elif where == "cold":
        result.disk = _rates(limits.disk_reads(checkpoint.files))
        if result.disk:
            result.limits["disk_read_GBps"] = max(result.disk.values())
    return _Source.on_disk(checkpoint)


def _rates(found: Mapping[str, float]) -> dict[str, float]:
    return {way: round(rate / GB, 2) for way, rate in found.items()}


def _case(
    name: str,
    where: str,
    source: _Source,
    shape: Shape,
    result: Result,
    folder: Path,
    deadline: Deadline,
) -> Case:
    told = {
        "loader": name,
        "device": result.device,
        "files": source.files,
        "origin": source.origin,
        "ref": shape.ref,
        "shape": asdict(shape),
        "cold": where == "cold",
    }
    if where == "warm":
        _warm(source.files)
    module = "warmcast.infra.bench.stream.child"
    with Child(f"{name}, {where}", module, [json.dumps(told)], source.env, folder) as child:
        answer = child.answer(deadline)
        child.end()
    first, second = answer["seconds"][0], min(answer["seconds"][1:])
    limit = result.limits.get(_LIMITS.get(where, "pinned_copy_GBps"))
    rate = shape.nbytes / second / GB
    return Case(
        name,
        where,
        shape.nbytes,
        round(second, 4),
        round(rate, 2),
        round(rate / limit, 3) if limit else None,
        not answer["wrong"],
        round(first, 4),
        round(answer["cpu"] / shape.nbytes * GB, 3),
        answer["memory"],
    )


def _progressive(device: torch.device, nbytes: int, scale: int, deadline: Deadline) -> Progressive:
    widths = sizes(min(scale, 64))
    shape = widths.shape(nbytes)
    in_memory = _room_in_memory(shape)
    with WorkFolder(_MEMORY if in_memory else None) as files, WorkFolder() as logs:
        checkpoint = make(files.part(), shape, deadline)
        told = {
            "device": str(device),
            "origin": checkpoint.origin,
            "ref": shape.ref,
            "sizes": asdict(widths),
            "layers": shape.layers,
            "tokens": _TOKENS[device.type],
        }
        module = "warmcast.infra.bench.stream.progressive"
        given = [json.dumps(told)]
        with Child("progressive", module, given, _environment(), logs.part()) as child:
            answer = child.answer(deadline)
            child.end()
    longer = max(answer["load"], answer["compute"])
    return Progressive(
        "tmpfs" if in_memory else "warm",
        shape.nbytes,
        round(answer["load"], 4),
        round(answer["compute"], 4),
        round(answer["first_output"], 4),
        round(answer["first_output"] / longer, 3),
        round(answer["first_layer"], 4),
        answer["same"],
    )


def _room_in_memory(shape: Shape) -> bool:
    return _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 1.1 * shape.nbytes


def _warm(files: Sequence[str]) -> None:
    buffer = bytearray(1 << 20)
    for name in files:
        with Path(name).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("WARMCAST_")}


def _need(folder: Path, shape: Shape, copies: int) -> None:
    free, needed = shutil.disk_usage(folder).free, 1.1 * copies * shape.nbytes
    if free < needed:
        raise UsageError(
            f"work folder {folder.parent}",
            expected=f"{needed / GB:.1f} GB",
            found=f"{free / GB:.1f} GB free",
            do="name a smaller model with --gb, or another folder with TMPDIR",
        )
