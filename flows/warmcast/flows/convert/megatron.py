"""Tensor-parallel shards, as Megatron and its kin save them, merged by declared rules.

A file for each rank, each with the same names. What becomes of a name is for the rules to say (see
``merge_rules``): the ranks' tensors are joined along a dimension, or are the same on all, which is
checked. Nothing is guessed: a name that no rule covers is an error, and so is a rule that covers
none. Pipeline stages are merged alike, each with its layers' numbers moved by its offset.

The weights are what stands under "model" (or the other names for it), however deep; names are the
path, joined by dots. Frameworks' own objects beside them (``args``) are not run: they are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from warmcast.flows.convert import unpickle
from warmcast.flows.convert.archive import Checksums
from warmcast.flows.convert.embeddings import same_bytes
from warmcast.flows.convert.memory import import_torch
from warmcast.flows.convert.options import MergeRule, MergeRules
from warmcast.flows.convert.pickle import stored_tensors
from warmcast.flows.convert.state_dict import WRAPPERS
from warmcast.flows.convert.tensors import (
    PIECE,
    Checkpoint,
    Extent,
    Files,
    Tensor,
    in_files,
    memory_of,
)
from warmcast.flows.convert.ties import row_major
from warmcast.flows.errors import InvalidCheckpoint
from warmcast.manifests import dtypes
from warmcast.manifests.errors import UsageError
from warmcast.manifests.manifest import TiedEntry

if TYPE_CHECKING:
    import torch

_INERT = ("argparse.Namespace", "megatron.", "numpy.", "_codecs.encode", "signal.Signals")
_EXTRA = "_extra_state"
_MOST_DEPTH = 16


@dataclass(frozen=True, slots=True)
class _Rank:
    """A file's tensors by name, and of each the first that is the same one in memory."""

    path: str
    tensors: Mapping[str, Tensor]
    first: Mapping[str, str]


def open_megatron(
    files: Files, numbers: Sequence[int], rules: MergeRules | None, checksums: Checksums
) -> Checkpoint:
    """The merged state dict of the files, which are in order of the rules' stages and ranks.

    Raises :class:`UsageError` for rules that do not fit, and :class:`InvalidCheckpoint`.
    """
    import_torch()
    if rules is None:
        raise UsageError("merge", expected="rules for tensor-parallel shards", found="none")
    merged: dict[str, Tensor] = {}
    tied: list[TiedEntry] = []
    left_out: list[str] = []
    rule_of: dict[str, MergeRule] = {}
    rest = list(numbers)
    for stage in rules.stages:
        ranks = []
        for _ in stage.shards:
            rank, notes = _open_rank(files, rest.pop(0), checksums)
            ranks.append(rank)
            left_out += notes
        for name in ranks[0].tensors:
            rule = _rule_for(name, rules, ranks[0].path)
            target = _renumbered(name, rules.layers, stage.layer_offset)
            base = _renumbered(_shared(name, ranks), rules.layers, stage.layer_offset)
            if target in merged or any(tie.name == target for tie in tied):
                raise InvalidCheckpoint(
                    f"{ranks[0].path}: tensor {target!r}",
                    expected="each name in one stage",
                    found="it in two",
                    do="give the stages their layer_offset, and the layers their prefix",
                )
            tensor = _merge(files, name, target, rule, ranks)
            rule_of[target] = rule
            if base in merged and _alike(rule_of[base], rule):
                stride = row_major(tensor.shape)
                tied.append(
                    TiedEntry(name=target, of=base, shape=tensor.shape, stride=stride, offset=0)
                )
            else:
                merged[target] = tensor
        _check_names(ranks)
    unused = [rule.pattern for rule in rules.rules if rule not in rule_of.values()]
    if unused:
        raise UsageError(
            f"merge rule {unused[0]!r}", expected="a pattern of tensors' names", found="no match"
        )
    return Checkpoint(tuple(merged.values()), tuple(tied), tuple(left_out))


def _open_rank(files: Files, number: int, checksums: Checksums) -> tuple[_Rank, list[str]]:
    source = files.sources[number]
    loaded = unpickle.load(files, Extent(number, 0, source.size), source.path, _INERT)
    if loaded.archive is not None:
        checksums.add(files, loaded.archive)
    if not isinstance(loaded.value, Mapping):
        raise InvalidCheckpoint(
            source.path, expected="a dict of tensors", found=type(loaded.value).__name__
        )
    value = loaded.value
    wrapper = next((w for w in WRAPPERS if isinstance(value.get(w), Mapping)), None)
    notes = []
    if wrapper is not None:
        notes = [f"{source.path}: {key!r:.80}" for key in value if key != wrapper]
        value = value[wrapper]
    state: dict[str, torch.Tensor] = {}
    _flatten(value, "", state, notes, source.path, _MOST_DEPTH)
    if not state:
        raise InvalidCheckpoint(source.path, expected="tensors", found="none")
    tensors: dict[str, Tensor] = {}
    first: dict[str, str] = {}
    places: dict[object, str] = {}
    for name, tensor in state.items():
        ((tensors[name], item),) = stored_tensors(files, source.path, {name: tensor}, loaded.places)
        if item.tied:
            raise InvalidCheckpoint(
                f"{source.path}: tensor {name!r}",
                expected="elements that are each its own",
                found="a tensor that overlaps itself",
                do="save it contiguous",
            )
        place = (
            unpickle.storage_of(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(),
            tensor.storage_offset(),
        )  # fmt: skip
        first[name] = places.setdefault(place, name)
    return _Rank(source.path, tensors, first), notes


def _flatten(
    value: Mapping[Any, Any],
    prefix: str,
    state: dict[str, torch.Tensor],
    notes: list[str],
    path: str,
    depth: int,
) -> None:
    """Collect nested tensors under their paths, joined by dots."""
    import torch

    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, torch.Tensor) and not name.endswith(_EXTRA):
            if name in state:
                raise InvalidCheckpoint(
                    f"{path}: tensor {name!r}", expected="each name once", found="it twice"
                )
            state[name] = item
        elif isinstance(item, Mapping):
            if not depth:
                raise InvalidCheckpoint(path, expected=f"{_MOST_DEPTH} levels", found="more")
            _flatten(item, f"{name}.", state, notes, path, depth - 1)
        elif item is not None:
            notes.append(f"{path}: {name!r:.80} ({type(item).__name__})")


