"""GPU memory given to other processes of its host, and opened by them: CUDA IPC.

What is given is described as *blocks* (pieces of memory as the driver hands them out) and
*extents* (runs of bytes in blocks), whose concatenation is that of a transfer's regions. Memory of
``cudaMalloc`` goes by a handle for the whole allocation, whatever tensors lie in it; memory that
was mapped piece by piece, as torch does with expandable segments, by a file descriptor a piece. A
pool allocator's memory, and pieces that were made without leave to export, cannot be given.

An opened block stays valid when the process that gave it dies: the driver counts references.

Source: CUDA driver API, interprocess communication and virtual memory management.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, StringConstraints, model_validator
from torch import Tensor

from warmcast.loader.errors import TransferFailed, TransportUnusable
from warmcast.manifests.manifest import Record

if TYPE_CHECKING:
    from types import ModuleType

MAX_FDS = 64
"""File descriptors in one part; the kernel passes 253 at most."""

_EXTENTS = 512
"""Extents in one part, at most."""

_LAZY_PEER_ACCESS = 1
_POSIX_FD = 1
_Size = Annotated[int, Field(gt=0, lt=1 << 62, strict=True)]
_Place = Annotated[int, Field(ge=0, lt=1 << 62, strict=True)]


class Block(Record):
    """Memory as the driver hands it out, of ``sum(sizes)`` bytes.

    ``ipc``: one allocation, by its handle (hex). ``fd``: pieces that lie one after another, of
    these sizes, by as many file descriptors.
    """

    kind: Literal["ipc", "fd"]
    sizes: tuple[_Size, ...]
    handle: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{128})?$")] = ""

    @model_validator(mode="after")
    def _of_its_kind(self) -> Block:
        if self.kind == "ipc" and (len(self.sizes) != 1 or not self.handle):
            raise ValueError("an allocation of one size, and its handle")
        if self.kind == "fd" and (not self.sizes or self.handle):
            raise ValueError("pieces, and no handle")
        if sum(self.sizes) >= 1 << 62:
            raise ValueError("pieces of less than 2^62 bytes in all")
        return self


class Part(Record):
    """The next blocks, and the next extents: (block's number, offset, bytes).

    Blocks are numbered from the first part on; ``last`` marks the end.
    """

    blocks: tuple[Block, ...] = ()
    extents: tuple[tuple[_Place, _Place, _Size], ...] = ()
    last: bool = False


@cache
def driver() -> ModuleType | None:
    """cuda-bindings' driver API; None where it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None


def unexportable(regions: Sequence[Tensor]) -> str | None:
    """Why this memory cannot be given to another process; None if it can."""
    cuda = _driver()
    attribute = cuda.CUpointer_attribute
    for region in regions:
        pointer = region.data_ptr()
        error, legacy = cuda.cuPointerGetAttribute(
            attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer
        )
        if error != cuda.CUresult.CUDA_SUCCESS:
            return "the memory is not CUDA's"
        if legacy:
            continue
        error, allowed = cuda.cuPointerGetAttribute(
            attribute.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, pointer
        )
        if error != cuda.CUresult.CUDA_SUCCESS or not int(allowed) & _POSIX_FD:
            return "the memory is of an allocator that does not let it be exported"
    return None


def export(regions: Sequence[Tensor]) -> Iterator[tuple[Part, list[int]]]:
    """Describe regions, part by part, each with file descriptors that the caller closes.

    The context of the regions' GPU has to be current. Raises :class:`TransferFailed`.
    """
    exporter = _Exporter()
    try:
        for region in regions:
            at, end = region.data_ptr(), region.data_ptr() + region.numel()
            while at < end:
                if exporter.full:
                    yield exporter.take(last=False)
                at = exporter.add(at, end)
        yield exporter.take(last=True)
    finally:
        exporter.close()


def described(regions: Sequence[Tensor]) -> list[Part] | None:
    """The parts of :func:`export`, ahead of time; None where they need file descriptors."""
    parts = []
    for part, fds in export(regions):
        for fd in fds:
            os.close(fd)
        if fds:
            return None
        parts.append(part)
    return parts


class _Exporter:
    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int, int]] = {}  # base -> block, place in it, bytes
        self._count = 0
        self._blocks: list[Block] = []
        self._extents: list[tuple[int, int, int]] = []
        self._fds: list[int] = []
        self._end = -1  # where the last block ends, if it can grow

    @property
    def full(self) -> bool:
        return (
            len(self._fds) == MAX_FDS
            or len(self._blocks) == MAX_FDS
            or len(self._extents) == _EXTENTS
        )

    def take(self, *, last: bool) -> tuple[Part, list[int]]:
        part = Part(blocks=tuple(self._blocks), extents=tuple(self._extents), last=last)
        fds = self._fds
        self._blocks, self._extents, self._fds, self._end = [], [], [], -1
        return part, fds

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def add(self, at: int, end: int) -> int:
        """Add the bytes from ``at`` as far as one piece of memory goes; where that is."""
        cuda = _driver()
        base, size = _done("cuMemGetAddressRange", cuda.cuMemGetAddressRange(at))
        base, size = int(base), int(size)
        if base not in self._known:
            self._known[base] = (*self._export(base, size), size)
        block, place, _ = self._known[base]
        upto = min(end, base + size)
        offset, nbytes = place + at - base, upto - at
        if self._extents and self._extents[-1][0] == block:
            _, begin, length = self._extents[-1]
            if begin + length == offset:
                self._extents[-1] = (block, begin, length + nbytes)
                return upto
        self._extents.append((block, offset, nbytes))
        return upto

    def _export(self, base: int, size: int) -> tuple[int, int]:
        """Give a piece; its block's number and its place there."""
        cuda = _driver()
        error, handle = cuda.cuIpcGetMemHandle(base)
        if error == cuda.CUresult.CUDA_SUCCESS:
            self._blocks.append(
                Block(kind="ipc", sizes=(size,), handle=bytes(handle.reserved).hex())
            )
            self._end = -1
            self._count += 1
            return self._count - 1, 0
        piece = _done("cuMemRetainAllocationHandle", cuda.cuMemRetainAllocationHandle(base))
        try:
            kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            exported = cuda.cuMemExportToShareableHandle(piece, kind, 0)
            self._fds.append(int(_done("cuMemExportToShareableHandle", exported)))
        finally:
            cuda.cuMemRelease(piece)
        if self._end == base:
            grown = self._blocks[-1]
            place = sum(grown.sizes)
            self._blocks[-1] = Block(kind="fd", sizes=(*grown.sizes, size))
        else:
            place = 0
            self._blocks.append(Block(kind="fd", sizes=(size,)))
            self._count += 1
        self._end = base + size
        return self._count - 1, place


