"""What a file of ``torch.save`` holds, without its bytes: tensors on "meta", and where they lie.

torch's own restricted unpickler reads the pickle; it runs nothing, and a forbidden global is an
error that names it. Storages are not read: each becomes one on the meta device, whose bytes' place
in the file is kept. Both of torch's formats: the archive, and the older one in which the storages
stand behind the pickle.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmcast.flows.convert.archive import Archive, check_entry, open_archive
from warmcast.flows.convert.memory import import_torch
from warmcast.flows.convert.tensors import Extent, Files
from warmcast.flows.errors import InvalidCheckpoint, UnsafePickle

if TYPE_CHECKING:
    import torch

MOST_NBYTES = 1 << 29
"""The longest pickle that is read, in bytes, tensors apart."""

_ZIP = b"PK\x03\x04"
_MAGIC = 0x1950A86A20F9469CFC6C
_GLOBAL = re.compile(
    r"(?:Unsupported global: GLOBAL|unsupported GLOBAL|Unsupported class) ([\w.]+)"
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the file holds; ``places`` are the extents of its storages by :func:`storage_of`.

    ``archive`` is None for the older format, which has no checksums.
    """

    value: Any
    places: Mapping[int, Extent]
    archive: Archive | None
    keep: tuple[Any, ...]


def storage_of(tensor: torch.Tensor) -> int:
    """What tells two storages apart as long as both live."""
    return int(tensor.untyped_storage()._cdata)


class Inert:
    """Stands in for an object of a class that is not to run: takes what it is given, does nothing.

    Training frameworks save their options beside the weights as objects of their own.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take anything."""

    def __setstate__(self, state: Any) -> None:
        """Take anything."""


def load(files: Files, extent: Extent, path: str, inert: tuple[str, ...] = ()) -> Loaded:
    """What an extent (a whole file, or an item in one) holds; ``path`` names it in errors.

    Globals that begin with one of ``inert`` become :class:`Inert`; of others, forbidden ones are
    errors.

    Raises :class:`UnsafePickle`, :class:`InvalidCheckpoint` and ``MemoryError``.
    """
    import_torch()
    if not is_archive(files, extent):
        return _load_older(files, extent, path)
    archive, data = open_pickle(files, extent, path)
    return load_archive(archive, data, path, inert)


def is_archive(files: Files, extent: Extent) -> bool:
    """Whether it is an archive, and not the older format."""
    head = Extent(extent.file, extent.offset, min(extent.nbytes, len(_ZIP)))
    return files.read(head) == _ZIP


def open_pickle(files: Files, extent: Extent, path: str) -> tuple[Archive, bytes]:
    """An archive, and the pickle in it."""
    archive = open_archive(files, extent, path)
    order = archive.entries.get("byteorder")
    if order is not None and files.read(order) != b"little":
        raise _endian(path)
    if archive.entries["data.pkl"].nbytes > MOST_NBYTES:
        raise InvalidCheckpoint(
            path,
            expected=f"a pickle of {MOST_NBYTES} bytes at most",
            found=archive.entries["data.pkl"].nbytes,
        )
    return archive, check_entry(files, archive, "data.pkl")


def load_archive(archive: Archive, data: bytes, path: str, inert: tuple[str, ...] = ()) -> Loaded:
    """What the pickle ``data`` of an archive holds, as :func:`load` tells it."""
    import_torch()
    storages = _Storages(path)
    with _stand_ins(data, inert):
        value = _unpickle(io.BytesIO(data), storages.persistent, path)
    places = {}
    for key, (storage, nbytes) in storages.by_key.items():
        place = archive.entries.get(f"data/{key}")
        if place is None or place.nbytes != nbytes:
            raise InvalidCheckpoint(
                f"{path}: storage {key!r}",
                expected=f"{nbytes} bytes",
                found="no such entry" if place is None else f"{place.nbytes}",
            )
        places[int(storage._cdata)] = place
    return Loaded(value, places, archive, tuple(s for s, _ in storages.by_key.values()))


def _load_older(files: Files, extent: Extent, path: str) -> Loaded:
    """The format before torch 1.6: five pickles, then each storage behind its length."""
    stream = _Stream(files, extent)
    magic = _unpickle(stream, _no_storage, path)
    if magic != _MAGIC:
        raise _invalid(path, "a pickle that torch.save did not write")
    _unpickle(stream, _no_storage, path)  # the protocol's version
    system = _unpickle(stream, _no_storage, path)
    if not isinstance(system, dict) or not system.get("little_endian", False):
        raise _endian(path)
    storages = _Storages(path)
    value = _unpickle(stream, storages.persistent, path)
    keys = _unpickle(stream, _no_storage, path)
    position = stream.tell()
    if not isinstance(keys, list) or set(map(str, keys)) != set(storages.by_key):
        raise _invalid(path, "storages other than those it names")
    places = {}
    for key in keys:
        storage, nbytes = storages.by_key[str(key)]
        header = Extent(extent.file, extent.offset + position, 8)
        (numel,) = struct.unpack("<q", files.read(header))
        if numel != storages.numel[str(key)] or position + 8 + nbytes > extent.nbytes:
            raise _invalid(path, f"a storage {key!r:.40} that is cut off")
        places[int(storage._cdata)] = Extent(extent.file, header.offset + 8, nbytes)
        position += 8 + nbytes
    return Loaded(value, places, None, tuple(s for s, _ in storages.by_key.values()))


