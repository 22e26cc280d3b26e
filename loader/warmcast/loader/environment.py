"""What a worker is told by its environment.

WARMCAST_ORIGIN        the origin's URL; required
WARMCAST_REGISTRY      redis://host:port; without it there are no peers
WARMCAST_TRUST         public keys (PEM files, ``:`` between them) of which one has to have signed
WARMCAST_NODE          the socket of the node's agent; without it there is none
WARMCAST_TLS_CA        the authority of agents that speak TLS, should the node's own go
WARMCAST_DEADLINE      seconds that a load may take; 600 unless set
WARMCAST_HOST_MEMORY   bytes of host memory for bytes on their way; 2147483648 unless set
WARMCAST_HOST          the address by which peers reach this worker; found out unless set
WARMCAST_TRANSPORTS    the transports to be used (``ipc,nccl,gloo``); all that work, unless set
WARMCAST_KERNELS       where compiled kernels are kept for the next process (see ``kernel_cache``)
WARMCAST_NCCL_MAX_CTAS thread blocks that a transfer by nccl may take, 1 to 64; NCCL's choice
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from warmcast.loader.staging import HOST_MEMORY
from warmcast.manifests.errors import UsageError

DEADLINE = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """A loader's settings; ``deadline`` in seconds, ``host_memory`` in bytes."""

    origin: str
    registry: str | None = None
    deadline: float = DEADLINE
    host_memory: int = HOST_MEMORY
    node: str | None = None
    trust: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read the environment; raises :class:`UsageError` naming the variable that is wrong."""
        env = os.environ if env is None else env
        origin = env.get("WARMCAST_ORIGIN")
        if not origin:
            raise UsageError(
                "WARMCAST_ORIGIN",
                expected="the origin's URL (file:///path, s3://bucket/prefix)",
                found="nothing",
                do="set it",
            )
        text = env.get("WARMCAST_DEADLINE", str(DEADLINE))
        try:
            deadline = float(text)
        except ValueError:
            deadline = math.nan
        if not deadline > 0:
            raise UsageError("WARMCAST_DEADLINE", expected="seconds, more than 0", found=repr(text))
        memory = env.get("WARMCAST_HOST_MEMORY", str(HOST_MEMORY))
        if not memory.isdecimal() or not int(memory):
            raise UsageError(
                "WARMCAST_HOST_MEMORY", expected="bytes, more than 0", found=repr(memory)
            )
        return cls(
            origin,
            env.get("WARMCAST_REGISTRY") or None,
            deadline,
            int(memory),
            env.get("WARMCAST_NODE") or None,
            tuple(filter(None, env.get("WARMCAST_TRUST", "").split(os.pathsep))),
        )