@dataclass(slots=True)
class Opened:
    """Another process's memory, as far as its parts have come.

    ``extents`` are (address, bytes), in order; ``whole`` once the last part is there. The context
    of the GPU that reads it has to be current for every call. :meth:`close` gives all back.
    """

    device: int
    nbytes: int = 0
    whole: bool = False
    extents: list[tuple[int, int]] = field(default_factory=list)
    _blocks: list[tuple[int, int]] = field(default_factory=list)  # address, bytes
    _handles: list[int] = field(default_factory=list)
    # Address, bytes reserved, and of each piece mapped there its bytes.
    _mapped: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def add(self, part: Part, fds: Sequence[int]) -> None:
        """Open the blocks of a part. Closes ``fds``.

        Raises :class:`TransportUnusable` where the driver does not open them, as between two
        containers that do not share their processes' numbers, and :class:`TransferFailed`.
        """
        left = list(fds)
        try:
            for block in part.blocks:
                count = len(block.sizes) if block.kind == "fd" else 0
                if count > len(left):
                    raise TransferFailed(
                        "ipc", expected=f"{count} file descriptors", found=f"{len(left)}"
                    )
                mine, left = left[:count], left[count:]
                try:
                    address = self._map(block, mine) if count else self._open(block)
                except TransferFailed as cause:
                    raise TransportUnusable(str(cause)) from cause
                self._blocks.append((address, sum(block.sizes)))
            for number, offset, nbytes in part.extents:
                if number >= len(self._blocks) or offset + nbytes > self._blocks[number][1]:
                    raise TransferFailed(
                        "ipc", expected="extents inside their blocks", found=f"{offset}+{nbytes}"
                    )
                self.extents.append((self._blocks[number][0] + offset, nbytes))
                self.nbytes += nbytes
            self.whole = part.last
        finally:
            for fd in left:
                os.close(fd)

    def close(self) -> None:
        """Give every mapping back; nothing may be reading any more."""
        cuda = _driver()
        for address in self._handles:
            cuda.cuIpcCloseMemHandle(address)
        for address, total, pieces in self._mapped:
            at = address
            for nbytes in pieces:
                cuda.cuMemUnmap(at, nbytes)
                at += nbytes
            cuda.cuMemAddressFree(address, total)
        self._handles.clear()
        self._mapped.clear()

    def _open(self, block: Block) -> int:
        cuda = _driver()
        handle = cuda.CUipcMemHandle()
        handle.reserved = bytes.fromhex(block.handle)
        address = int(
            _done("cuIpcOpenMemHandle", cuda.cuIpcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
        )
        self._handles.append(address)
        return address

    def _map(self, block: Block, fds: list[int]) -> int:
        cuda = _driver()
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        total = sum(block.sizes)
        try:
            address = int(_done("cuMemAddressReserve", cuda.cuMemAddressReserve(total, 0, 0, 0)))
            mapped: list[int] = []
            self._mapped.append((address, total, mapped))
            at = address
            for size, fd in zip(block.sizes, fds, strict=True):
                piece = _done(
                    "cuMemImportFromShareableHandle",
                    cuda.cuMemImportFromShareableHandle(fd, kind),
                )
                try:
                    _done("cuMemMap", cuda.cuMemMap(at, size, 0, piece, 0))
                finally:
                    cuda.cuMemRelease(piece)  # the mapping holds it
                mapped.append(size)
                at += size
            access = cuda.CUmemAccessDesc()
            access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = self.device
            access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
            _done("cuMemSetAccess", cuda.cuMemSetAccess(address, total, [access], 1))
        finally:
            for fd in fds:
                os.close(fd)
        return address


def copy(runs: Sequence[tuple[int, int, int]], stream: torch.cuda.Stream) -> None:
    """Copy runs (to, from, bytes) on a stream, by the copy engine of the reading GPU.

    All together, where the driver can: one by one each costs several microseconds.
    """
    cuda, handle = _driver(), stream.cuda_stream
    if len(runs) > 1 and _batches():
        targets, sources = ([cuda.CUdeviceptr(run[side]) for run in runs] for side in (0, 1))
        attributes = cuda.CUmemcpyAttributes()
        order = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attributes.srcAccessOrder = order
        sizes = [nbytes for _, _, nbytes in runs]
        result = cuda.cuMemcpyBatchAsync(
            targets, sources, sizes, len(runs), [attributes], [0], 1, handle
        )
        _done("cuMemcpyBatchAsync", result)
        return
    for to, source, nbytes in runs:
        _done("cuMemcpyDtoDAsync", cuda.cuMemcpyDtoDAsync(to, source, nbytes, handle))


@cache
def _batches() -> bool:
    """Whether the driver copies in batches, and the bindings are those whose call we know."""
    error, version = _driver().cuDriverGetVersion()
    return int(error) == 0 and min(version, getattr(_driver(), "CUDA_VERSION", 0)) >= 13000


def _driver() -> Any:
    found = driver()
    if found is None:
        raise TransferFailed("ipc", expected="cuda-bindings", found="none")
    return found


def _done(call: str, result: tuple[Any, ...]) -> Any:
    """A driver call's result; raises :class:`TransferFailed` with its error."""
    error, *values = result
    if int(error) != 0:
        raise TransferFailed(f"ipc: {call}", expected="success", found=error.name)
    return values[0] if len(values) == 1 else tuple(values)
