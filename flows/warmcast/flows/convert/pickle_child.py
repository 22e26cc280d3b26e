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
from warmcast.flows.convert.ties import HIDDEN, Stored, View, resolve_ties, row_major, tie_metadata
from warmcast.flows.errors import InvalidCheckpoint, UnsafePickle
from warmcast.manifests.errors import WarmcastError

if TYPE_CHECKING:
    import torch

ALLOWANCE = 512 << 20
"""Bytes for the pickle's own objects, its strings and dicts."""

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Names under which training frameworks keep the weights beside optimizer and step."""

_PR_SET_PDEATHSIG = 1
_ZIP = b"PK\x03\x04"
_GLOBAL = re.compile(
    r"(?:Unsupported global: GLOBAL|unsupported GLOBAL|Unsupported class) ([\w.]+)"
)

_PAIRS = "float4_e2m1fn_x2"  # torch counts pairs, safetensors single elements

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    _PAIRS: "F4",
}
"""safetensors' names of torch's dtypes."""


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
    dense = {name: plain(job.path, name, tensor) for name, tensor in tensors.items()}
    stored = resolve_ties((_view(n, t) for n, t in dense.items()), job.first_hidden)
    return _write(job, dense, stored, tell) | {"ignored": ignored}


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


def state_dict(loaded: Any, path: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors by name, and what was left out."""
    if not isinstance(loaded, Mapping):
        raise InvalidCheckpoint(path, expected="a dict of tensors", found=type(loaded).__name__)
    if _has_tensors(loaded):
        return _flat(loaded, path)
    wrapped = [key for key, value in loaded.items() if _is_state_dict(value)]
    if len(wrapped) != 1 or wrapped[0] not in WRAPPERS:
        raise InvalidCheckpoint(
            path,
            expected=f"a dict of tensors, or one under {' or '.join(WRAPPERS)}",
            found=f"tensors under {_names(wrapped)}" if wrapped else f"keys {_names(loaded)}",
            do="save the state dict alone",
        )
    tensors, ignored = _flat(loaded[wrapped[0]], f"{path}: {wrapped[0]}")
    others = [
        f"{path}: {key!r} ({type(v).__name__})" for key, v in loaded.items() if key not in wrapped
    ]
    return tensors, ignored + others


def _flat(state: Mapping[Any, Any], path: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    import torch

    tensors: dict[str, torch.Tensor] = {}
    ignored = []
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            if not isinstance(name, str) or not name:
                raise InvalidCheckpoint(path, expected="names of tensors", found=repr(name)[:80])
            tensors[name] = value
        elif isinstance(value, (Mapping, list, tuple)) and _has_tensors_within(value):
            raise InvalidCheckpoint(
                f"{path}: {name!r}",
                expected="a tensor",
                found=f"a {type(value).__name__} that holds tensors",
                do="save a flat state dict",
            )
        else:
            ignored.append(f"{path}: {name!r} ({type(value).__name__})")
    return tensors, ignored


def _has_tensors(value: Mapping[Any, Any]) -> bool:
    import torch

    return any(isinstance(v, torch.Tensor) for v in value.values())


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and _has_tensors(value)


def _has_tensors_within(value: Any) -> bool:
    """Whether a container holds tensors at any depth; each container is looked at once."""
    import torch

    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            return True
        if isinstance(item, (Mapping, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, Mapping) else item)
    return False


def _names(keys: Any) -> str:
    names = sorted(map(str, keys))
    return ", ".join(name[:40] for name in names[:8]) + (", …" if len(names) > 8 else "")


def plain(path: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes in memory, or :class:`InvalidCheckpoint`."""
    import torch

    dtype = _dtype(tensor)
    problem = None
    if name.startswith(HIDDEN):
        problem = f"a name that begins with {HIDDEN!r}, which is taken"
    elif tensor.is_quantized:
        problem = "a quantized one"
    elif tensor.is_nested or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        problem = f"a {type(tensor).__name__}"
    elif tensor.layout != torch.strided:
        problem = f"a {str(tensor.layout).removeprefix('torch.')} one"
    elif tensor.device.type != "cpu":
        problem = f"one on {tensor.device.type}, without bytes"
    elif dtype not in DTYPES or (dtype == _PAIRS and not tensor.dim()):
        problem = f"one of {dtype}"
    if problem:
        raise InvalidCheckpoint(
            f"{path}: tensor {name!r}",
            expected="a dense tensor of a dtype that safetensors knows",
            found=problem,
            do="convert it before it is saved",
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if dtype == _PAIRS and not tensor.is_contiguous():
        # Strides over pairs cannot be told in single elements.
        return _integers(tensor).contiguous().view(tensor.dtype)
    return tensor


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _view(name: str, tensor: torch.Tensor) -> View:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    offset = int(tensor.storage_offset())
    dtype = _dtype(tensor)
    if dtype == _PAIRS:
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

    pairs = 2 if _dtype(tensor) == _PAIRS else 1
    tensor = _integers(tensor)
    if span is None:
        tensor = tensor.contiguous()
    else:
        begin, end = span
        tensor = torch.as_strided(tensor, ((end - begin) // pairs,), (1,), begin // pairs)
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # the view keeps the array, and the array its memory
    return memoryview(memory).cast("B")


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of its width: torch can copy those, whatever the dtype."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


if __name__ == "__main__":
    main()
