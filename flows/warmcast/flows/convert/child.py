"""The process that converts: ``python -P -m warmcast.flows.convert.child``.

Standard input: one JSON object, a :class:`Job`. Standard output: JSON lines, some
``{"progress": bytes}`` and at last ``{"done": {...}}`` or ``{"failed": {...}}``. What libraries
print goes to standard error. The process ends with its parent.

Memory is bounded by RLIMIT_DATA: what the process holds at its start (and torch, where that is
needed), plus 512 MiB, plus the largest file as long as the checkpoint is opened, and the largest
tensor as long as it is written. Files are read in pieces or mapped for reading alone; such mappings
are the page cache's, and not counted. Not bounded by RLIMIT_AS, which counts the
libraries' mappings too, and these come to tens of GB where torch is built for GPUs.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from warmcast.flows.convert.archive import Checksums
from warmcast.flows.convert.embeddings import tie_embeddings
from warmcast.flows.convert.memory import import_torch, set_bound
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.convert.safetensors import write_safetensors
from warmcast.flows.convert.shards import shard
from warmcast.flows.convert.state_dict import check_name
from warmcast.flows.convert.tensors import Checkpoint, Files, Source, check_names
from warmcast.flows.convert.ties import tie_metadata
from warmcast.flows.steps.weights import check_index
from warmcast.manifests.canonical import canonical_json
from warmcast.manifests.errors import WarmcastError

Format = Literal["safetensors", "pickle", "dcp", "gguf", "megatron"]

ALLOWANCE = 512 << 20
"""Bytes beside the largest tensor: the checkpoint's own objects, and the pieces in work."""

NOTES = "warmcast.gguf"
"""The key of a header's metadata under which raw blocks' types and shapes stand, as JSON."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter to merge: its own sources, their format, and its config."""

    format: Format
    sources: tuple[Source, ...]
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """What the parent asks for; files go to the folder ``out`` as ``<n>`` counted from 0."""

    format: Format
    sources: tuple[Source, ...]
    options: ConvertOptions
    out: str
    parent: int
    index: tuple[str, dict[str, str]] | None = None
    tie_embeddings: bool = False
    adapter: Adapter | None = None


def main() -> None:
    """Do the job on standard input; always exits with 0 if it could tell what happened."""
    from pydantic import TypeAdapter

    job = TypeAdapter(Job).validate_json(sys.stdin.buffer.read())
    _end_with_parent(job.parent)
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        answer = {"done": _convert(job, lambda n: _tell(report, {"progress": n}))}
    except WarmcastError as cause:
        answer = {"failed": {"kind": type(cause).__name__, "message": str(cause)}}
    except MemoryError:
        answer = {"failed": {"kind": "memory", "message": ""}}
    except RuntimeError as cause:
        if "memory" not in str(cause):  # torch's own way to say so
            raise
        answer = {"failed": {"kind": "memory", "message": ""}}
    except OSError as cause:
        if cause.errno == errno.ENOMEM:
            answer = {"failed": {"kind": "memory", "message": ""}}
        elif cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            answer = {"failed": {"kind": "full", "message": cause.strerror}}
        else:
            raise
    _tell(report, answer)
    # There is nothing to tidy up, and torch takes long to.
    sys.stderr.flush()
    os._exit(0)


def _tell(report: Any, line: Mapping[str, Any]) -> None:
    report.write(json.dumps(line) + "\n")
    report.flush()


def _end_with_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has gone")


def _convert(job: Job, tell: Callable[[int], None]) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    set_bound(ALLOWANCE + max((source.size for source in job.sources), default=0))
    extra = job.adapter.sources if job.adapter else ()
    with Files((*job.sources, *extra)) as files, Checksums() as checksums:
        checkpoint = _opened(job, files, checksums)
        if job.tie_embeddings:
            checkpoint = tie_embeddings(checkpoint)
        largest = max((tensor.nbytes for tensor in checkpoint.tensors), default=0)
        if job.options.dtype is not None:
            from warmcast.flows.convert.cast import cast

            checkpoint = cast(checkpoint, job.options.dtype, job.options.keep_dtype)
        if any(tensor.extents is None for tensor in checkpoint.tensors):
            import_torch()
        set_bound(ALLOWANCE + largest)
        done = _write(job, files, checkpoint, tell)
        checksums.result()
        files.check()
    return done


def _opened(job: Job, files: Files, checksums: Checksums) -> Checkpoint:
    """The checkpoint that the job means, described; its archives are being checked."""
    count = len(job.sources)
    opened = open_format(job.format, files, range(count), job.options, checksums)
    if job.index is not None:
        notes = check_index(job.index, opened.holder)
        opened = replace(opened, left_out=(*opened.left_out, *notes))
    if job.adapter is None:
        return opened
    from warmcast.flows.convert.lora import merge_adapter

    numbers = range(count, count + len(job.adapter.sources))
    adapter = open_format(job.adapter.format, files, numbers, ConvertOptions(), checksums)
    return merge_adapter(opened, adapter, job.adapter.config)


def open_format(
    format_: Format, files: Files, numbers: range, options: ConvertOptions, checksums: Checksums
) -> Checkpoint:
    """The checkpoint in the source files of these numbers."""
    checkpoint = _open(format_, files, numbers, options, checksums)
    check_names(checkpoint)
    if format_ in ("dcp", "gguf", "megatron"):  # which have no tensors of such names of our own
        for tensor in checkpoint.tensors:
            check_name(files.sources[numbers[0]].path, tensor.name)
    return checkpoint


def _open(
    format_: Format, files: Files, numbers: range, options: ConvertOptions, checksums: Checksums
) -> Checkpoint:
    """By format; a new one is a line here."""
    if format_ == "safetensors":
        from warmcast.flows.convert.safetensors import open_safetensors

        return open_safetensors(files, numbers)
    if format_ == "dcp":
        from warmcast.flows.convert.dcp import open_dcp

        return open_dcp(files, numbers, checksums)
    if format_ == "gguf":
        from warmcast.flows.convert.gguf import open_gguf

        return open_gguf(files, numbers, dequantise=options.dequantise)
    if format_ == "megatron":
        from warmcast.flows.convert.megatron import open_megatron

        return open_megatron(files, numbers, options.merge, checksums)
    from warmcast.flows.convert.pickle import open_pickles

    return open_pickles(files, numbers, checksums)


def _write(
    job: Job, files: Files, checkpoint: Checkpoint, tell: Callable[[int], None]
) -> dict[str, Any]:
    """Write the files; what they hold, and what else there is to tell."""
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    plan = shard(checkpoint.tensors, job.options.max_shard_nbytes, job.options.shard_by)
    for number, content in enumerate(plan):
        names = {tensor.name for tensor in content}
        ties = [tie for tie in checkpoint.tied if tie.of in names]
        notes = {tensor.name: tensor.note for tensor in content if tensor.note}
        metadata = {"format": "pt"} | tie_metadata(ties, shapes)
        if notes:
            metadata[NOTES] = canonical_json(notes).decode()
        write_safetensors(Path(job.out) / str(number), content, metadata, files, tell)
    for name, data in checkpoint.extra.items():
        (Path(job.out) / name).write_bytes(data)
    return {
        "files": [[tensor.name for tensor in content] for content in plan],
        "tied": [tie.model_dump(mode="json") for tie in checkpoint.tied],
        "left_out": list(checkpoint.left_out),
        "config": checkpoint.config,
        "extra": sorted(checkpoint.extra),
    }


if __name__ == "__main__":
    main()
