"""Votes over the group: one rank's "no" is everyone's "no".

The ranks of a group must walk the decision tree together: if one waited for a peer while another
went to the origin, whatever collective came next would hang. So each branch ends in a vote, which
tells every rank the same thing: whether all said yes, and who said no and why.

Votes go over a gloo group of the CPU, apart from the model's own process groups, each under a
deadline; a rank that does not vote in time ends the load of all others with :class:`GroupLost`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store, TCPStore

from warmcast.loader.errors import GroupLost
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError, WarmcastError

_made = count()  # groups of this process; all ranks make theirs in one order

_GLOO_PATIENCE = 5
"""Gloo waits this many times its timeout for a connection (``Pair::waitUntilConnected``)."""

_LONGEST = 30 * 86400.0

_REASON = 255
"""Bytes of a ballot's text; the first byte of a ballot is the vote."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a vote came to, the same on every rank; ``reasons`` are those of who said no."""

    passed: bool
    reasons: tuple[tuple[int, str], ...] = ()

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return "; ".join(f"rank {rank}: {reason}" for rank, reason in self.reasons)


class Group(Protocol):
    """The ranks that serve one replica together."""

    rank: int
    size: int

    def vote(self, yes: bool, reason: str, deadline: Deadline) -> Verdict:
        """Whether every rank says yes. Raises :class:`GroupLost` after the deadline."""

    def first(self, text: str, deadline: Deadline) -> str:
        """What rank 0 says (at most 255 bytes of UTF-8), on every rank."""

    def close(self) -> None:
        """Give back the group's sockets and threads."""


@contextmanager
def telling(group: Group, deadline: Deadline) -> Iterator[None]:
    """Tell the other ranks of an error before their first vote, for which they would wait."""
    try:
        yield
    except WarmcastError as cause:
        with suppress(WarmcastError):
            group.vote(False, str(cause), deadline)
        raise


class Alone:
    """The group of one process."""

    rank = 0
    size = 1

    def vote(self, yes: bool, reason: str, deadline: Deadline) -> Verdict:
        """The one vote there is."""
        return Verdict(yes, () if yes else ((0, reason),))

    def first(self, text: str, deadline: Deadline) -> str:
        """What this process says."""
        return text

    def close(self) -> None:
        """Nothing to give back."""


class GlooGroup:
    """The ranks that torchrun started, over a process group of their own."""

    def __init__(self, store: Store, rank: int, size: int, deadline: Deadline) -> None:
        self.rank = rank
        self.size = size
        try:
            # All are waited for here, because gloo takes its time to connect to one that has gone.
            store.set(f"here/{rank}", "")
            store.wait([f"here/{other}" for other in range(size)], _left(deadline))
            # torch's stubs know less of this class than it has.
            self._group: Any = dist.ProcessGroupGloo(
                store, rank, size, _left(deadline) / _GLOO_PATIENCE
            )
        except (RuntimeError, dist.DistError) as cause:
            raise GroupLost(
                f"rank {rank}", expected=f"{size} ranks to meet", found=_first_line(cause)
            ) from cause

    def vote(self, yes: bool, reason: str, deadline: Deadline) -> Verdict:
        """Whether every rank says yes, and why those who do not."""
        ballots = self._gather(bytes([yes]) + ("" if yes else reason).encode()[:_REASON], deadline)
        reasons = tuple(
            (rank, ballot[1:].decode(errors="replace"))
            for rank, ballot in enumerate(ballots)
            if ballot[:1] != b"\x01"
        )
        return Verdict(not reasons, reasons)

    def first(self, text: str, deadline: Deadline) -> str:
        """What rank 0 says, on every rank."""
        return self._gather(b"\x01" + text.encode()[:_REASON], deadline)[0][1:].decode()

    def close(self) -> None:
        """Give back the group's sockets and threads."""
        del self._group

    def _gather(self, ballot: bytes, deadline: Deadline) -> list[bytes]:
        deadline.check("voting")
        mine = torch.zeros(1 + _REASON, dtype=torch.uint8)
        mine[: len(ballot)] = torch.frombuffer(bytearray(ballot), dtype=torch.uint8)
        everyone = [torch.zeros_like(mine) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = _left(deadline)
        try:
            self._group.allgather([everyone], [mine], options).wait(_left(deadline))
        except RuntimeError as cause:
            raise GroupLost(
                f"rank {self.rank}",
                expected=f"the votes of {self.size} ranks",
                found=_first_line(cause),
                do="a rank of the group has ended or hangs: restart the group",
            ) from cause
        return [bytes(theirs.tolist()).rstrip(b"\0") or b"\0" for theirs in everyone]


def group_from_env(deadline: Deadline) -> Group:
    """The group that torchrun's environment describes; :class:`Alone` without one.

    Raises :class:`UsageError` if the environment contradicts itself, :class:`GroupLost` if the
    ranks do not meet in time.
    """
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        return Alone()
    rank = _number("RANK", -1)
    if not 0 <= rank < size:
        raise UsageError("RANK", expected=f"0 to {size - 1}, as WORLD_SIZE says", found=rank)
    store = _default_store() or _env_store(rank, deadline)
    # The store outlives the group, and torchrun's its ranks: who comes next must not meet what
    # those before have left there.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"warmcast/{attempt}/{next(_made)}/", store)
    return GlooGroup(store, rank, size, deadline)


def _default_store() -> Store | None:
    """The store of the process group that the engine has made already, if it has."""
    if not dist.is_initialized():
        return None
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _env_store(rank: int, deadline: Deadline) -> Store:
    host = os.environ.get("MASTER_ADDR")
    port = _number("MASTER_PORT", 0)
    if not host or not port:
        raise UsageError(
            "MASTER_ADDR, MASTER_PORT",
            expected="both, as WORLD_SIZE is set",
            found=f"{host}:{port}",
        )
    # torchrun's agent serves the store itself; without an agent rank 0 does, as env:// would.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(
            host,
            port,
            is_master=serves,
            timeout=_left(deadline),
            wait_for_workers=False,
            multi_tenant=True,  # the engine's own process group will listen at the same port
        )
    except (RuntimeError, dist.DistError) as cause:
        raise GroupLost(
            f"rank {rank}", expected=f"a store at {host}:{port}", found=_first_line(cause)
        ) from cause


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise UsageError(name, expected="a number", found=repr(text))
    return int(text)


def _left(deadline: Deadline) -> timedelta:
    """What is left of a deadline, as torch takes it; zero would mean no timeout."""
    return timedelta(seconds=min(max(deadline.remaining(), 0.001), _LONGEST))


def _first_line(cause: BaseException) -> str:
    return str(cause).split("\n", 1)[0][:200]