class _Storages:
    """Storages by their keys in the pickle, each on the meta device."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.by_key: dict[str, tuple[Any, int]] = {}
        self.numel: dict[str, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def persistent(self, saved: Any) -> Any:
        """The storage that a persistent id of the pickle means."""
        import torch

        if not isinstance(saved, tuple) or len(saved) not in (5, 6):
            raise pickle.UnpicklingError("a persistent id that is no storage")
        kind, key, numel, views = saved[1], str(saved[2]), saved[4], saved[5:]
        dtype = torch.uint8 if kind is torch.UntypedStorage else getattr(kind, "dtype", None)
        if not isinstance(dtype, torch.dtype) or not isinstance(numel, int) or numel < 0:
            raise pickle.UnpicklingError("a storage without a dtype or a length")
        if views and views[0] is not None:
            raise pickle.UnpicklingError("a view of a storage, as torch 0.1 wrote")
        nbytes = numel * dtype.itemsize
        if key not in self.by_key:
            if nbytes >= 1 << 62:
                raise pickle.UnpicklingError(f"a storage of {nbytes} bytes")
            self.by_key[key] = torch.UntypedStorage(nbytes, device="meta"), nbytes
            self.numel[key] = numel
            self._dtypes[key] = dtype
        storage, known = self.by_key[key]
        if (nbytes, dtype) != (known, self._dtypes[key]):
            raise pickle.UnpicklingError(f"storage {key!r} of two lengths or dtypes")
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _unpickle(stream: Any, persistent: Callable[[Any], Any], path: str) -> Any:
    from torch._weights_only_unpickler import Unpickler

    unpickler = Unpickler(stream, encoding="utf-8")
    unpickler.persistent_load = persistent  # type: ignore[method-assign, unused-ignore]
    try:
        return unpickler.load()
    except MemoryError:
        raise
    except pickle.UnpicklingError as cause:
        if found := _GLOBAL.search(str(cause)):
            raise UnsafePickle(
                path,
                expected="tensors and plain values",
                found=f"the forbidden global {found[1]!r}",
                do="it was not run; ask for safetensors, or for the state dict alone",
            ) from None
        raise _invalid(path, cause) from None
    except Exception as cause:  # noqa: BLE001
        # A hostile or damaged stream makes the unpickler raise anything at all.
        if "memory" in str(cause).lower():
            raise MemoryError from None
        raise _invalid(path, cause) from None


@contextmanager
def _stand_ins(data: bytes, inert: tuple[str, ...]) -> Iterator[None]:
    """Let the unpickler take the globals of a pickle that ``inert`` names, as :class:`Inert`."""
    if not inert:
        yield
        return
    from torch._weights_only_unpickler import get_globals_in_pkl
    from torch.serialization import safe_globals

    try:
        found = get_globals_in_pkl(io.BytesIO(data))
    except Exception:  # noqa: BLE001
        found = set()  # the unpickler will tell what is wrong with it
    names = [name for name in found if name.startswith(inert)]
    with safe_globals([(Inert, name) for name in names]):
        yield


def _no_storage(_: Any) -> Any:
    raise pickle.UnpicklingError("a storage where none can be")


class _Stream:
    """An extent as the unpickler reads it; never more than :data:`MOST_NBYTES` of it."""

    def __init__(self, files: Files, extent: Extent) -> None:
        self._files, self._extent = files, extent
        self._position = 0
        self._buffer, self._begin = b"", 0

    def tell(self) -> int:
        return self._position

    def read(self, count: int) -> bytes:
        end = self._position + count
        if end > min(self._extent.nbytes, MOST_NBYTES):
            raise EOFError("it ends too soon")
        if not self._begin <= self._position <= end <= self._begin + len(self._buffer):
            length = min(max(count, 1 << 16), self._extent.nbytes - self._position)
            where = Extent(self._extent.file, self._extent.offset + self._position, length)
            self._buffer, self._begin = self._files.read(where), self._position
        data = self._buffer[self._position - self._begin : end - self._begin]
        self._position = end
        return data

    def readline(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self.read(1)
        return bytes(line)


def _endian(path: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(
        path, expected="little-endian tensors", found="big-endian ones", do="save it again"
    )


def _invalid(path: str, cause: object) -> InvalidCheckpoint:
    return InvalidCheckpoint(
        path, expected="a whole checkpoint of torch.save", found=cause, do="fetch it again"
    )
