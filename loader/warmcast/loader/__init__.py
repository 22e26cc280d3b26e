"""Run time: what a worker imports at boot to get verified weights from the fastest place."""

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
from warmcast.loader.skeleton import skeleton
from warmcast.manifests.errors import UsageError, WarmcastError
from warmcast.manifests.identity import Mesh

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
