"""The process that opens a pickle: ``python -P -m warmcast.flows.convert.pickle_child``.

Standard input: one JSON object, a :class:`Job`. Standard output: JSON lines, a
``{"progress": bytes}`` for each tensor and at last ``{"done": {...}}`` or ``{"failed": {...}}``.
What libraries print goes to standard error. The process ends with its parent.

Memory is bounded by RLIMIT_DATA: what the process holds once torch is imported, plus twice the
file (once as it is loaded or mapped, once for a copy that makes a tensor row-major), plus 512 MiB
for the pickle's own objects. Not by RLIMIT_AS, which counts the libraries' mappings too, and
these come to tens of GB where torch is built for GPUs.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import resource
import signal
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmcast.flows.convert.safetensors import StoredTensor, shard, write_safetensors
from warmcast.flows.convert.state_dict import (
    DTYPES,
    PAIRS,
    as_integers,
    dense,
    dtype_of,
    state_dict,
)
from warmcast.flows.convert.ties import Stored, View, resolve_ties, row_major, tie_metadata
from warmcast.flows.errors import InvalidCheckpoint, UnsafePickle
from warmcast.manifests.errors import WarmcastError

if TYPE_CHECKING:
    import torch

ALLOWANCE = 512 << 20
"""Bytes for the pickle's own objects, its strings and dicts."""

