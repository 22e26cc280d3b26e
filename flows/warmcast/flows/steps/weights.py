"""What safetensors files say of themselves: tensors, ties, and whether an index fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from warmcast.flows.convert.ties import HIDDEN, METADATA, row_major
from warmcast.flows.errors import InvalidIndex, NoWeights
from warmcast.flows.local import LocalFile
from warmcast.flows.upstreams import Upstream, UpstreamFile
from warmcast.manifests.canonical import parse_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidManifest
from warmcast.manifests.header import Header, header_nbytes, parse_header, read_header
from warmcast.manifests.manifest import TiedEntry, parse_record

_HEADER = 1 << 17
"""Bytes that are read of a file elsewhere for its header, at first."""


def read_headers(files: Sequence[LocalFile]) -> dict[str, Header]:
    """The header of each file by its path; raises :class:`InvalidHeader`, and as its check."""
    headers = {file.path: local_header(file) for file in files}
    check_headers(headers)
    return headers


def local_header(file: LocalFile) -> Header:
    """The header of one file; raises :class:`InvalidHeader`."""
    with file.opened():
        return read_header(file.location)


def fetch_header(upstream: Upstream, file: UpstreamFile, deadline: Deadline) -> Header:
    """The header of a file that lies elsewhere; raises :class:`InvalidHeader`."""
    reader = upstream.reader(file, deadline)
    try:
        # Most headers are shorter, and a question costs more than some bytes.
        raw = bytearray(min(_HEADER, file.size))
        reader.read_into(0, memoryview(raw), deadline)
        end = 8 + header_nbytes(bytes(raw[:8]), file.size, file.path)
        if end > len(raw):
            rest = bytearray(end - len(raw))
            reader.read_into(len(raw), memoryview(rest), deadline)
            raw += rest
        return parse_header(bytes(raw[:end]), file.size, file.path)
    finally:
        reader.close()


def check_headers(headers: Mapping[str, Header]) -> None:
    """Raise :class:`InvalidIndex` for a name in two files, :class:`NoWeights` for none in any."""
    holder: dict[str, str] = {}
    for path, header in headers.items():
        add_names(holder, (t.name for t in header.tensors), path)
    if not holder:
        raise NoWeights(
            ", ".join(headers), expected="tensors", found="none", do="the checkpoint is empty"
        )


def metadata_ties(headers: Mapping[str, Header]) -> tuple[TiedEntry, ...]:
    """The ties that headers tell of: those of ``save_model``, and those of our own conversion.

    ``safetensors.torch.save_model`` writes ``{removed name: kept name}``. Metadata hold other
    things too: a pair is a tie only if the one name is stored, and the other is not. Views stand
    under :data:`METADATA`. Raises :class:`InvalidManifest` if these are none.
    """
    stored = {tensor.name: tensor for header in headers.values() for tensor in header.tensors}
    ties: dict[str, TiedEntry] = {}
    for path, header in headers.items():
        for tie in _views(header.metadata.get(METADATA, "[]"), f"{path}: {METADATA}"):
            ties[tie.name] = tie
        for removed, kept in header.metadata.items():
            base = stored.get(kept)
            if base is not None and removed and removed not in stored:
                ties[removed] = TiedEntry(
                    name=removed,
                    of=kept,
                    shape=base.shape,
                    stride=row_major(base.shape),
                    offset=0,
                )
    return tuple(ties[name] for name in sorted(ties))


def _views(text: str, where: str) -> list[TiedEntry]:
    value = parse_json(text.encode(), where, InvalidManifest)
    if not isinstance(value, list):
        raise InvalidManifest(where, expected="a list of views", found=type(value).__name__)
    return [parse_record(TiedEntry, item, where) for item in value]


def check_index(index: tuple[str, Mapping[str, str]], holder: Mapping[str, str]) -> list[str]:
    """Hold an index to the shard that each tensor is really in; notes on what it does not name.

    Raises :class:`InvalidIndex` for a tensor that is not where the index says.
    """
    path, shards = index
    for name, shard in shards.items():
        if holder.get(name) != shard:
            raise InvalidIndex(
                f"{path}: tensor {name!r}",
                expected=f"to be in {shard!r}",
                found=f"it in {holder[name]!r}" if name in holder else "it in no shard",
                do="the shards are not those of this index; fetch them again",
            )
    extra = [name for name in holder if name not in shards and not name.startswith(HIDDEN)]
    if not extra:
        return []
    names = ", ".join(extra[:3]) + (", …" if len(extra) > 3 else "")
    return [f"{path}: does not name {len(extra)} tensors of the shards, deployed too: {names}"]


def add_names(holder: dict[str, str], names: Iterable[str], path: str) -> None:
    """Note which file holds each name; :class:`InvalidIndex` if another holds it already."""
    for name in names:
        if name in holder:
            raise InvalidIndex(
                f"{path}: tensor {name!r}",
                expected="each tensor in one shard",
                found=f"it in {holder[name]!r} too",
            )
        holder[name] = path
