"""A burst for real: agents as processes of this machine, each with a folder as its disk.

The origin is an object server behind a meter, which counts what it answers: headers count, and
whatever is read twice. One burst finds the caches empty, a second one finds them full. ``kill``
agents are killed in the middle of the first; the second is of the nodes that are left.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit
from urllib.request import urlopen

from warmcast.flows.workfolder import WorkFolder
from warmcast.infra.bench import record
from warmcast.infra.bench.deliver.meter import Meter
from warmcast.infra.bench.stream.checkpoint import make
from warmcast.infra.bench.wire.models import Shape
from warmcast.infra.demo.channel import Child
from warmcast.infra.servers import seaweed, valkey
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, UsageError, WarmcastError

_FILES = 4
_START = 60.0
_KILL_AT = 0.4
"""The part of the model that the origin has given when agents are killed."""


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst; seconds until the last replica had the model, bytes as the meter counted them."""

    burst: str
    nodes: int
    killed: int
    replicas: int
    replicas_ok: int
    seconds: float
    model_bytes: int
    origin_bytes: int
    origin_ratio: float
    tiers: Mapping[str, int]
    errors: tuple[str, ...]


@dataclass(slots=True)
class Result:
    """What the bursts cost; ``agent_memory`` is the most that one agent held, in bytes."""

    bursts: list[Burst] = field(default_factory=list)
    agent_memory: int = 0

    def record(self) -> dict[str, Any]:
        """As JSON: the cold burst's figures, and all of them."""
        return {
            "machine": record.machine(),
            **asdict(self.bursts[0]),
            "agent_memory_bytes": self.agent_memory,
            "bursts": [asdict(burst) for burst in self.bursts],
        }

    def print(self) -> None:
        """A table for people."""
        columns = ("burst", "nodes", "killed", "replicas right", "s", "origin, MB", "of the model")
        rows = [
            (
                burst.burst,
                str(burst.nodes),
                str(burst.killed),
                f"{burst.replicas_ok} of {burst.replicas}",
                f"{burst.seconds:.2f}",
                f"{burst.origin_bytes / 1e6:.1f}",
                f"{burst.origin_ratio:.3f}",
            )
            for burst in self.bursts
        ]
        record.print_table(columns, rows, words=1)
        print(f"An agent held {self.agent_memory / (1 << 20):.0f} MiB at most.")
        for burst in self.bursts:
            for error in burst.errors[:3]:
                print(f"{burst.burst}: {error}")


