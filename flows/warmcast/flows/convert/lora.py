"""LoRA adapters, merged into the weights that they were trained on.

``W + scale · B · A`` of each adapted weight, computed in float32, stored in the dtype of the base;
a piece of a base tensor at a time. As PEFT writes adapters: ``base_model.model.<module>`` before
``lora_A.weight`` and ``lora_B.weight``, or ``lora_embedding_A`` and ``lora_embedding_B``; whatever
else stands under that prefix (``modules_to_save``, biases) replaces the base's tensor of its name.

Supported: linear layers and convolutions without groups, embeddings, ``fan_in_fan_out``,
``use_rslora``, ``rank_pattern`` and ``alpha_pattern``. Whatever else a config asks for (DoRA and
its like) is refused by its name, because leaving it out would give another model.

Source: ``get_delta_weight`` and ``update_layer`` of PEFT's LoRA layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from warmcast.flows.convert.cast import FLOATS, cast_values
from warmcast.flows.convert.tensors import Checkpoint, Tensor, memory_of
from warmcast.flows.errors import InvalidCheckpoint

if TYPE_CHECKING:
    import torch

_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_PAIRS = {
    ".lora_A.weight": (".lora_B.weight", False),
    ".lora_embedding_A": (".lora_embedding_B", True),
}
_REFUSED = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config",
    "corda_config", "kasa_config", "loftq_config", "lora_ga_config", "megatron_config",
    "monteclora_config", "velora_config",
)  # fmt: skip
"""Fields of the config that change what a merge has to compute, where they are set."""

_STARTS = ("gaussian", "orthogonal", "eva")
"""Ways to begin that leave the base as it is; others (PiSSA, OLoRA, …) change it, too."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A weight's ``A`` and ``B``, and what their product is scaled by."""

    a: Tensor
    b: Tensor
    embedding: bool
    scale: float


