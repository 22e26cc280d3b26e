"""Plain state dicts, read without torch: what nearly every pickle of weights is.

The unpickler here knows the few names that ``torch.save`` writes for row-major tensors and dicts of
them, each as a stand-in that keeps what it is given. It decides nothing: whatever it does not know
is :class:`NotPlain`, and torch's own restricted unpickler reads the file again (:mod:`unpickle`).
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from warmcast.flows.convert.archive import Archive
from warmcast.flows.convert.state_dict import DTYPES, PAIRS
from warmcast.flows.convert.tensors import Extent
from warmcast.flows.convert.ties import View, row_major
from warmcast.manifests import dtypes

_STORAGES = {
    "BFloat16Storage": "bfloat16", "BoolStorage": "bool", "ByteStorage": "uint8",
    "CharStorage": "int8", "DoubleStorage": "float64", "FloatStorage": "float32",
    "HalfStorage": "float16", "IntStorage": "int32", "LongStorage": "int64",
    "ShortStorage": "int16",
}  # fmt: skip
_UNTYPED = "uint8"


class NotPlain(Exception):
    """What this module does not read."""


@dataclass(frozen=True, slots=True)
class PlainStorage:
    """A storage: its number among the file's, its elements' dtype, and where it lies."""

    number: int
    dtype: str
    place: Extent


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A row-major tensor: its storage, torch's name of its dtype, shape, offset in elements."""

    storage: PlainStorage
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def view(self, name: str) -> View:
        """The tensor as ties see it."""
        number, dtype = self.storage.number, DTYPES[self.dtype]
        return View(name, number, dtype, self.shape, row_major(self.shape), self.offset)


def load_plain(archive: Archive, data: bytes) -> Any:
    """What ``data``, the pickle of an archive, holds; :class:`NotPlain`, ``MemoryError``."""
    try:
        return _Unpickler(archive.entries, data).load()
    except (NotPlain, MemoryError):
        raise
    except Exception as cause:
        # A hostile or damaged stream makes the unpickler raise anything at all.
        raise NotPlain from cause


class _Unpickler(pickle.Unpickler):
    def __init__(self, entries: Mapping[str, Extent], data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._entries = entries
        self._storages: dict[str, PlainStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = _GLOBALS.get((module, name))
        if found is None and module == "torch":
            found = _Storage(_STORAGES[name]) if name in _STORAGES else None
            found = _Dtype(name) if name in DTYPES else found
        if found is None:
            raise NotPlain
        return found

    def persistent_load(self, pid: Any) -> PlainStorage:
        kind, key, numel = pid[1], str(pid[2]), pid[4]
        place = self._entries[f"data/{key}"]
        dtype = _UNTYPED if kind is _GLOBALS["torch.storage", "UntypedStorage"] else kind.dtype
        if pid[0] != "storage" or place.nbytes != numel * _width(dtype):
            raise NotPlain
        fresh = PlainStorage(len(self._storages), dtype, place)
        storage = self._storages.setdefault(key, fresh)
        if storage.dtype != dtype:
            raise NotPlain
        return storage


class _Dtype(str):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str


def _tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _grad: Any = None,
    _hooks: Any = None,
    *more: Any,
) -> PlainTensor:
    """``_rebuild_tensor_v2``, and v3, which gives the dtype by itself."""
    dtype = storage.dtype
    if more and isinstance(more[0], _Dtype):
        dtype, more = str(more[0]), more[1:]
    shape, numel = tuple(size), dtypes.numel(size)
    counts = (offset, *size, *stride)
    if (
        any(more)  # conjugate or negative
        or not isinstance(storage, PlainStorage)
        or dtype == PAIRS
        or numel is None
        or any(type(n) is not int or n < 0 for n in counts)
        or len(shape) != len(stride)
        or not View("", 0, "", shape, tuple(stride), offset).is_row_major
        or (numel and (offset + numel) * _width(dtype) > storage.place.nbytes)
    ):
        raise NotPlain
    return PlainTensor(storage, dtype, shape, offset)


def _parameter(data: Any, _grad: Any, _hooks: Any) -> Any:
    return data


def _width(dtype: str) -> int:
    return dtypes.BITS[DTYPES[dtype]] // 8


_GLOBALS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.storage", "UntypedStorage"): object(),
}
