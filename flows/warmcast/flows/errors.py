"""Every error of deploy time, below the manifests' own tree.

WarmcastError
└── DeployError
    ├── SourceError               what was to be deployed cannot be
    │   ├── NoWeights             a folder without weights in a format that is known
    │   ├── AmbiguousWeights      several checkpoints, and nothing that says which
    │   ├── InvalidIndex          an index that contradicts its shards, or names unsafe paths
    │   ├── MissingShard          an index, or a shard's number, names a file that is not there
    │   ├── SourceNotFound        no such repository, revision, bucket or folder
    │   ├── SourceRefused         credentials that are missing, wrong or not enough
    │   ├── SourceUnreachable     no answer in time, or a connection that broke
    │   ├── SourceChanged         a file changed while it was read
    │   ├── InvalidCheckpoint     one that is cut off, corrupt, or holds what cannot be stored
    │   └── UnsafePickle          a pickle that names a forbidden global; it was not run
    ├── ConversionFailed          the child process died, or outgrew its memory
    ├── WorkFolderFull            no space for converted files
    └── Damaged                   verification found blobs that are not what they should be
"""

from __future__ import annotations

from warmcast.manifests.errors import WarmcastError


class DeployError(WarmcastError):
    """The root of deploy time's errors."""


class SourceError(DeployError):
    """What was to be deployed cannot be."""


class NoWeights(SourceError):
    """A folder without weights in a format that is known."""


class AmbiguousWeights(SourceError):
    """Several checkpoints, and nothing that says which of them is meant."""


class InvalidIndex(SourceError):
    """An index that contradicts its shards, or names unsafe paths."""


class MissingShard(SourceError):
    """An index, or a shard's number, names a file that is not there."""


class SourceNotFound(SourceError):
    """No such repository, revision, bucket or folder."""


class SourceRefused(SourceError):
    """The upstream wants credentials, or others than it was given."""


class SourceUnreachable(SourceError):
    """The upstream gave no answer in time, was too busy, or its connection broke."""


class SourceChanged(SourceError):
    """A file changed while it was read."""


class InvalidCheckpoint(SourceError):
    """A checkpoint that is cut off, corrupt, or holds what cannot be stored."""


class UnsafePickle(SourceError):
    """A pickle that names a global which loading weights does not need; it was not run."""


class ConversionFailed(DeployError):
    """The converting process died, or needed more memory than it may have."""


class WorkFolderFull(DeployError):
    """No space is left for converted files."""


class Damaged(DeployError):
    """Verification found blobs that are not what the manifest says."""
