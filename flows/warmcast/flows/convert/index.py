"""The index of a sharded checkpoint: ``{"metadata": {...}, "weight_map": {tensor: shard}}``.

An index comes from outside: its paths are checked before any is opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from warmcast.flows.errors import InvalidIndex
from warmcast.manifests.canonical import parse_json
from warmcast.manifests.errors import InvalidData
from warmcast.manifests.rules import unsafe_path

MOST_NBYTES = 1 << 28
"""No index is longer."""


def read_index(path: str, data: bytes) -> dict[str, str]:
    """The shard (its path in the repository) of each tensor.

    Raises :class:`InvalidIndex` for anything but names and safe paths below the index's folder.
    """
    try:
        record = parse_json(data, path)
    except InvalidData as cause:
        raise InvalidIndex(str(cause)) from None
    shards = record.get("weight_map") if isinstance(record, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise InvalidIndex(path, expected="a weight_map of tensors", found=_brief(record))
    folder = PurePosixPath(path).parent
    result = {}
    for tensor, shard in shards.items():
        where = f"{path}: weight_map: {tensor!r}"
        if not isinstance(shard, str):
            raise InvalidIndex(where, expected="a file's name", found=_brief(shard))
        if problem := unsafe_path(shard):
            raise InvalidIndex(
                where,
                expected="a file beside the index",
                found=f"{problem} in {shard!r}",
                do="do not trust this repository",
            )
        result[tensor] = str(folder / shard)
    return result


def write_index(location: Path, weight_map: Mapping[str, str], total_nbytes: int) -> None:
    """Write an index, the same bytes for the same content."""
    record = {"metadata": {"total_size": total_nbytes}, "weight_map": dict(weight_map)}
    location.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _brief(value: object) -> str:
    return f"{value!r:.80}"
