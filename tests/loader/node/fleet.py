"""The stage of a test of nodes: models in an origin, agents as processes, workers of theirs.

Every agent has a folder, a cache and a socket of its own, and ends with its fleet. What there is to
wait for is what agents say: the line ``ready URL``, and their counters.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from tests.loader.models import Bag
from tests.manifests.builders import CREATED_AT, file_entry, safetensors_file, tensor_entries
from tests.manifests.s3_proxy import Proxy
from warmcast.loader import Loader, LoadReport
from warmcast.loader.node.cache import Spec
from warmcast.loader.node.client import NodeClient
from warmcast.loader.routes.node import Arrivals, others_of
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.manifest import FileEntry, Manifest, build_manifest
from warmcast.manifests.origin import Origin, Ref

PROMPT = 30.0
"""Seconds for what takes few, on a machine that does other things too."""

CHUNK = 1 << 16
_TENSOR = 5 * CHUNK + 1000
_KEY = "of this fleet: " + "k" * 40
_POLL = 0.02


# Models


@dataclass(frozen=True)
class Model:
    """A deployment, and the bytes that its tensors have."""

    ref: str
    manifest: Manifest
    tensors: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        return self.manifest.nbytes

    @property
    def chunks(self) -> list[tuple[str, int]]:
        """Every chunk: its blob's SHA-256 and where it begins."""
        return [(f.sha256, n * CHUNK) for f in self.manifest.files for n in range(len(f.chunks))]

    @property
    def file(self) -> FileEntry:
        """The first file."""
        return self.manifest.files[0]

    @property
    def spec(self) -> Spec:
        """The first file's blob."""
        return Spec.of(self.manifest, self.file)

    def skeleton(self) -> Bag:
        with torch.device("meta"):
            return Bag({name: torch.empty(len(data), dtype=torch.uint8)
                        for name, data in self.tensors.items()})  # fmt: skip

    def assert_in(self, bag: Bag) -> None:
        """The bag holds the model's bytes."""
        found = {name: bytes(tensor.numpy()) for name, tensor in bag.state_dict().items()}
        assert found == self.tensors


def publish(url: str, seed: int, *, files: int = 2, tensors: int = 3) -> Model:
    """Deploy a model that is the same for the same seed, in chunks of ``CHUNK`` bytes."""
    chance = random.Random(seed)
    content: dict[str, bytes] = {}
    made, entries = [], []
    ref = Ref(f"model-{seed}", "test")
    deadline = Deadline.after(PROMPT)
    with Origin.open(url) as origin:
        for number in range(files):
            path = f"model-{number}.safetensors"
            mine = {f"w{number}_{n}": chance.randbytes(_TENSOR) for n in range(tensors)}
            data = safetensors_file({n: ("U8", (_TENSOR,), raw) for n, raw in mine.items()})
            file = file_entry(path, data, CHUNK)
            origin.put_blob(
                file.sha256, io.BytesIO(data), file.size, int(file.crc32c, 16), deadline
            )
            content |= mine
            made.append(file)
            entries += tensor_entries(path, data)
        manifest = build_manifest(
            model=ref.model, revision="r", upstream="u", created_at=CREATED_AT, chunk_size=CHUNK,
            files=made, tensors=entries, config={"seed": seed},
        )  # fmt: skip
        origin.put_manifest(manifest, deadline)
        origin.move_ref(ref, manifest.digest, origin.ref(ref, deadline), deadline)
    return Model(str(ref), manifest, content)


# Agents


