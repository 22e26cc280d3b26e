"""What the tests of loading share: deployments in a folder, loaders that are closed, groups."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import HashStore

from tests.loader.host_gpu import HostGpu, linked
from warmcast.flows.run import deploy
from warmcast.loader import Loader, pump
from warmcast.loader.pump import Link
from warmcast.loader.quorum import GlooGroup, Group
from warmcast.manifests import Manifest
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.identity import Mesh

TIME = 30.0
"""Seconds that a load in a test may take."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """A deployment: the origin's URL, the ref, the manifest and the folder it came from."""

    url: str
    ref: str
    manifest: Manifest
    source: Path

    @property
    def folder(self) -> Path:
        """The origin's folder."""
        return Path(self.url.removeprefix("file://"))

    @property
    def blob(self) -> Path:
        """The blob of the (one) file of weights."""
        sha256 = self.manifest.file[self.manifest.tensors[0].file].sha256
        return self.folder / "blobs" / "sha256" / sha256[:2] / sha256


Publish = Callable[..., Deployed]


@pytest.fixture
def publish(tmp_path: Path, file_url: str) -> Publish:
    """Deploys a state dict into a folder, under a model key that no other test has."""

    def run(
        state: Mapping[str, Tensor],
        *,
        ref: str = "model@test",
        meshes: Sequence[Mesh] = (),
        pickle: bool = False,
    ) -> Deployed:
        source = tmp_path / f"source-{uuid4().hex}"
        source.mkdir()
        (source / "config.json").write_text(json.dumps({"test": uuid4().hex}))
        if pickle:
            torch.save(dict(state), source / "pytorch_model.bin")
        else:
            seen: dict[int, str] = {}  # as transformers saves: a tied tensor under its first name
            kept = {
                name: tensor.detach().contiguous()
                for name, tensor in state.items()
                if seen.setdefault(tensor.data_ptr() or id(tensor), name) == name
            }
            save_file(kept, source / "model.safetensors")
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        result = deploy(source, file_url, ref, meshes=meshes, work=work)
        return Deployed(file_url, ref, result.manifest, source)

    return run


MakeLoader = Callable[..., Loader]


@pytest.fixture
def loader(file_url: str, valkey_url: str) -> Iterator[MakeLoader]:
    """Makes loaders of the test's origin and the registry, and closes them in the end."""
    made: list[Loader] = []
    lock = threading.Lock()

    def make(registry: str | None = valkey_url, **options: Any) -> Loader:
        with lock:
            made.append(Loader(file_url, registry, **({"deadline": TIME} | options)))
            return made[-1]

    yield make
    if made:
        with ThreadPoolExecutor(len(made)) as pool:  # each waits for its threads
            list(pool.map(Loader.close, made))


Ranks = Callable[..., list[Any]]


@pytest.fixture
def ranks() -> Ranks:
    """Runs ``work(rank, group)`` for every rank of a group, each in a thread of this process.

    Returns each rank's result, or the error that it ended with.
    """

    def run(size: int, work: Callable[[int, Group], Any]) -> list[Any]:
        store = HashStore()
        met = threading.Barrier(size)

        def one(rank: int) -> Any:
            group = GlooGroup(store, rank, size, Deadline.after(TIME))
            met.wait(TIME)  # one that leaves while others still connect to it is lost to them
            try:
                return work(rank, group)
            except Exception as cause:  # noqa: BLE001 - it is the result
                return cause

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size)))

    return run


class Worker:
    """A process of ``tests.loader.worker``: what it tells, and its leash."""

    def __init__(self, options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.loader.worker", json.dumps(options)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def told(self) -> dict[str, Any]:
        """The next line; fails the test if the process ended without one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker ended with {self.process.wait()}"
        value: dict[str, Any] = json.loads(line)
        return value

    def end(self) -> int:
        """Let go of the leash; the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(30)


StartWorker = Callable[..., Worker]


@pytest.fixture
def worker(file_url: str, valkey_url: str) -> Iterator[StartWorker]:
    """Starts worker processes, and ends them."""
    started: list[Worker] = []

    def start(model: str, ref: str, env: Mapping[str, str] | None = None, **more: Any) -> Worker:
        settings = {
            "WARMCAST_ORIGIN": file_url,
            "WARMCAST_REGISTRY": valkey_url,
            "WARMCAST_DEADLINE": str(TIME),
            **(env or {}),
        }
        started.append(Worker({"model": model, "ref": ref, **more}, settings))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        for pipe in (each.process.stdin, each.process.stdout):
            if pipe is not None:
                pipe.close()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def library() -> Any:
    """The C library; only where there is no compiler a test may do without."""
    found = pump.library()
    if found is None and shutil.which(sysconfig.get_config_var("CC") or "cc") is None:
        pytest.skip("no C compiler")
    assert found is not None, "not built, or for another version: run python infra/native.py"
    return found


@pytest.fixture(scope="module")
def time_enough() -> Iterator[None]:
    """A call ends with its pieces, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pump, "_SLICE", 600 * 10**9)
        yield


@pytest.fixture
def gpu() -> HostGpu:
    """One that is made of host memory."""
    return HostGpu()


@pytest.fixture
def link(library: Any, gpu: HostGpu) -> Iterator[Link]:
    """A link to that GPU, by C."""
    with linked(gpu) as made:
        yield made
