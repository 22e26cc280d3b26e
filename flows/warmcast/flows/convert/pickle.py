"""Torch checkpoints (``.bin``, ``.pt``, ``.pth``): a state dict a file, ties by storages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from warmcast.flows.convert import unpickle
from warmcast.flows.convert.archive import Checksums
from warmcast.flows.convert.memory import import_torch
from warmcast.flows.convert.plain import NotPlain, PlainTensor, load_plain
from warmcast.flows.convert.state_dict import DTYPES, PAIRS, check_name, dense, dtype_of, state_dict
from warmcast.flows.convert.tensors import (
    Checkpoint,
    Extent,
    Files,
    Tensor,
    as_integers,
    blocks,
    in_files,
    memory_of,
)
from warmcast.flows.convert.ties import HIDDEN, Stored, View, resolve_ties, row_major
from warmcast.flows.errors import InvalidCheckpoint
from warmcast.flows.steps.weights import add_names
from warmcast.manifests import dtypes
from warmcast.manifests.manifest import TiedEntry

if TYPE_CHECKING:
    import torch


def open_pickles(files: Files, numbers: Sequence[int], checksums: Checksums) -> Checkpoint:
    """The state dicts of some files; their archives' checksums are given to ``checksums``.

    Raises :class:`UnsafePickle`, :class:`InvalidCheckpoint` and ``MemoryError``.
    """
    tensors: list[Tensor] = []
    tied: list[TiedEntry] = []
    left_out: list[str] = []
    holder: dict[str, str] = {}
    hidden = 0
    for number in numbers:
        source = files.sources[number]
        names, stored, ignored = _open(files, number, hidden, checksums)
        add_names(holder, names, source.path)
        hidden += sum(tensor.name.startswith(HIDDEN) for tensor, _ in stored)
        tensors += [tensor for tensor, _ in stored]
        tied += [tie for _, item in stored for tie in item.tied]
        left_out += ignored
    return Checkpoint(tuple(tensors), tuple(tied), tuple(left_out), holder=holder)


Opened = tuple[list[str], list[tuple[Tensor, Stored]], list[str]]


def _open(files: Files, number: int, hidden: int, checksums: Checksums) -> Opened:
    """One file's names, what is stored of them, and what is left out."""
    source = files.sources[number]
    extent = Extent(number, 0, source.size)
    if not unpickle.is_archive(files, extent):
        return _with_torch(files, unpickle.load(files, extent, source.path), source.path, hidden)
    archive, data = unpickle.open_pickle(files, extent, source.path)
    checksums.add(files, archive)
    try:
        return _plain(files, load_plain(archive, data), source.path, hidden)
    except (NotPlain, InvalidCheckpoint):
        # What it is, or what is wrong with it, is for torch to say.
        loaded = unpickle.load_archive(archive, data, source.path)
        return _with_torch(files, loaded, source.path, hidden)


def _plain(files: Files, value: Any, path: str, hidden: int) -> Opened:
    state, ignored = state_dict(value, path, PlainTensor)
    for name in state:
        check_name(path, name)
    stored = []
    for item in resolve_ties((tensor.view(name) for name, tensor in state.items()), hidden):
        tensor = state[item.view.name]
        begin, end = item.span or (tensor.offset, tensor.offset + item.view.numel)
        place, size = tensor.storage.place, dtypes.BITS[item.view.dtype] // 8
        extent = Extent(place.file, place.offset + begin * size, (end - begin) * size)
        stored.append((in_files(files, item.name, item.view.dtype, item.shape, (extent,)), item))
    return list(state), stored, ignored


def _with_torch(files: Files, loaded: unpickle.Loaded, path: str, hidden: int) -> Opened:
    import torch

    state, ignored = state_dict(loaded.value, path, torch.Tensor)
    return list(state), stored_tensors(files, path, state, loaded.places, hidden), ignored


def stored_tensors(
    files: Files,
    path: str,
    state: Mapping[str, torch.Tensor],
    places: Mapping[int, Extent],
    first_hidden: int = 0,
) -> list[tuple[Tensor, Stored]]:
    """What is to be stored of a state dict on meta, and what is tied to it."""
    plain = {name: dense(path, name, tensor) for name, tensor in state.items()}
    views = {name: _view(path, name, tensor, places) for name, tensor in plain.items()}
    stored = resolve_ties(views.values(), first_hidden)
    return [(_tensor(files, plain[item.view.name], item, places), item) for item in stored]


def _view(path: str, name: str, tensor: torch.Tensor, places: Mapping[int, Extent]) -> View:
    """The tensor as elements of its storage; :class:`InvalidCheckpoint` if it leaves that."""
    storage = unpickle.storage_of(tensor)
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    view = View(name, storage, "", shape, stride, int(tensor.storage_offset()))
    place = places.get(storage)
    if place is None:
        raise InvalidCheckpoint(
            f"{path}: tensor {name!r}",
            expected="one whose bytes are in the file",
            found="one without",
            do="save it from the CPU",
        )
    if view.numel and view.end * tensor.element_size() > place.nbytes:
        raise InvalidCheckpoint(
            f"{path}: tensor {name!r}",
            expected=f"to lie in its storage's {place.nbytes} bytes",
            found=f"an end at {view.end * tensor.element_size()}",
        )
    dtype, offset = dtype_of(tensor), view.offset
    if dtype == PAIRS:
        # Strides over pairs cannot be told in single elements: such a tensor is tied to none.
        storage = storage if view.is_row_major else -id(tensor)
        shape = (*shape[:-1], 2 * shape[-1])
        stride, offset = row_major(shape), 2 * offset
    elif tensor.is_conj() or tensor.is_neg():
        storage, stride, offset = -id(tensor), row_major(shape), 0
    return View(name, storage, DTYPES[dtype], shape, stride, offset)


def _tensor(
    files: Files, tensor: torch.Tensor, item: Stored, places: Mapping[int, Extent]
) -> Tensor:
    place = places[unpickle.storage_of(tensor)]
    dtype, shape, size = item.view.dtype, item.shape, tensor.element_size()
    if item.span is not None:
        begin, end = item.span
    elif tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        begin = int(tensor.storage_offset())
        end = begin + tensor.numel()
    else:
        return Tensor(item.name, dtype, shape, lambda: _strided(files, tensor, place))
    if dtype == "F4" and item.span is not None:
        begin, end = begin // 2, end // 2
    extent = Extent(place.file, place.offset + begin * size, (end - begin) * size)
    return in_files(files, item.name, dtype, shape, (extent,))


def _strided(files: Files, tensor: torch.Tensor, place: Extent) -> Iterator[memoryview]:
    """The bytes of a tensor that is not row-major, or is conjugate or negative, row-major."""
    import_torch()
    import torch

    if not tensor.numel():
        return
    data = files.mapped(place)
    if data.data_ptr() % tensor.element_size():
        data = data.clone()
    usable = data.numel() - data.numel() % tensor.element_size()
    values = torch.as_strided(
        as_integers(data[:usable].view(tensor.dtype)),
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
    )
    for block in blocks(values):
        if tensor.is_conj() or tensor.is_neg():
            flat = torch.frombuffer(block, dtype=tensor.dtype)
            flat = flat.conj() if tensor.is_conj() else flat
            flat = -flat if tensor.is_neg() else flat
            yield memory_of(flat.resolve_conj().resolve_neg().contiguous())
        else:
            yield block
