"""Resolve: which files of a repository are the weights, which are mirrored, which are left out.

Only the top folder holds the weights; a file in a folder below is mirrored as it is. Safetensors
win over distributed checkpoints, these over pickles, and these over GGUF. In order: an index;
``model.safetensors`` (``pytorch_model.bin``); numbered shards, if all are there; a single file.
Anything else is ambiguous, and an error. A distributed checkpoint is ``.metadata`` with its
``*.distcp`` beside it; it may be in the one folder below that has such (but ``optimizer*``).

Tensor-parallel shards are those that the rules to merge them name, wherever they are. With a base,
the weights are the base's, and the adapter's are ``adapter_model.*`` in the top folder.

Left out, and said so: pickles that are not the weights (they would carry code), weights of other
frameworks, and the weights' second copy in Mistral's layout (``consolidated*``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from warmcast.flows.convert.child import Format
from warmcast.flows.convert.index import MOST_NBYTES, read_index
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.errors import AmbiguousWeights, MissingShard, NoWeights
from warmcast.flows.upstreams import Upstream, UpstreamFile, read_small
from warmcast.flows.upstreams.patterns import select
from warmcast.manifests.canonical import parse_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidData, InvalidManifest
from warmcast.manifests.rules import unsafe_path

_SUFFIXES: Mapping[Format, tuple[str, ...]] = {
    "safetensors": (".safetensors",),
    "dcp": (".distcp",),
    "pickle": (".bin", ".pt", ".pth"),
    "gguf": (".gguf",),
}
_WHOLE: Mapping[Format, tuple[str, ...]] = {
    "safetensors": ("model.safetensors",),
    "pickle": ("pytorch_model.bin", "model.pt", "model.pth"),
    "gguf": (),
}
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")

_NO_WEIGHTS = ("training_args.bin", "optimizer*", "scheduler*", "rng_state*", "scaler.pt")
"""Pickles that trainers leave beside the weights."""

_OTHERS = (
    "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite", "*.gguf", "*.ckpt",
    "*.pkl", "*.pickle", "*.mlmodel", "*.mlpackage", "*.pdparams", "*.ckpt.index", "*.ckpt.data*",
    "openvino_*.bin", "openvino_*.xml", "*.distcp",
)  # fmt: skip
_SECOND = "consolidated*"
_METADATA = ".metadata"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
_ADAPTER_CONFIG_NBYTES = 1 << 24
_AS_IT_IS = ConvertOptions()


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """An adapter to merge: its weights, their format, and its parsed ``adapter_config.json``."""

    format: Format
    files: tuple[UpstreamFile, ...]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a deploy does with each file.

    ``index`` is the index's path and the shard of each tensor, where there is one; ``adapter`` what
    is merged into the weights.
    """

    format: Format
    weights: tuple[UpstreamFile, ...]
    index: tuple[str, Mapping[str, str]] | None
    others: tuple[UpstreamFile, ...]
    left_out: tuple[str, ...]
    adapter: AdapterPlan | None = None


def resolve(
    upstream: Upstream,
    deadline: Deadline,
    *,
    allow: Sequence[str] = (),
    ignore: Sequence[str] = (),
    convert: ConvertOptions = _AS_IT_IS,
) -> Plan:
    """Decide what is deployed of the files that ``allow`` and ``ignore`` take (see ``patterns``).

    Raises :class:`SourceError` and its kinds, and :class:`UsageError` for what is no pattern.
    """
    listed = upstream.files(deadline)
    taken, notes = select(listed, allow, ignore)
    try:
        plan = _plan(upstream, taken, convert, deadline)
    except (NoWeights, MissingShard) as cause:
        if len(taken) == len(listed):
            raise
        options = (("allow", allow), ("ignore", ignore))
        given = ", ".join(f"{option} {p!r}" for option, patterns in options for p in patterns)
        left = f"{given} leaves {len(taken)} of {len(listed)} files"
        raise type(cause)(f"{left}: {cause}") from cause
    return replace(plan, left_out=(*plan.left_out, *notes))


