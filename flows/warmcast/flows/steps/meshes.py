"""What is asked for a mesh: its dimensions, the plan or where that comes from, and rank files.

    {"dimensions": {"tp": 2}, "plan": {"*.q_proj.weight": "tp:0"}, "presharded": true}

``plan`` is ``"transformers"`` for the one that the model's config carries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from warmcast.flows.steps.transformers_plan import DIMENSION, transformers_plan
from warmcast.manifests.errors import UsageError
from warmcast.manifests.identity import Mesh

_MAX_RANKS = 1 << 16
_EXPECTED = '{"dimensions": {name: size}, "plan": {pattern: "dimension:axis"}}'
_FIELDS = {"dimensions", "plan", "presharded"}


@dataclass(frozen=True, slots=True)
class MeshRequest:
    """A mesh to lay tensors out for; ``presharded``: with files of what each rank holds."""

    dimensions: Mapping[str, int]
    plan: Mapping[str, str] | Literal["transformers"] = field(default_factory=dict)
    presharded: bool = False

    def mesh(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Mesh:
        """The mesh, for a model of this config and of tensors of these names and shapes.

        Raises :class:`UsageError`.
        """
        if isinstance(self.plan, Mapping):
            return Mesh.grid(self.dimensions, self.plan)
        if DIMENSION not in self.dimensions:
            raise UsageError(
                "plan: transformers",
                expected=f"a dimension {DIMENSION!r}",
                found=", ".join(self.dimensions) or "none",
            )
        return Mesh.grid(self.dimensions, transformers_plan(config, shapes))

    def record(self) -> dict[str, Any]:
        """The same as a JSON value, as :func:`parse_mesh` reads it."""
        plan = self.plan if isinstance(self.plan, str) else dict(self.plan)
        record: dict[str, Any] = {"dimensions": dict(self.dimensions), "plan": plan}
        return record | {"presharded": True} if self.presharded else record


def parse_mesh(value: object, where: str) -> MeshRequest:
    """What a JSON value asks for. Raises :class:`UsageError`."""
    if not isinstance(value, dict) or not {"dimensions"} <= set(value) <= _FIELDS:
        raise UsageError(where, expected=_EXPECTED, found=repr(value)[:80])
    dimensions, plan = value["dimensions"], value.get("plan", {})
    presharded = value.get("presharded", False)
    sizes_fit = isinstance(dimensions, dict) and all(
        isinstance(size, int) and not isinstance(size, bool) for size in dimensions.values()
    )
    if not sizes_fit or not (isinstance(plan, dict) or plan == "transformers"):
        raise UsageError(where, expected=_EXPECTED, found=repr(value)[:80])
    if not isinstance(presharded, bool):
        raise UsageError(f"{where}: presharded", expected="true or false", found=repr(presharded))
    if math.prod(max(1, size) for size in dimensions.values()) > _MAX_RANKS:
        raise UsageError(where, expected=f"{_MAX_RANKS} ranks at most", found=dimensions)
    Mesh.grid(dimensions)  # of a size that is no size, it is told now
    return MeshRequest(dimensions, plan, presharded)
