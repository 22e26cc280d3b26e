"""The tensor-parallel plan that a transformers config carries, as a plan of a mesh.

A config's ``base_model_tp_plan`` maps module paths, ``*`` for a layer's number, to styles:
``{"layers.*.self_attn.q_proj": "colwise"}``. It comes from ``config.json`` where that has it, and
else from transformers' class for the config's ``model_type``. What a style does to weights is what
transformers itself does: ``colwise`` splits the dimension before the last of a weight (a bias along
its only one), ``rowwise`` the last (and leaves a bias whole). Modules that a model of this kind may
have, but this one has not, split nothing. A style whose slices are no single range (packed ones,
experts over ranks) is refused by its name: such a plan has to be written out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from warmcast.manifests.errors import UsageError

DIMENSION = "tp"
"""The mesh's dimension that such a plan splits over."""

_WHERE = "plan: transformers"
_FIELD = "base_model_tp_plan"
_BEFORE_LAST = frozenset({"colwise", "colwise_rep", "colwise_gather_output", "local_colwise"})
_LAST = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise"})
_AXES = {"embedding_rowwise": 0, "embedding_colwise": 1}
_WHOLE = frozenset({
    "replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce", "gather",
    "mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert", "local_params",
})  # fmt: skip


def transformers_plan(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """The plan of :class:`~warmcast.manifests.identity.Mesh` for tensors of these names and shapes.

    ``config`` is the parsed ``config.json``. Raises :class:`UsageError`, naming what it is about.
    """
    plan: dict[str, str] = {}
    prefixes: dict[str, str] = {}
    for module, style in _plan_of(config).items():
        if style in _WHOLE:
            continue
        if style not in _BEFORE_LAST | _LAST and style not in _AXES:
            raise UsageError(
                f"{_WHERE}: {module!r}",
                expected="colwise, rowwise or a style that leaves tensors whole",
                found=repr(style),
                do="write the plan out, as name patterns",
            )
        for name, prefix, parameter in _matches(module, shapes):
            other = prefixes.setdefault(prefix, name)
            if len(prefixes) > 1:
                raise UsageError(
                    f"{_WHERE}: {module!r}",
                    expected="one stack of layers of these names",
                    found=f"{next(iter(prefixes.values()))!r} and {other!r}",
                    do="write the plan out, as name patterns",
                )
            axis = _axis(style, parameter, len(shapes[name]), name)
            if axis is not None:
                pattern = f"{prefix}{module}" + (f".{parameter}" if parameter else "")
                if plan.setdefault(pattern, f"{DIMENSION}:{axis}") != f"{DIMENSION}:{axis}":
                    raise UsageError(
                        f"{_WHERE}: {pattern!r}",
                        expected="tensors of as many dimensions",
                        found=f"{name!r} of {len(shapes[name])}",
                    )
    if not plan:
        raise UsageError(
            _WHERE,
            expected="modules of the plan among the tensors",
            found="none",
            do="write the plan out, as name patterns",
        )
    return plan


def _plan_of(config: Mapping[str, Any]) -> Mapping[str, str]:
    for part in (config, config.get("text_config")):
        plan = part.get(_FIELD) if isinstance(part, Mapping) else None
        if plan is None and isinstance(part, Mapping) and "model_type" in part:
            plan = _class_plan(str(part["model_type"]))
        if plan:
            texts = isinstance(plan, Mapping) and all(
                isinstance(item, str) for pair in plan.items() for item in pair
            )
            if not texts:
                raise UsageError(
                    f"config.json: {_FIELD}", expected="styles by module", found=repr(plan)[:80]
                )
            return plan  # type: ignore[no-any-return]
    raise UsageError(
        _WHERE,
        expected=f"{_FIELD} in config.json, or in transformers' class for its model_type",
        found=f"none for {config.get('model_type')!r}",
        do="write the plan out, as name patterns",
    )


def _class_plan(model_type: str) -> Any:
    try:
        from transformers import CONFIG_MAPPING
    except ModuleNotFoundError as cause:
        raise UsageError(
            _WHERE,
            expected=f"{_FIELD} in config.json, or the package {cause.name!r}",
            found="neither",
            do="pip install transformers",
        ) from cause
    if model_type not in CONFIG_MAPPING:
        return None
    return getattr(CONFIG_MAPPING[model_type], _FIELD, None)


def _matches(
    module: str, shapes: Mapping[str, tuple[int, ...]]
) -> list[tuple[str, str, str | None]]:
    """Tensors of a module, or named as it is: each with what stands before, and the parameter."""
    numbered = r"\d+".join(map(re.escape, module.split("*")))
    pattern = re.compile(rf"(?P<prefix>(?:.*?\.)?){numbered}(?:\.(?P<parameter>[^.]+))?")
    found = ((name, pattern.fullmatch(name)) for name in shapes)
    return [(name, m["prefix"], m["parameter"]) for name, m in found if m is not None]


def _axis(style: str, parameter: str | None, ndim: int, name: str) -> int | None:
    """The axis along which a parameter is split; None if it stays whole."""
    if parameter not in (None, "weight", "bias"):
        raise UsageError(
            f"{_WHERE}: {name!r}",
            expected="a weight or a bias",
            found=f"{parameter!r}, of a quantisation perhaps",
            do="write the plan out, as name patterns",
        )
    if not ndim:
        return None
    if style in _AXES:
        return _AXES[style]
    if style in _LAST:
        return None if parameter == "bias" else ndim - 1
    return max(ndim - 2, 0)