def _plan(
    upstream: Upstream, listed: Sequence[UpstreamFile], convert: ConvertOptions, deadline: Deadline
) -> Plan:
    files = {file.path: file for file in listed}
    for path in files:
        if problem := unsafe_path(path):
            raise InvalidManifest(
                f"{upstream.name}: {path!r}", expected="a plain path", found=problem
            )
    adapter = None
    if convert.base is not None:
        adapter = _adapter(upstream, files, deadline)
        files = {path: f for path, f in files.items() if path not in (*_ADAPTER, _ADAPTER_CONFIG)}
    format_, names, index = _weights(upstream, files, convert, deadline)
    others, left_out = _rest(files, format_, names, index, rewrite=convert.rewrite)
    return Plan(format_, tuple(files[n] for n in names), index, others, left_out, adapter)


def _weights(
    upstream: Upstream,
    files: Mapping[str, UpstreamFile],
    convert: ConvertOptions,
    deadline: Deadline,
) -> tuple[Format, list[str], Index | None]:
    """The format, the weights' paths in order, and their index."""
    if convert.merge is not None:
        shards = [shard for stage in convert.merge.stages for shard in stage.shards]
        missing = [shard for shard in shards if shard not in files]
        if missing:
            raise _missing("the rules to merge shards", missing, len(shards))
        return "megatron", shards, None
    for format_ in _SUFFIXES:
        if format_ == "dcp":
            if distributed := _distributed(files):
                return format_, distributed, None
            continue
        chosen = _choose(format_, files, lambda path: _index(upstream, files[path], deadline))
        if chosen is not None:
            return format_, *chosen
    raise NoWeights(
        upstream.name,
        expected=".safetensors, .distcp, .bin, .pt, .pth or .gguf files in its top folder",
        found=", ".join(list(files)[:5]) + (", …" if len(files) > 5 else "")
        if files
        else "no file",
        do="name the folder that holds the weights",
    )


def _distributed(files: Mapping[str, UpstreamFile]) -> list[str]:
    """The files of a distributed checkpoint; none if there is none."""
    shards: dict[str, list[str]] = {}
    for path in files:
        folder = path[: path.rfind("/") + 1]
        if path.endswith(_SUFFIXES["dcp"]) and folder + _METADATA in files:
            shards.setdefault(folder, [folder + _METADATA]).append(path)
    if "" in shards:
        return shards[""]
    below = [f for f in shards if f.count("/") == 1 and not f.startswith("optimizer")]
    if len(below) > 1:
        raise _ambiguous("one distributed checkpoint", below)
    return shards[below[0]] if below else []


def _adapter(
    upstream: Upstream, files: Mapping[str, UpstreamFile], deadline: Deadline
) -> AdapterPlan:
    """The adapter among the files, which are to be merged into a base."""
    weights = next((name for name in _ADAPTER if name in files), None)
    if weights is None or _ADAPTER_CONFIG not in files:
        raise NoWeights(
            upstream.name,
            expected=f"an adapter to merge: {_ADAPTER_CONFIG} and {_ADAPTER[0]}",
            found=f"no {_ADAPTER[0]}" if weights is None else f"no {_ADAPTER_CONFIG}",
            do="name the folder that holds the adapter",
        )
    data = read_small(upstream, files[_ADAPTER_CONFIG], _ADAPTER_CONFIG_NBYTES, deadline)
    config = parse_json(data, _ADAPTER_CONFIG)
    if not isinstance(config, dict):
        raise InvalidData(_ADAPTER_CONFIG, expected="an object", found=type(config).__name__)
    format_: Format = "safetensors" if weights.endswith(".safetensors") else "pickle"
    return AdapterPlan(format_, (files[weights],), config)


Index = tuple[str, Mapping[str, str]]


