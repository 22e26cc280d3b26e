"""``.metadata`` of a torch distributed checkpoint: a pickle, of which nothing runs.

The unpickler resolves exactly the names that such metadata hold, each to a stand-in of this module
that keeps what it is given; torch's own classes are never built. Any other global is an error.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from warmcast.flows.convert.state_dict import DTYPES
from warmcast.flows.errors import InvalidCheckpoint, UnsafePickle
from warmcast.manifests import dtypes

MOST_NBYTES = 1 << 28
"""The longest ``.metadata`` that is read, in bytes."""


@dataclass(frozen=True, slots=True)
class Item:
    """Where a saved item stands: a file beside ``.metadata``, and bytes of it."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: where it begins, its lengths, and where it is saved."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    item: Item


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor: its safetensors dtype, its shape, and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """Tensors by their flat names, names of items that are none, and names' paths in the dict."""

    tensors: Mapping[str, Saved]
    others: tuple[str, ...]
    paths: Mapping[str, tuple[str, ...]]


def parse_metadata(data: bytes, path: str) -> Metadata:
    """Parse ``.metadata``; raises :class:`UnsafePickle` and :class:`InvalidCheckpoint`."""
    try:
        root = _Unpickler(data, path).load()
    except (UnsafePickle, MemoryError):
        raise
    except Exception as cause:  # noqa: BLE001
        # A hostile or damaged stream makes the unpickler raise anything at all.
        raise _invalid(path, "a whole pickle", f"{type(cause).__name__} {cause}") from None
    entries = root.get("state_dict_metadata") if isinstance(root, _Record) else None
    storage = root.get("storage_data") if isinstance(root, _Record) else None
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise _invalid(path, "state_dict_metadata and storage_data", type(root).__name__)
    items = _items(storage, path)
    tensors, others = {}, []
    for name, entry in entries.items():
        if not isinstance(name, str) or not name:
            raise _invalid(path, "names of tensors", repr(name)[:80])
        if isinstance(entry, _BytesEntry):
            others.append(name)
        elif isinstance(entry, _TensorEntry):
            tensors[name] = _saved(name, entry, items, f"{path}: tensor {name!r}")
        else:
            raise _invalid(f"{path}: {name!r}", "a tensor or bytes", type(entry).__name__)
    return Metadata(tensors, tuple(others), _paths(root.get("planner_data")))


class _Record:
    """Stands in for a class of torch: keeps the state it is built from."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        state = getattr(self, "state", None)
        return state.get(field) if isinstance(state, dict) else None


class _TensorEntry(_Record):
    pass


class _BytesEntry(_Record):
    pass


class _Index(_Record):
    pass


class _Info(_Record):
    pass


class _Dtype(str):
    __slots__ = ()


def _size(*given: Any) -> Any:
    return given[0] if len(given) == 1 else ()


def _nothing(*_: Any) -> None:
    return None


_METADATA = "torch.distributed.checkpoint.metadata"
_GLOBALS: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Record,
    (_METADATA, "TensorStorageMetadata"): _TensorEntry,
    (_METADATA, "BytesStorageMetadata"): _BytesEntry,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _nothing,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
    ("torch", "Size"): _size,
    ("torch", "device"): _nothing,
    ("torch.serialization", "_get_layout"): _nothing,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "Path"): _nothing,
    ("pathlib", "PosixPath"): _nothing,
    ("pathlib._local", "Path"): _nothing,
    ("pathlib._local", "PosixPath"): _nothing,
}


class _Unpickler(pickle.Unpickler):
    """Python's own, for the names of :data:`_GLOBALS` and torch's dtypes."""

    def __init__(self, data: bytes, path: str) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _GLOBALS:
            return _GLOBALS[module, name]
        if module == "torch" and name in DTYPES:
            return _Dtype(name)
        raise UnsafePickle(
            self._path,
            expected="the metadata of a distributed checkpoint",
            found=f"the forbidden global {f'{module}.{name}'!r}",
            do="it was not run; do not trust this checkpoint",
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a persistent id")


def _items(storage: Mapping[Any, Any], path: str) -> dict[tuple[str, tuple[int, ...]], Item]:
    """Where each chunk is saved, by its tensor's name and where it begins."""
    items: dict[tuple[str, tuple[int, ...]], Item] = {}
    for index, info in storage.items():
        if not isinstance(index, _Index) or not isinstance(info, _Info):
            raise _invalid(f"{path}: storage_data", "items by their index", type(index).__name__)
        name, begin = index.get("fqn"), index.get("offset")
        where = f"{path}: item {name!r:.80}"
        file, offset, nbytes = (info.get(f) for f in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or not isinstance(file, str):
            raise _invalid(where, "a name and a file", f"{name!r:.40}, {file!r:.40}")
        if not _lengths((offset, nbytes)):
            raise _invalid(where, "an offset and a length", f"{offset!r:.40}, {nbytes!r:.40}")
        if info.get("transform_descriptors"):
            raise _invalid(where, "an item as it is", "one that was transformed")
        begin = () if begin is None else begin
        if not _lengths(begin):
            raise _invalid(where, "where its chunk begins", f"{begin!r:.40}")
        key = (name, tuple(begin))
        if key in items:
            raise _invalid(where, "each chunk once", "one twice")
        items[key] = Item(file, offset, nbytes)
    return items


def _saved(
    name: str, entry: _TensorEntry, items: Mapping[tuple[str, tuple[int, ...]], Item], where: str
) -> Saved:
    properties, shape, chunks = (entry.get(f) for f in ("properties", "size", "chunks"))
    state = getattr(properties, "state", None)
    dtype = state[0] if isinstance(state, tuple) and state else None
    if isinstance(state, dict):
        dtype = state.get("dtype")
    if not isinstance(dtype, _Dtype) or not _lengths(shape) or not isinstance(chunks, list):
        raise _invalid(where, "a dtype, a size and chunks", f"{dtype!r:.40}, {shape!r:.60}")
    if dtypes.numel(shape) is None:
        raise _invalid(where, "a shape that fits memory", f"{shape!r:.60}")
    found = []
    for chunk in chunks:
        begin = chunk.get("offsets") if isinstance(chunk, _Record) else None
        sizes = chunk.get("sizes") if isinstance(chunk, _Record) else None
        if (
            not _lengths(begin)
            or not _lengths(sizes)
            or not len(begin) == len(sizes) == len(shape)
            or any(b + n > whole for b, n, whole in zip(begin, sizes, shape, strict=True))
        ):
            raise _invalid(where, f"chunks inside {list(shape)}", f"{sizes!r:.60} at {begin!r:.60}")
        item = items.get((name, tuple(begin))) or items.get((name, ()))
        if item is None:
            raise _invalid(where, f"the chunk at {list(begin)} in storage_data", "none")
        found.append(Chunk(tuple(begin), tuple(sizes), item))
    return Saved(DTYPES[dtype], tuple(shape), tuple(found))


def _paths(planner_data: Any) -> dict[str, tuple[str, ...]]:
    """Each flat name's path in the state dict, where the planner kept it."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: tuple(map(str, path))
        for name, path in planner_data.items()
        if isinstance(name, str) and isinstance(path, tuple) and path
    }


def _lengths(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= dtypes.MAX_NUMEL for n in value
    )


def _invalid(where: str, expected: str, found: object) -> InvalidCheckpoint:
    return InvalidCheckpoint(
        where, expected=expected, found=found, do="the checkpoint is damaged; save it again"
    )