def _rule_for(name: str, rules: MergeRules, path: str) -> MergeRule:
    for rule in rules.rules:
        if fnmatchcase(name, rule.pattern):
            return rule
    raise UsageError(f"{path}: tensor {name!r}", expected="a merge rule for it", found="none")


def _alike(a: MergeRule, b: MergeRule) -> bool:
    return (a.concat, a.parts) == (b.concat, b.parts)


def _renumbered(name: str, layers: Sequence[str], offset: int) -> str:
    for prefix in layers:
        number, dot, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number.isdecimal():
            return f"{prefix}{int(number) + offset}{dot}{rest}"
    return name


def _shared(name: str, ranks: Sequence[_Rank]) -> str:
    """The first name of the same tensor, where it is the same on all ranks."""
    first = {rank.first.get(name) for rank in ranks}
    return first.pop() or name if len(first) == 1 else name


def _check_names(ranks: Sequence[_Rank]) -> None:
    for rank in ranks[1:]:
        for name in rank.tensors:
            if name not in ranks[0].tensors:
                raise _missing(name, rank.path, ranks[0].path)


def _missing(name: str, there: str, here: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(
        f"{here}: tensor {name!r}",
        expected=f"what {there} has too",
        found="no such tensor",
        do="name the ranks of one stage, in their order",
    )


def _merge(files: Files, name: str, target: str, rule: MergeRule, ranks: Sequence[_Rank]) -> Tensor:
    """One tensor of the ranks' tensors of a name."""
    shards = []
    for rank in ranks:
        if name not in rank.tensors:
            raise _missing(name, ranks[0].path, rank.path)
        shards.append(rank.tensors[name])
    first, dim = shards[0], rule.concat
    if dim is None:
        for rank, shard in zip(ranks, shards, strict=True):
            same = (shard.dtype, shard.shape) == (first.dtype, first.shape)
            if not same or not same_bytes(first.pieces(), shard.pieces()):
                raise InvalidCheckpoint(
                    f"{rank.path}: tensor {name!r}",
                    expected=f"the same as in {ranks[0].path}, as the rule {rule.pattern!r} says",
                    found="another",
                )
        return Tensor(target, first.dtype, first.shape, first.pieces, first.extents)
    for rank, shard in zip(ranks, shards, strict=True):
        if (
            dim >= len(shard.shape)
            or shard.dtype != first.dtype
            or shard.shape != first.shape
            or shard.shape[dim] % rule.parts
            or dtypes.BITS[shard.dtype] % 8
        ):
            raise InvalidCheckpoint(
                f"{rank.path}: tensor {name!r}",
                expected=f"{first.dtype} {list(first.shape)} in {rule.parts} parts along {dim}",
                found=f"{shard.dtype} {list(shard.shape)}",
            )
    return _joined(files, target, shards, dim, rule.parts)


def _joined(files: Files, name: str, shards: Sequence[Tensor], dim: int, parts: int) -> Tensor:
    """Shards joined along a dimension, part by part."""
    first = shards[0]
    shape = (*first.shape[:dim], first.shape[dim] * len(shards), *first.shape[dim + 1 :])
    outer = math.prod(first.shape[:dim])
    extents = [extent for shard in shards for extent in shard.extents or ()]
    if outer == 1 and len(extents) == len(shards):
        length = first.nbytes // parts
        whole = [
            Extent(extent.file, extent.offset + part * length, length)
            for part in range(parts)
            for extent in extents
        ]
        return in_files(files, name, first.dtype, shape, whole)

    def pieces() -> Iterator[memoryview]:
        import torch

        row = first.nbytes // outer if outer else 0
        if not row:
            return
        memory = [None if shard.extents else b"".join(shard.pieces()) for shard in shards]
        rows = max(1, PIECE // (row * len(shards)))
        for begin in range(0, outer, rows):
            count = min(rows, outer - begin)
            block = torch.empty(count, parts, len(shards), row // parts, dtype=torch.uint8)
            for rank, shard in enumerate(shards):
                held = memory[rank]
                if held is not None:
                    data = held[begin * row : (begin + count) * row]
                else:
                    (extent,) = shard.extents or ()
                    where = Extent(extent.file, extent.offset + begin * row, count * row)
                    data = files.read(where)
                source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                block[:, :, rank] = source.view(count, parts, row // parts)
            yield memory_of(block)

    return Tensor(name, first.dtype, shape, pieces)
