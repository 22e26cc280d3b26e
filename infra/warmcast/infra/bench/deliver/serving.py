"""How fast one agent gives chunks that it has, beside a server that does nothing but ``sendfile``.

Both serve the very same file, the agent's own, to this process. It asks for one chunk after the
other over ``CONNECTIONS`` connections that are kept, reads each into the same memory, and checks
nothing: what is measured is the server. They take turns, and medians count. Processor time is the
server's own.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from warmcast.flows.workfolder import WorkFolder
from warmcast.infra.bench import record
from warmcast.infra.bench.deliver.burst import Agent, bare, running_agents
from warmcast.infra.bench.deliver.sendfile import FileServer, file_server
from warmcast.infra.bench.stream.checkpoint import Checkpoint, make
from warmcast.infra.bench.wire.models import Shape
from warmcast.loader.node.client import NodeClient
from warmcast.loader.node.tokens import LONGEST, Fleet
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError

CONNECTIONS = 4
_ROUNDS = 7
_FILES = 4
_BUFFER = 1 << 20
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Case:
    """One server: bytes and median seconds of a round, its processor seconds a GB (1e9 bytes)."""

    server: str
    bytes: int
    seconds: float
    GBps: float
    ratio_to_limit: float
    cpu_seconds_per_gb: float


@dataclass(slots=True)
class Result:
    """All servers, the first of which is the limit; ``agent_memory`` is the most that the agent
    held, in bytes.
    """

    cases: list[Case] = field(default_factory=list)
    agent_memory: int = 0

    def record(self) -> dict[str, Any]:
        """As JSON; see :mod:`warmcast.infra.bench.record`."""
        limit = self.cases[0]
        return {
            "machine": record.machine(),
            "limits": {f"{limit.server}_GBps": limit.GBps},
            "agent_memory_bytes": self.agent_memory,
            "cases": [asdict(case) for case in self.cases],
        }

    def print(self) -> None:
        """A table for people."""
        columns = ("server", "GB", "s", "GB/s", "of the limit", "CPU s a GB")
        rows = [
            (
                case.server,
                f"{case.bytes / 1e9:.2f}",
                f"{case.seconds:.3f}",
                f"{case.GBps:.2f}",
                f"{case.ratio_to_limit:.2f}",
                f"{case.cpu_seconds_per_gb:.3f}",
            )
            for case in self.cases
        ]
        record.print_table(columns, rows)
        print(f"The agent held {self.agent_memory / (1 << 20):.0f} MiB at most.")


@dataclass(frozen=True, slots=True)
class Request:
    """A chunk of a server: the path to ask for, with which headers, and how many bytes it has."""

    path: str
    headers: Mapping[str, str]
    length: int


@dataclass(frozen=True, slots=True)
class _Server:
    name: str
    pid: int
    url: str
    requests: Sequence[Request]

    @property
    def nbytes(self) -> int:
        return sum(request.length for request in self.requests)

    def processor(self) -> float:
        """Seconds that its threads have computed so far."""
        text = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / _TICK


def run(size: int, deadline: Deadline) -> Result:
    """Measure with a model of ``size`` bytes. Raises :class:`WarmcastError` for a server that does
    not start, or does not give what it is asked for.
    """
    shape = Shape("serve", {"weight": (max(1, size // 2 // _FILES),)}, _FILES)
    with ExitStack() as stack:
        disk = stack.enter_context(WorkFolder())
        disk.need(2 * shape.nbytes)
        checkpoint = make(disk.part(), shape, deadline)
        folder = disk.part()
        (agent,) = stack.enter_context(
            running_agents(1, folder, checkpoint.origin, None, bare(), deadline)
        )
        client = NodeClient(agent.socket)
        for _ in client.prefetch(checkpoint.manifest.digest, deadline):
            deadline.check("filling the agent's cache")
        blobs = folder / "0" / "cache" / "blobs"
        limit = stack.enter_context(file_server(blobs, disk.part(), deadline))
        token = Fleet.read(folder / "key").token(checkpoint.manifest.digest, LONGEST)
        servers = [_by_range(limit, checkpoint), _by_chunk(agent, checkpoint, token)]
        return Result(_cases(servers, deadline), agent.memory())


def _cases(servers: Sequence[_Server], deadline: Deadline) -> list[Case]:
    """Each server's figures beside the first one's."""
    seconds: dict[str, list[float]] = {server.name: [] for server in servers}
    used = dict.fromkeys(seconds, 0.0)
    for number in range(1 + _ROUNDS):
        for server in servers:
            before = server.processor()
            taken = read(server.url, server.requests, deadline)
            if number:  # the first round warms connections, caches and branches
                seconds[server.name].append(taken)
                used[server.name] += server.processor() - before
    rates = {s.name: s.nbytes / statistics.median(seconds[s.name]) / 1e9 for s in servers}
    return [
        Case(
            server.name,
            server.nbytes,
            round(statistics.median(seconds[server.name]), 4),
            round(rates[server.name], 3),
            round(rates[server.name] / rates[servers[0].name], 3),
            round(used[server.name] / (_ROUNDS * server.nbytes) * 1e9, 4),
        )
        for server in servers
    ]


def read(url: str, requests: Sequence[Request], deadline: Deadline) -> float:
    """Seconds in which a server gives all that it is asked for.

    Raises :class:`WarmcastError` for another answer than the bytes, and what the socket raises.
    """
    waiting, lock = iter(requests), threading.Lock()
    buffer = memoryview(bytearray(_BUFFER))

    def lane() -> None:
        address = urlsplit(url).netloc
        with closing(HTTPConnection(address, timeout=max(0.1, deadline.remaining()))) as connection:
            while True:
                with lock:
                    request = next(waiting, None)
                if request is None:
                    return
                deadline.check("reading from a server")
                _read_one(connection, request, buffer)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        began = time.perf_counter()
        for each in [pool.submit(lane) for _ in range(CONNECTIONS)]:
            each.result()
        return time.perf_counter() - began


def _read_one(connection: HTTPConnection, request: Request, buffer: memoryview) -> None:
    connection.request("GET", request.path, headers=request.headers)
    left = request.length
    with connection.getresponse() as response:
        if response.status not in (200, 206) or response.length != left:
            raise WarmcastError(
                request.path,
                expected=f"{left} bytes",
                found=f"status {response.status}, {response.length} bytes",
            )
        while left:
            count = response.readinto(buffer)
            if not count:
                raise WarmcastError(request.path, expected=f"{left} more bytes", found="the end")
            left -= count


def _by_range(server: FileServer, checkpoint: Checkpoint) -> _Server:
    requests = [
        Request(f"/{sha256[:2]}/{sha256}", {"Range": f"bytes={begin}-{begin + length - 1}"}, length)
        for sha256, _, begin, length in _chunks(checkpoint)
    ]
    return _Server(server.name, server.pid, server.url, requests)


def _by_chunk(agent: Agent, checkpoint: Checkpoint, token: str) -> _Server:
    headers = {"Authorization": f"Bearer {token}"}
    requests = [
        Request(f"/chunks/{sha256}/{number}", headers, length)
        for sha256, number, _, length in _chunks(checkpoint)
    ]
    return _Server("agent", agent.process.pid, agent.url, requests)


def _chunks(checkpoint: Checkpoint) -> Iterator[tuple[str, int, int, int]]:
    """All chunks: the blob each is of, its number there, where it begins, and its length."""
    chunk_size = checkpoint.manifest.chunk_size
    for file in checkpoint.manifest.files:
        for number in range(len(file.chunks)):
            begin = number * chunk_size
            yield file.sha256, number, begin, min(chunk_size, file.size - begin)
