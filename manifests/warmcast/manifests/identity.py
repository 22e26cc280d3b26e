"""Identity: the keys under which two states are the same.

Each key is the SHA-256 (64 hex digits) of a canonical JSON value, and pinned by literal hashes in
the tests: changing a canonical form means that the workers of one fleet no longer meet.

- model key: the config and each file's path, size, CRC32C and SHA-256;
- mesh key: names and sizes of the mesh's dimensions, every rank's coordinate, the sharding plan;
- state key: the sorted ``(name, dtype, shape, stride)`` of the containers;
- environment key, for states that were changed after loading: the change's name and version, and
  the versions of what computed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from warmcast.manifests.canonical import digest
from warmcast.manifests.errors import UsageError


def model_key(config: Any, files: Iterable[tuple[str, int, str, str]]) -> str:
    """The key of a model's bytes: its config, and ``(path, size, crc32c, sha256)`` of its files.

    ``crc32c`` and ``sha256`` are hex; the order of the files does not matter.
    """
    return digest({"kind": "model", "config": config, "files": sorted(list(f) for f in files)})


@dataclass(frozen=True, slots=True)
class Mesh:
    """How the ranks of a group divide a model between them.

    ``dimensions`` are ``(name, size)``, slowest first; ``coordinates[rank]`` is the rank's place
    in each; ``plan`` maps a pattern of tensor names to what happens to them (for instance
    ``"tp:0"``: split over the dimension ``tp`` along the tensor's axis 0). An empty plan means
    that no tensor is split.
    """

    dimensions: tuple[tuple[str, int], ...] = ()
    coordinates: tuple[tuple[int, ...], ...] = ((),)
    plan: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.dimensions]
        if len(set(names)) != len(names) or any(size < 1 for _, size in self.dimensions):
            raise UsageError(
                "mesh", expected="dimensions of distinct names, 1 or longer", found=self.dimensions
            )
        if not self.coordinates:
            raise UsageError("mesh", expected="at least one rank", found="none")
        for rank, coordinate in enumerate(self.coordinates):
            if len(coordinate) != len(names) or not all(
                0 <= place < size
                for place, (_, size) in zip(coordinate, self.dimensions, strict=True)
            ):
                raise UsageError(
                    f"mesh: rank {rank}", expected=f"a place in {names}", found=coordinate
                )
        if len(set(self.coordinates)) != len(self.coordinates):
            raise UsageError("mesh", expected="a place for each rank", found="two in one place")

    @classmethod
    def grid(cls, dimensions: Mapping[str, int], plan: Mapping[str, str] | None = None) -> Mesh:
        """A full mesh, its ranks counted row-major: ``grid({"pp": 2, "tp": 4})`` has 8 ranks."""
        places = product(*(range(size) for size in dimensions.values()))
        return cls(tuple(dimensions.items()), tuple(places), dict(plan or {}))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.coordinates)

    @property
    def key(self) -> str:
        """The mesh key."""
        return digest(
            {
                "kind": "mesh",
                "dimensions": [list(d) for d in self.dimensions],
                "coordinates": [list(c) for c in self.coordinates],
                "plan": dict(self.plan),
            }
        )


def state_key(containers: Iterable[tuple[str, str, tuple[int, ...], tuple[int, ...]]]) -> str:
    """The key of a skeleton: ``(name, dtype, shape, stride)`` of every container.

    ``dtype`` is the name that torch gives it, without the prefix (``bfloat16``); strides count
    elements. The order does not matter.
    """
    rows = sorted(
        [name, dtype, list(shape), list(stride)] for name, dtype, shape, stride in containers
    )
    return digest({"kind": "state", "containers": rows})


def environment_key(change: str, version: str, versions: Mapping[str, str]) -> str:
    """The key of what changed a state after loading.

    ``change`` and its ``version`` name the change (a quantisation, say); ``versions`` holds what
    its result depends on: torch, engine and kernel versions, the GPU's compute capability.
    """
    return digest(
        {"kind": "environment", "change": change, "version": version, "versions": dict(versions)}
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything in which two ranks' states can differ; equal identity means equal bytes."""

    model_key: str
    mesh_key: str
    state_key: str
    rank: int
    environment_key: str | None = None

    @property
    def digest(self) -> str:
        """The one key under which the registry knows this state (64 hex digits)."""
        return digest(
            {
                "kind": "identity",
                "model": self.model_key,
                "mesh": self.mesh_key,
                "state": self.state_key,
                "rank": self.rank,
                "environment": self.environment_key,
            }
        )
