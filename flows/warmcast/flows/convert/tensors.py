"""The tensors of a checkpoint, described where they lie, and read in pieces when they are written.

Formats differ in where a tensor's bytes are; the writer needs its name, dtype and shape, and its
row-major bytes in order. Where these lie in files as they are, as :class:`Extent`, the kernel
copies them; else they are computed a piece at a time. So a conversion holds pieces, not tensors.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warmcast.flows.errors import InvalidCheckpoint, SourceChanged
from warmcast.manifests import dtypes
from warmcast.manifests.manifest import TiedEntry

if TYPE_CHECKING:
    import torch

PIECE = 1 << 20
"""Bytes that are read, computed or written at a time: what a core's cache holds."""

_MOST_OPEN = 128
"""Files that are open at a time: a distributed checkpoint may have thousands."""

INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""The torch dtype by whose values elements of a width are moved: torch can copy those."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source file: its name in messages, where it lies, and the state it must be in."""

    path: str
    location: str
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Extent:
    """``nbytes`` bytes at ``offset`` of the source file number ``file``."""

    file: int
    offset: int
    nbytes: int


Pieces = Callable[[], Iterator[memoryview]]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written: its name, safetensors dtype, shape in elements, and its bytes.

    ``pieces`` yields the row-major bytes in order, in buffers of whole elements which are good
    until the next is asked for. ``extents`` is where the same bytes lie, if they do. ``note`` is
    what its file's metadata say of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Pieces
    extents: tuple[Extent, ...] | None = None
    note: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        """The tensor's length in bytes."""
        length = dtypes.nbytes(self.dtype, math.prod(self.shape))
        if length is None:
            raise InvalidCheckpoint(
                f"tensor {self.name!r}",
                expected=f"a shape that fills whole bytes of {self.dtype}",
                found=list(self.shape),
            )
        return length


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was opened: stored tensors, views of them, and what is left out, told.

    ``config`` is what the file says of the model, where the format has such; ``extra`` are small
    files to be deployed beside the weights, by name. ``holder`` is the source of each name, where
    an index can contradict it.
    """

    tensors: tuple[Tensor, ...]
    tied: tuple[TiedEntry, ...] = ()
    left_out: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, bytes] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)


def check_names(checkpoint: Checkpoint) -> None:
    """Raise :class:`InvalidCheckpoint` for a name that cannot be written, or only harms."""
    for name in (*(t.name for t in checkpoint.tensors), *(t.name for t in checkpoint.tied)):
        # Control characters, and surrogates, which UTF-8 has none of.
        if not name or any(c < " " or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in name):
            raise InvalidCheckpoint(
                f"tensor {name!r:.80}", expected="a name of printable text", found="another"
            )


class Files:
    """The source files, opened as they are needed. Not safe between threads."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self._open: OrderedDict[int, int] = OrderedDict()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def check(self) -> None:
        """Raise :class:`SourceChanged` if a file is no longer in its state."""
        for source in self.sources:
            self._compare(source, os.stat(source.location))  # noqa: PTH116

    def fileno(self, number: int) -> int:
        """The descriptor of a file, good until another is asked for."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= _MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        source = self.sources[number]
        descriptor = os.open(source.location, os.O_RDONLY | os.O_CLOEXEC)
        self._open[number] = descriptor
        self._compare(source, os.fstat(descriptor))
        return descriptor

    def read(self, extent: Extent) -> bytes:
        """The bytes of an extent, all at once."""
        self._check_extent(extent)
        data = bytearray(extent.nbytes)
        self._fill(extent.file, extent.offset, memoryview(data))
        return bytes(data)

    def pieces(self, extents: Iterable[Extent], piece: int = PIECE) -> Iterator[memoryview]:
        """The bytes of extents one after another, in one buffer that is used again."""
        buffer = memoryview(bytearray(0))
        for extent in extents:
            self._check_extent(extent)
            if len(buffer) < min(piece, extent.nbytes):
                buffer = memoryview(bytearray(min(piece, extent.nbytes)))
            for start in range(0, extent.nbytes, piece):
                view = buffer[: min(piece, extent.nbytes - start)]
                self._fill(extent.file, extent.offset + start, view)
                yield view

    def mapped(self, extent: Extent) -> torch.Tensor:
        """The bytes of an extent as a 1-D tensor of ``uint8``, mapped; not to be written to.

        Mapped for reading alone: such pages are the page cache's, and no memory of the process.
        """
        import torch

        self._check_extent(extent)
        if not extent.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        start = extent.offset - extent.offset % mmap.ALLOCATIONGRANULARITY
        length = extent.offset + extent.nbytes - start
        memory = mmap.mmap(self.fileno(extent.file), length, access=mmap.ACCESS_READ, offset=start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it cannot be written to
            return torch.frombuffer(
                memory, dtype=torch.uint8, count=extent.nbytes, offset=extent.offset - start
            )

    def _check_extent(self, extent: Extent) -> None:
        source = self.sources[extent.file]
        if not 0 <= extent.offset <= extent.offset + extent.nbytes <= source.size:
            raise InvalidCheckpoint(
                source.path,
                expected=f"bytes {extent.offset} to {extent.offset + extent.nbytes}",
                found=f"a file of {source.size}",
                do="the file is cut off; fetch it again",
            )

    def _fill(self, number: int, offset: int, buffer: memoryview) -> None:
        descriptor = self.fileno(number)
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
            if not count:
                raise _changed(self.sources[number])
            done += count

    @staticmethod
    def _compare(source: Source, found: os.stat_result) -> None:
        state = (found.st_size, found.st_mtime_ns, found.st_ino)
        if state != (source.size, source.mtime_ns, source.inode):
            raise _changed(source)


def in_files(
    files: Files,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    extents: Sequence[Extent],
    note: dict[str, Any] | None = None,
) -> Tensor:
    """A tensor whose row-major bytes lie in extents as they are."""
    found = tuple(extent for extent in extents if extent.nbytes)
    tensor = Tensor(name, dtype, shape, lambda: files.pieces(found), found, note)
    if sum(extent.nbytes for extent in found) != tensor.nbytes:
        raise InvalidCheckpoint(
            f"tensor {name!r}",
            expected=f"{tensor.nbytes} bytes for {dtype} {list(shape)}",
            found=sum(extent.nbytes for extent in found),
        )
    return tensor


def blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's row-major bytes, a copy of at most :data:`PIECE` bytes at a time."""
    if tensor.nbytes <= PIECE:
        if tensor.numel():
            yield memory_of(tensor.contiguous())
        return
    rows = PIECE // (tensor.nbytes // tensor.shape[0])
    for part in tensor.split(max(rows, 1)):
        if rows:
            yield memory_of(part.contiguous())
        else:
            yield from blocks(part[0])


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of its width: torch can copy those, whatever the dtype."""
    import torch

    return tensor.view(getattr(torch, INTEGERS[tensor.element_size()]))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's own bytes."""
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # the view keeps the array, and the array its memory
    return memoryview(memory).cast("B")


def _changed(source: Source) -> SourceChanged:
    return SourceChanged(
        source.path,
        expected=f"to stay the {source.size} bytes it was",
        found="another size, time or file",
        do="let what writes it finish, then deploy again",
    )
