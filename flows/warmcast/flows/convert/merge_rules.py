"""The rules by which tensor-parallel shards are merged, as JSON or YAML:

    {"shards": ["mp_rank_00/model.pt", "mp_rank_01/model.pt"],
     "rules": {"*.query_key_value.weight": {"concat": 0},
               "*.mlp.gate_up.weight": {"concat": 0, "parts": 2},
               "*norm*": "same"}}

or, for pipeline stages, ``"stages": [{"shards": [...], "layer_offset": 0}, ...]`` in place of
``shards``, with ``"layers": ["encoder.layers."]``, the prefixes before the number that the offset
is added to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warmcast.flows.convert.options import MergeRule, MergeRules, MergeStage
from warmcast.manifests.canonical import parse_json
from warmcast.manifests.errors import InvalidData, UsageError
from warmcast.manifests.rules import unsafe_path

_MOST_NBYTES = 1 << 24
_MOST_LAYERS = 1 << 20
_MOST_PARTS = 1 << 10


def read_merge_rules(location: Path) -> MergeRules:
    """The rules in a file, YAML if its name says so. Raises :class:`UsageError`."""
    try:
        data = location.read_bytes()[:_MOST_NBYTES]
    except OSError as cause:
        raise UsageError(str(location), expected="a file of rules", found=cause.strerror) from None
    return merge_rules(_parsed(location, data), str(location))


def merge_rules(record: Any, where: str) -> MergeRules:
    """The rules in a JSON value; ``where`` names it in errors. Raises :class:`UsageError`."""
    if not isinstance(record, Mapping) or ("shards" in record) == ("stages" in record):
        raise UsageError(where, expected="an object with rules, and shards or stages")
    if unknown := sorted(set(record) - {"shards", "stages", "rules", "layers"}, key=str):
        raise UsageError(
            where, expected="shards or stages, rules and layers", found=repr(unknown[0])
        )
    stages = record["stages"] if "stages" in record else [{"shards": record["shards"]}]
    if not isinstance(stages, list) or not stages:
        raise UsageError(f"{where}: stages", expected="a list of stages", found=_brief(stages))
    rules = record.get("rules")
    if not isinstance(rules, Mapping) or not rules:
        raise UsageError(f"{where}: rules", expected="rules by pattern", found=_brief(rules))
    layers = record.get("layers", [])
    if not _texts(layers):
        raise UsageError(f"{where}: layers", expected="a list of prefixes", found=_brief(layers))
    found = MergeRules(
        stages=tuple(_stage(stage, f"{where}: stages.{n}") for n, stage in enumerate(stages)),
        rules=tuple(_rule(p, rule, f"{where}: rules: {p!r}") for p, rule in rules.items()),
        layers=tuple(layers),
    )
    shards = [shard for stage in found.stages for shard in stage.shards]
    if len(set(shards)) < len(shards):
        raise UsageError(f"{where}: shards", expected="each file once", found="one twice")
    if any(stage.layer_offset for stage in found.stages) and not layers:
        raise UsageError(
            f"{where}: layers", expected="prefixes that layer_offset concerns", found="none"
        )
    return found


def _parsed(location: Path, data: bytes) -> Any:
    if location.suffix not in (".yaml", ".yml"):
        try:
            return parse_json(data, str(location))
        except InvalidData as cause:
            raise UsageError(str(cause)) from None
    import yaml

    try:
        return yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as cause:
        raise UsageError(str(location), expected="YAML", found=cause) from None


def _stage(stage: Any, where: str) -> MergeStage:
    if not isinstance(stage, Mapping) or set(stage) - {"shards", "layer_offset"}:
        raise UsageError(where, expected="shards and layer_offset", found=_brief(stage))
    shards, offset = stage.get("shards"), stage.get("layer_offset", 0)
    if not _texts(shards) or not shards:
        raise UsageError(f"{where}: shards", expected="a list of files", found=_brief(shards))
    for shard in shards:
        if problem := unsafe_path(shard):
            raise UsageError(
                f"{where}: shards", expected="paths in the source", found=f"{problem} in {shard!r}"
            )
    if not _whole(offset, 0, _MOST_LAYERS):
        raise UsageError(f"{where}: layer_offset", expected="a count", found=_brief(offset))
    return MergeStage(tuple(shards), offset)


def _rule(pattern: Any, rule: Any, where: str) -> MergeRule:
    if not isinstance(pattern, str) or not pattern:
        raise UsageError(where, expected="a pattern of names")
    if rule == "same":
        return MergeRule(pattern, None)
    concat = rule.get("concat") if isinstance(rule, Mapping) else None
    parts = rule.get("parts", 1) if isinstance(rule, Mapping) else 1
    known = isinstance(rule, Mapping) and not set(rule) - {"concat", "parts"}
    if not known or not _whole(concat, 0, 64) or not _whole(parts, 1, _MOST_PARTS):
        raise UsageError(
            where, expected='"same", or {"concat": dimension, "parts": count}', found=_brief(rule)
        )
    return MergeRule(pattern, concat, parts)


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


def _brief(value: object) -> str:
    return f"{value!r:.80}"