def _index(upstream: Upstream, file: UpstreamFile, deadline: Deadline) -> Index:
    return file.path, read_index(file.path, read_small(upstream, file, MOST_NBYTES, deadline))


def _choose(
    format_: Format, files: Mapping[str, UpstreamFile], read: Callable[[str], Index]
) -> tuple[list[str], Index | None] | None:
    """The weights' paths in order and their index; None if the format is not there."""
    suffixes = _SUFFIXES[format_]
    top = [path for path in files if "/" not in path and not fnmatch(path, _SECOND)]
    indices = [p for p in top if p.endswith(tuple(f"{s}.index.json" for s in suffixes))]
    if len(indices) > 1:
        raise _ambiguous("one index", indices)
    if indices:
        index = read(indices[0])
        shards = sorted(set(index[1].values()))
        missing = [shard for shard in shards if shard not in files]
        if missing:
            raise _missing(indices[0], missing, len(shards))
        return shards, index
    weights = [p for p in top if p.endswith(suffixes) and not _is_other(p, format_)]
    whole = [name for name in _WHOLE[format_] if name in weights]
    if whole:
        return whole[:1], None
    numbered = [match for p in weights if (match := _NUMBERED.fullmatch(p))]
    if len(weights) <= 1 and not numbered:  # one shard of several is not the weights
        return (weights, None) if weights else None
    if len(numbered) < len(weights) or len({(m["stem"], m["count"]) for m in numbered}) > 1:
        raise _ambiguous("one checkpoint, or an index over its shards", weights)
    first = numbered[0]
    wanted = [
        f"{first['stem']}-{number:05d}-of-{first['count']}{first['suffix']}"
        for number in range(1, int(first["count"]) + 1)
    ]
    missing = [path for path in wanted if path not in files]
    if missing:
        raise _missing(f"the shards of {first['stem']!r}", missing, len(wanted))
    return wanted, None


def _rest(
    files: Mapping[str, UpstreamFile],
    format_: Format,
    weights: Sequence[str],
    index: Index | None,
    *,
    rewrite: bool,
) -> tuple[tuple[UpstreamFile, ...], tuple[str, ...]]:
    """The files to mirror as they are, and those left out, with the reason."""
    others, left_out = [], []
    for path, file in files.items():
        name = path.rpartition("/")[2]
        if path in weights:
            continue
        if name == _METADATA:
            continue  # of another checkpoint, whose shards are told
        if (rewrite or format_ == "pickle") and index is not None and path == index[0]:
            continue  # the converted files have an index of their own
        if fnmatch(name, _SECOND) and name.endswith(_SUFFIXES["safetensors"]):
            left_out.append(f"{path}: the weights in a second layout")
        elif any(fnmatch(name.lower(), pattern) for pattern in _OTHERS):
            left_out.append(f"{path}: another framework's weights")
        elif name.endswith((*_SUFFIXES["pickle"], ".bin.index.json")):
            left_out.append(f"{path}: a pickle that is not the weights in use")
        else:
            others.append(file)
    return tuple(others), tuple(left_out)


def _is_other(path: str, format_: Format) -> bool:
    patterns = (*_OTHERS, *_NO_WEIGHTS) if format_ == "pickle" else ()
    return any(fnmatch(path.lower(), pattern) for pattern in patterns)


def _missing(where: str, missing: Sequence[str], count: int) -> MissingShard:
    return MissingShard(
        where,
        expected=f"all of {count} shards beside it",
        found=f"no {', '.join(missing[:3])}"
        + (f" and {len(missing) - 3} more" * (len(missing) > 3)),
        do="the download did not finish; run it again",
    )


def _ambiguous(expected: str, found: Sequence[str]) -> AmbiguousWeights:
    return AmbiguousWeights(
        "weights",
        expected=expected,
        found=", ".join(found[:6]),
        do="deploy a folder that holds the one you mean",
    )