def merge_adapter(base: Checkpoint, adapter: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """The base's checkpoint with the adapter merged; :class:`InvalidCheckpoint` if it cannot be."""
    _check_config(config)
    pairs, replaced = _parts(adapter, config)
    stored = {tensor.name: tensor for tensor in base.tensors}
    tied = {tie.name for tie in base.tied} | {tie.of for tie in base.tied}
    for name in (*pairs, *replaced):
        if name in tied or name not in stored:
            raise InvalidCheckpoint(
                f"adapter: {name!r}",
                expected="a tensor of the base that is tied to no other",
                found="a tied one" if name in tied else "no such tensor",
                do="merge it where it was trained, and save the whole"
                if name in tied
                else "name the base that the adapter was trained on",
            )
    fan = config.get("fan_in_fan_out") is True
    tensors = []
    for tensor in base.tensors:
        if tensor.name in replaced:
            tensor = _replaced(tensor, replaced[tensor.name])  # noqa: PLW2901
        pair = pairs.get(tensor.name)
        tensors.append(tensor if pair is None else _merged(tensor, pair, fan=fan))
    return replace(base, tensors=tuple(tensors), left_out=(*base.left_out, *adapter.left_out))


def _check_config(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise _refused("peft_type", kind)
    for field in _REFUSED:
        if config.get(field):
            raise _refused(field, config[field])
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start not in _STARTS:
        raise _refused("init_lora_weights", start)
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        raise _refused("bias", config["bias"])


def _refused(field: str, value: object) -> InvalidCheckpoint:
    return InvalidCheckpoint(
        f"{_CONFIG}: {field}",
        expected="a LoRA adapter that can be merged exactly",
        found=f"{value!r:.80}",
        do="merge it where it was trained, and save the whole",
    )


def _parts(
    adapter: Checkpoint, config: Mapping[str, Any]
) -> tuple[dict[str, _Pair], dict[str, Tensor]]:
    """The pairs by the name of the base's weight, and the tensors that replace one."""
    found = {tensor.name: tensor for tensor in adapter.tensors}
    if adapter.tied:
        raise _broken(adapter.tied[0].name, "tensors that are tied to no other", "a tied one")
    pairs: dict[str, _Pair] = {}
    used: set[str] = set()
    for name, tensor in found.items():
        ending = next((e for e in _PAIRS if name.endswith(e)), None)
        if ending is None or not name.startswith(_PREFIX):
            continue
        module = name.removesuffix(ending)
        other, embedding = _PAIRS[ending]
        if module + other not in found:
            raise _broken(name, f"{other[1:]} beside it", "none")
        target = module.removeprefix(_PREFIX)
        scale = _scale(target, tensor, config)
        pairs[f"{target}.weight"] = _Pair(tensor, found[module + other], embedding, scale)
        used |= {name, module + other}
    replaced = {}
    for name, tensor in found.items():
        if name in used:
            continue
        if not name.startswith(_PREFIX) or ".lora_" in name or name.endswith(".weight_norm"):
            raise _broken(name, f"{_PREFIX}…, with lora_A and lora_B", "another kind")
        # What PEFT wraps keeps its own weight and bias one level below.
        replaced[name.removeprefix(_PREFIX).replace(".base_layer.", ".")] = tensor
    if not pairs and not replaced:
        raise _broken("", "tensors", "none")
    return pairs, replaced


def _scale(module: str, a: Tensor, config: Mapping[str, Any]) -> float:
    rank = _of_pattern(config, "rank_pattern", module, config.get("r"))
    alpha = _of_pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
    if not isinstance(rank, int) or rank < 1 or a.shape[:1] != (rank,):
        raise _broken(a.name, f"the rank of {_CONFIG}, {rank!r:.20}", list(a.shape))
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise _refused("lora_alpha", alpha)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_pattern(config: Mapping[str, Any], field: str, module: str, default: Any) -> Any:
    """The value of the first pattern, a regular expression, that the module's name ends in."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, Mapping):
        raise _refused(field, patterns)
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(?:.*\.)?(?:{pattern})$", module):
                return value
        except re.error as cause:
            raise _refused(field, f"{pattern}: {cause}") from None
    return default


def _merged(tensor: Tensor, pair: _Pair, *, fan: bool) -> Tensor:
    """The tensor with ``scale · B · A`` added."""
    transposed = fan or pair.embedding
    b_columns = math.prod(pair.b.shape[1:])
    if transposed and len(pair.a.shape) == len(pair.b.shape) == 2:
        shape: tuple[int, ...] = (pair.a.shape[1], pair.b.shape[0])
    else:
        shape = (pair.b.shape[0], *pair.a.shape[1:]) if pair.b.shape else ()
    fits = len(pair.a.shape) > 1 and b_columns == pair.a.shape[0] and shape == tensor.shape
    if not fits or any(t.dtype not in FLOATS for t in (tensor, pair.a, pair.b)):
        raise InvalidCheckpoint(
            f"adapter: {pair.a.name!r}",
            expected=f"to fit {tensor.name!r}, {tensor.dtype} {list(tensor.shape)}",
            found=f"A {list(pair.a.shape)} and B {list(pair.b.shape)}",
            do="name the base that the adapter was trained on",
        )

    def pieces() -> Iterator[memoryview]:
        import torch

        a, b = _whole(pair.a).flatten(1), _whole(pair.b).flatten(1)
        left, right = (a.T, b.T) if transposed else (b, a)
        dtype = getattr(torch, FLOATS[tensor.dtype])
        columns, position = right.shape[1], 0
        for piece in tensor.pieces():
            values = torch.frombuffer(piece, dtype=dtype)
            end = position + len(values)
            rows = slice(position // columns, -(-end // columns))
            delta = ((left[rows] @ right) * pair.scale).flatten()
            begin = position - rows.start * columns
            delta = delta[begin : begin + len(values)]
            wide = values if dtype == torch.float64 else values.float()
            yield memory_of(cast_values(wide + delta, dtype, tensor.name))
            position = end

    return replace(tensor, pieces=pieces, extents=None)


def _replaced(tensor: Tensor, saved: Tensor) -> Tensor:
    """The adapter's own tensor in the place, and in the dtype, of the base's."""
    castable = saved.dtype == tensor.dtype or {saved.dtype, tensor.dtype} <= set(FLOATS)
    if saved.shape != tensor.shape or not castable:
        raise InvalidCheckpoint(
            f"adapter: {saved.name!r}",
            expected=f"the base's {tensor.dtype} {list(tensor.shape)}",
            found=f"{saved.dtype} {list(saved.shape)}",
            do="resize the base's embeddings first, or merge it where it was trained",
        )
    if saved.dtype == tensor.dtype:
        return replace(saved, name=tensor.name)

    def pieces() -> Iterator[memoryview]:
        import torch

        before, after = (getattr(torch, FLOATS[t.dtype]) for t in (saved, tensor))
        for piece in saved.pieces():
            yield memory_of(cast_values(torch.frombuffer(piece, dtype=before), after, tensor.name))

    return replace(tensor, pieces=pieces, extents=None)


def _whole(tensor: Tensor) -> torch.Tensor:
    """A small tensor in memory, as float32."""
    import torch

    data = bytearray()
    for piece in tensor.pieces():
        data += piece
    flat = torch.frombuffer(data, dtype=getattr(torch, FLOATS[tensor.dtype]))
    return flat.float().reshape(tensor.shape)


def _broken(name: str, expected: str, found: object) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"adapter: {name!r}", expected=expected, found=found)