class Agent:
    """An agent's process, its URL for nodes, and its socket for workers."""

    def __init__(self, process: subprocess.Popen[str], url: str, socket: Path) -> None:
        self.process = process
        self.url = url
        self.socket = socket

    def nodes(self) -> int:
        """How many nodes it knows."""
        with urlopen(f"{self.url}/metrics", timeout=5) as answer:  # noqa: S310
            lines: list[str] = answer.read().decode().splitlines()
        told = (line.split() for line in lines)
        return int(next(float(value) for name, value, *_ in told if name == "warmcast_nodes"))

    def memory(self) -> int:
        """Bytes that it held at most; 0 for one that is gone."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        except OSError:
            return 0
        found = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(found[0].split()[1]) * 1024 if found else 0


def run(*, nodes: int, replicas: int, size: int, deadline: Deadline, kill: int = 0) -> Result:
    """Measure a cold burst and a warm one. Raises :class:`WarmcastError` for what does not start.

    ``size`` is the model's, in bytes.
    """
    if not 0 <= kill < nodes:
        raise UsageError("--kill", expected=f"less than {nodes} agents", found=kill)
    shape = Shape("deliver", {"weight": (max(1, size // 2 // _FILES),)}, _FILES)
    result = Result()
    with ExitStack() as stack:
        disk = stack.enter_context(WorkFolder())
        checkpoint = make(disk.part(), shape, deadline)
        registry = stack.enter_context(valkey(deadline.within(_START)))
        server = stack.enter_context(seaweed(deadline.within(_START)))
        origin = f"{server.make_bucket('bench')}/models"
        meter = stack.enter_context(Meter(int(urlsplit(server.url).port or 0)))
        env = {**bare(), **server.env, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{meter.port}"}
        folder = disk.part()
        agents = stack.enter_context(
            running_agents(nodes, folder, origin, registry.url, env, deadline)
        )
        told = {
            "source": checkpoint.origin,
            "files": {path.name: str(path) for path in checkpoint.files},
            "origin": origin,
            "ref": shape.ref,
            "sockets": [str(agent.socket) for agent in agents],
            "replicas": replicas,
            "seconds": deadline.remaining(),
        }
        module = "warmcast.infra.bench.deliver.replicas"
        child = stack.enter_context(
            Child("the replicas", module, [json.dumps(told)], env, disk.part())
        )
        child.answer(deadline)
        for name in ("cold", "warm"):
            before = meter.answered
            # The second burst is of replicas whose agent is there.
            child.tell(f"{0 if name == 'cold' else kill}")
            killed = 0
            if name == "cold" and kill:
                meter.wait_for(before + int(_KILL_AT * shape.nbytes), deadline.remaining())
                for agent in agents[:kill]:
                    agent.process.kill()
                killed = kill
            answer = child.answer(deadline)
            moved = meter.answered - before
            result.bursts.append(
                Burst(
                    name,
                    nodes,
                    killed,
                    replicas,
                    len(answer["seconds"]),
                    round(max(answer["seconds"], default=0.0), 3),
                    shape.nbytes,
                    moved,
                    round(moved / shape.nbytes, 4),
                    answer["tiers"],
                    tuple(answer["errors"]),
                )
            )
        result.agent_memory = max(agent.memory() for agent in agents)
        child.end()
    return result


@contextmanager
def running_agents(
    count: int,
    folder: Path,
    origin: str,
    registry: str | None,
    env: Mapping[str, str],
    deadline: Deadline,
) -> Iterator[list[Agent]]:
    """Agents that all know each other; they end with the context.

    ``folder`` gets the fleet's key, ``key``, and a folder for each: its cache, socket and log.
    """
    (folder / "key").write_text(secrets.token_hex(32), encoding="ascii")
    started: list[tuple[subprocess.Popen[str], Path, BinaryIO]] = []
    try:
        for number in range(count):
            mine = folder / str(number)
            mine.mkdir()
            log: BinaryIO = (mine / "log").open("wb")
            words = {
                "cache": mine / "cache",
                "origin": origin,
                **({"registry": registry} if registry else {}),
                "socket": mine / "node.sock",
                "listen": "127.0.0.1:0",
                "key-file": folder / "key",
                "name": f"node-{number}",
                "high": "1TiB",
                "low": "1TiB",
            }
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "warmcast.manifests", "node"),
                    *(str(word) for name, value in words.items() for word in (f"--{name}", value)),
                ],
                env=env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
            started.append((process, mine, log))
        agents = [_ready(process, mine) for process, mine, _ in started]
        while any(agent.nodes() < count for agent in agents):
            if deadline.expired:
                raise DeadlineExceeded("no time left while the agents find each other")
            time.sleep(0.1)
        yield agents
    finally:
        for process, _, log in started:
            process.kill()
            process.wait()
            log.close()
            if process.stdout is not None:
                process.stdout.close()


def _ready(process: subprocess.Popen[str], folder: Path) -> Agent:
    assert process.stdout is not None  # noqa: S101
    word, _, url = process.stdout.readline().strip().partition(" ")
    if word != "ready":
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()
        raise WarmcastError(
            f"agent {folder.name}", expected="to start", found=lines[-1] if lines else "no word"
        )
    return Agent(process, url, folder / "node.sock")


def bare() -> dict[str, str]:
    """This process's environment without what would lead elsewhere."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("AWS_", "WARMCAST_"))}
    return {**kept, **dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)}
