"""What a deployment's bytes are, and how one proves it. No torch, no redis, no prefect."""

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError
from warmcast.manifests.identity import Identity, Mesh
from warmcast.manifests.manifest import Manifest, parse_manifest
from warmcast.manifests.origin import Origin, Ref

__all__ = [
    "Deadline",
    "Identity",
    "Manifest",
    "Mesh",
    "Origin",
    "Ref",
    "WarmcastError",
    "parse_manifest",
]
