"""Run time: what a worker imports at boot to get verified weights from the fastest place.

What is named here is imported when it is first used: the node's agent, which has no need of torch,
is a part of this package too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warmcast.loader.change import Change
    from warmcast.loader.errors import (
        GroupLost,
        RegistryUnavailable,
        RestartRequired,
        SkeletonMismatch,
        WeightVerificationError,
    )
    from warmcast.loader.loader import Loader
    from warmcast.loader.report import LoadReport, Stage
    from warmcast.loader.skeletons import skeleton
    from warmcast.manifests.errors import UsageError, WarmcastError
    from warmcast.manifests.identity import Mesh

_WHERE = {
    "Change": "warmcast.loader.change",
    "GroupLost": "warmcast.loader.errors",
    "LoadReport": "warmcast.loader.report",
    "Loader": "warmcast.loader.loader",
    "Mesh": "warmcast.manifests.identity",
    "RegistryUnavailable": "warmcast.loader.errors",
    "RestartRequired": "warmcast.loader.errors",
    "SkeletonMismatch": "warmcast.loader.errors",
    "Stage": "warmcast.loader.report",
    "UsageError": "warmcast.manifests.errors",
    "WarmcastError": "warmcast.manifests.errors",
    "WeightVerificationError": "warmcast.loader.errors",
    "skeleton": "warmcast.loader.skeletons",
}

__all__ = [
    "Change",
    "GroupLost",
    "LoadReport",
    "Loader",
    "Mesh",
    "RegistryUnavailable",
    "RestartRequired",
    "SkeletonMismatch",
    "Stage",
    "UsageError",
    "WarmcastError",
    "WeightVerificationError",
    "skeleton",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_WHERE[name]), name)
    return value