class Agent:
    """One agent's process. It may be killed, stopped, and started again as it was."""

    def __init__(
        self,
        name: str,
        folder: Path,
        words: Mapping[str, object],
        env: Mapping[str, str],
        by: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.folder = folder
        self.cache = folder / "cache"
        self._by = by
        self.socket = folder / "node.sock"
        self.url = ""
        self._words = {"cache": self.cache, "socket": self.socket, "name": name, **words}
        self._env = env
        folder.mkdir(exist_ok=True)
        self._log: IO[bytes] = (folder / "log").open("ab")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *self._by,
                *(sys.executable, "-P", "-m", "warmcast.manifests", "node"),
                *(
                    str(word)
                    for name, value in self._words.items()
                    for word in (f"--{name}", value)
                ),
            ],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    def restart(self) -> None:
        """Start again one that has ended; returns when it answers."""
        self._close_pipe()
        self.process = self._start()
        self.wait_ready()

    def wait_ready(self) -> None:
        pipe = self.process.stdout
        assert pipe is not None
        assert select.select([pipe], [], [], PROMPT)[0], f"{self.name} does not start"
        word, _, url = pipe.readline().strip().partition(" ")
        assert word == "ready", self.log
        self.url = url

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def client(self) -> NodeClient:
        return NodeClient(self.socket)

    def metrics(self) -> Counter[str]:
        """What it counts, by name and labels as Prometheus is told them."""
        connection = _Local(self.socket)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        told = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return Counter({name: int(float(value)) for name, value in told})

    def tier(self, name: str) -> int:
        """Chunks that it had from a tier."""
        return self.metrics()[f'warmcast_chunks_total{{tier="{name}"}}']

    def wait(self, condition: Callable[[Counter[str]], bool], what: str) -> None:
        """Wait until what it counts meets a condition."""
        eventually(lambda: condition(self.metrics()), f"{self.name}: {what}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PROMPT)

    def end(self) -> int:
        """Ask it to end; its exit status."""
        self.process.terminate()
        return self.process.wait(PROMPT)

    def stop(self) -> None:
        """SIGSTOP; returns when every thread has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        eventually(self._stopped, f"{self.name} stops")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._close_pipe()
        self._log.close()

    def _close_pipe(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return all((t / "stat").read_text().rpartition(")")[2].split()[0] == "T" for t in tasks)


class Fleet:
    """Agents of one origin, one registry and one key."""

    def __init__(
        self, folder: Path, origin: str, registry: str | None, env: Mapping[str, str] | None = None
    ) -> None:
        self.origin = origin
        self.registry = registry
        self.key = folder / "key"
        self.agents: list[Agent] = []
        self.store = Origin.open(origin)
        self._folder = folder
        bare = {n: v for n, v in os.environ.items() if not n.startswith(("AWS_", "WARMCAST_"))}
        self._env = {**bare, **(env or {})}
        folder.mkdir(parents=True, exist_ok=True)
        self.key.write_text(_KEY)

    def start(self, *names: str, by: Sequence[str] = (), **options: object) -> list[Agent]:
        """Start agents; returns when each of the fleet knows all of it."""
        agents = [self.begin(name, by, **options) for name in names]
        for agent in agents:
            agent.wait_ready()
        self.all_know(len([a for a in self.agents if a.process.poll() is None]))
        return agents

    def begin(self, name: str, by: Sequence[str] = (), **options: object) -> Agent:
        """Start an agent, and do not wait for it. Underscores in options stand for dashes.

        ``by`` is the command that runs it.
        """
        words = {"origin": self.origin, "listen": "127.0.0.1:0", "key-file": self.key,
                 "high": "1GiB", "low": "1GiB"}  # fmt: skip
        if self.registry is not None:
            words["registry"] = self.registry
        told = {word.replace("_", "-"): value for word, value in options.items()}
        agent = Agent(name, self._folder / name, {**words, **told}, self._env, by)
        self.agents.append(agent)
        return agent

    def all_know(self, count: int) -> None:
        """Wait until every agent that lives knows of so many nodes."""
        if self.registry is not None:
            for agent in self.agents:
                if agent.process.poll() is None:
                    agent.wait(lambda told: told["warmcast_nodes"] == count, f"knows {count} nodes")

    def total(self, metric: str) -> int:
        """The sum of a counter over the agents that live."""
        return sum(a.metrics()[metric] for a in self.agents if a.process.poll() is None)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.store.close()


class _Local(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("node", timeout=PROMPT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds that nothing announces."""
    deadline = Deadline.after(PROMPT)
    while not condition():
        assert not deadline.expired, f"never: {what}"
        time.sleep(_POLL)


# Workers


def read(
    agent: Agent,
    origin: Origin,
    model: Model,
    seconds: float = PROMPT,
    met: Callable[[], object] = lambda: None,
) -> Counter[str]:
    """Read a model as a worker of the node does, its bytes right; where its chunks came from.

    ``met`` is called when the agent was met, before anything is wanted.
    """
    deadline = Deadline.after(seconds)
    manifest = model.manifest
    paths = {file.path for file in manifest.files}
    others = others_of(agent.client, manifest, deadline)
    met()
    with Arrivals(agent.client, others, origin, manifest, paths, deadline) as blobs:
        for file in manifest.files:
            reader = blobs.open_blob(file.sha256, deadline)
            data = bytearray(file.size)
            try:
                reader.read_into(0, memoryview(data), deadline)
            finally:
                reader.close()
            assert hashlib.sha256(data).hexdigest() == file.sha256
        return Counter(blobs.tiers)


@contextmanager
def loading(url: str, agent: Agent, seconds: float = PROMPT) -> Iterator[Loader]:
    """A worker's loader that asks the agent, and no peers."""
    loader = Loader(url, None, node=agent.socket, deadline=seconds)
    try:
        yield loader
    finally:
        loader.close()


def load(url: str, agent: Agent, model: Model, seconds: float = PROMPT) -> LoadReport:
    """Load a model as a worker of the node does, and look at every byte."""
    bag = model.skeleton()
    with loading(url, agent, seconds) as loader:
        report = loader.load(bag, model.ref)
    assert report.verified
    model.assert_in(bag)
    return report


def told(report: LoadReport, stage: str = "read") -> str:
    """What a report says of its last stage of a name."""
    return [each.reason for each in report.stages if each.name == stage][-1]


# The origin


class Valve(Proxy):
    """Before an object server: notes each part of a blob that is read, and holds reads back."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.reads: list[tuple[str, int, int]] = []  # blob, first byte, bytes
        self._left: float = float("inf")
        self._turn = threading.Condition()
        self._closed = False
        super().__init__(upstream)

    def hold(self, after: int = 0) -> None:
        """Let so many reads through, and no more."""
        with self._turn:
            self._left = after

    def open(self) -> None:
        """Let everything through."""
        with self._turn:
            self._left = float("inf")
            self._turn.notify_all()

    def wait_for(self, count: int) -> None:
        """Wait until so many reads were asked for."""
        with self._turn:
            assert self._turn.wait_for(lambda: len(self.reads) >= count, PROMPT), "nobody reads"

    def close(self) -> None:
        """Cut all connections, and take no more: the origin is away from now on."""
        if not self._closed:
            self._closed = True
            self.open()
            super().close()

    def _forward(self, request: bytes) -> bytes:
        asked = _READ.match(request)
        span = _RANGE.search(request)
        if asked and span:
            first, last = int(span[1]), int(span[2])
            with self._turn:
                self.reads.append((asked[1].decode(), first, last + 1 - first))
                self._turn.notify_all()
                assert self._turn.wait_for(lambda: self._left > 0, PROMPT), "held for too long"
                self._left -= 1
        return super()._forward(request)


_READ = re.compile(rb"GET [^ ]*/blobs/sha256/../([0-9a-f]{64})")
_RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)\r\n", re.IGNORECASE)