_PR_SET_PDEATHSIG = 1
_ZIP = b"PK\x03\x04"
_GLOBAL = re.compile(
    r"(?:Unsupported global: GLOBAL|unsupported GLOBAL|Unsupported class) ([\w.]+)"
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the parent asks for.

    ``source`` is opened; ``path`` is its name in messages; files go to ``out`` as ``<n>`` counted
    from 0; hidden tensors are named from ``first_hidden``.
    """

    source: str
    path: str
    out: str
    max_shard_nbytes: int
    first_hidden: int
    parent: int


def main() -> None:
    """Do the job on standard input; always exits with 0 if it could tell what happened."""
    job = Job(**json.load(sys.stdin))
    _end_with_parent(job.parent)
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        answer = {"done": _convert(job, lambda n: _tell(report, {"progress": n}))}
    except WarmcastError as cause:
        answer = {"failed": {"kind": type(cause).__name__, "message": str(cause)}}
    except MemoryError:
        answer = {"failed": {"kind": "memory", "message": ""}}
    except OSError as cause:
        if cause.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        answer = {"failed": {"kind": "full", "message": cause.strerror}}
    _tell(report, answer)


def _tell(report: Any, line: Mapping[str, Any]) -> None:
    report.write(json.dumps(line) + "\n")
    report.flush()


def _end_with_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has gone")


def _convert(job: Job, tell: Any) -> dict[str, Any]:
    # One thread: stacks and arenas of a pool would count against the bound.
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    _bound_memory(2 * Path(job.source).stat().st_size + ALLOWANCE)
    loaded = load_checkpoint(job)
    tensors, ignored = state_dict(loaded, job.path)
    del loaded
    plain = {name: dense(job.path, name, tensor) for name, tensor in tensors.items()}
    stored = resolve_ties((_view(n, t) for n, t in plain.items()), job.first_hidden)
    return _write(job, plain, stored, tell) | {"ignored": ignored}


def _bound_memory(more: int) -> None:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            bound = int(line.split()[1]) * 1024 + more
            resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def load_checkpoint(job: Job) -> Any:
    """What the file holds; raises ``UnsafePickle``, ``InvalidCheckpoint``, ``MemoryError``."""
    import pickle

    import torch

    with Path(job.source).open("rb") as file:
        zipped = file.read(len(_ZIP)) == _ZIP
    if zipped:
        _check_zip(job)
    try:
        return torch.load(job.source, map_location="cpu", weights_only=True, mmap=zipped)
    except MemoryError:
        raise
    except pickle.UnpicklingError as cause:
        if found := _GLOBAL.search(str(cause)):
            raise UnsafePickle(
                job.path,
                expected="tensors and plain values",
                found=f"the forbidden global {found[1]!r}",
                do="it was not run; ask for safetensors, or for the state dict alone",
            ) from None
        raise _invalid(job.path, cause) from None
    except Exception as cause:  # noqa: BLE001
        # A hostile or damaged stream makes the unpickler raise anything at all.
        if "memory" in str(cause).lower():
            raise MemoryError from None
        raise _invalid(job.path, cause) from None


def _check_zip(job: Job) -> None:
    """Hold the archive to what ``torch.save`` writes, which a mapping would not check.

    Stored entries only (a compressed one could be a bomb), and each with its right CRC-32.
    """
    try:
        with zipfile.ZipFile(job.source) as archive:
            entries = archive.infolist()
            packed = next((e for e in entries if e.compress_type != zipfile.ZIP_STORED), None)
            if packed is not None:
                raise InvalidCheckpoint(
                    f"{job.path}: {packed.filename}",
                    expected="entries that are not compressed, as torch.save writes them",
                    found="a compressed one",
                    do="save it again with torch.save",
                )
            # torch.save leaves them all out on demand (set_crc32_options).
            if any(entry.CRC for entry in entries) and (bad := archive.testzip()):
                raise InvalidCheckpoint(
                    f"{job.path}: {bad}",
                    expected="bytes that match their CRC-32",
                    found="others",
                    do="the file is damaged; fetch it again",
                )
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as cause:
        raise _invalid(job.path, cause) from None


def _invalid(path: str, cause: Exception) -> InvalidCheckpoint:
    text = " ".join(str(cause).split())
    # torch's advice to load without weights_only is none to pass on.
    text = re.sub(r"^Weights only load failed\..*?WeightsUnpickler error: ", "", text)
    return InvalidCheckpoint(
        path,
        expected="a checkpoint that torch.load(weights_only=True) opens",
        found=f"{type(cause).__name__} {text[:200]}",
        do="fetch it again, or save it again as a plain state dict",
    )


def _view(name: str, tensor: torch.Tensor) -> View:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    offset = int(tensor.storage_offset())
    dtype = dtype_of(tensor)
    if dtype == PAIRS:
        shape = (*shape[:-1], 2 * shape[-1])
        stride, offset = row_major(shape), 2 * offset
    storage = tensor.untyped_storage().data_ptr()
    return View(name, storage, DTYPES[dtype], shape, stride, offset)


def _write(
    job: Job, tensors: Mapping[str, torch.Tensor], stored: list[Stored], tell: Any
) -> dict[str, Any]:
    """Write the files; what they hold, and the ties."""
    items = {item.name: item for item in stored}
    described = (StoredTensor(item.name, item.view.dtype, item.shape) for item in stored)
    plan = shard(described, job.max_shard_nbytes)
    for number, content in enumerate(plan):

        def data(tensor: StoredTensor) -> memoryview:
            item = items[tensor.name]
            tell(tensor.nbytes)
            return _bytes(tensors[item.view.name], item.span)

        ties = [tie for tensor in content for tie in items[tensor.name].tied]
        metadata = {"format": "pt"} | tie_metadata(ties, items)
        write_safetensors(Path(job.out) / str(number), content, data, metadata)
    return {
        "files": [[tensor.name for tensor in content] for content in plan],
        "tied": [tie.model_dump(mode="json") for item in stored for tie in item.tied],
    }


def _bytes(tensor: torch.Tensor, span: tuple[int, int] | None) -> memoryview:
    """A tensor's bytes row-major, or those of a span of its storage; a copy only if need be."""
    import torch

    pairs = 2 if dtype_of(tensor) == PAIRS else 1
    tensor = as_integers(tensor)
    if span is None:
        tensor = tensor.contiguous()
    else:
        begin, end = span
        tensor = torch.as_strided(tensor, ((end - begin) // pairs,), (1,), begin // pairs)
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # the view keeps the array, and the array its memory
    return memoryview(memory).cast("B")


if __name__ == "__main__":
    main()
