"""The stage of a fault: an origin on disk, a registry, and workers to kill, stop and ask."""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from tests.loader.faults.worker import HEIGHT, LAYERS, REF, WIDTH, Outcome, Survey, main
from warmcast.infra.servers import Valkey
from warmcast.manifests.checksum import crc32c
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.stores import open_store

WEIGHTS = LAYERS * WIDTH * HEIGHT * 4
"""Bytes of the weights that the workers load."""

LATE = 1.0
"""Seconds after its deadline at which a load that has not ended counts as hanging."""

PROMPT = 15.0
"""Seconds for what takes none, on a machine that does other things too."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.loader.faults.preload", "tests.loader.faults.worker"])
_fresh = multiprocessing.get_context("spawn")


class Worker:
    """A worker process, and the pipes by which it is told what to do."""

    def __init__(
        self,
        origin: str,
        registry: str | None,
        folder: Path,
        env: Mapping[str, str],
        *,
        fresh: bool = False,
    ) -> None:
        context = _fresh if fresh else _context
        self._orders, orders = context.Pipe()
        self._moments, moments = context.Pipe()
        self.folder = folder
        self._process = context.Process(
            target=main,
            args=(orders, moments, origin, registry, str(folder), dict(env)),
            daemon=True,
        )
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items() if fresh else ():
                patch.setenv(name, value)
            self._process.start()
        orders.close()
        moments.close()
        self._answer("start", PROMPT)
        self.name = ""

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    def ask(self, order: str, *arguments: object, within: float = PROMPT) -> Any:
        """Have an order done; the result."""
        self._orders.send((order, arguments))
        return self._answer(order, within)

    def serve(self, max_receivers: int = 4) -> Worker:
        """Load and become a sender."""
        outcome = self.load(PROMPT)
        assert not outcome.error, outcome
        self.name = self.ask("serve", max_receivers)
        return self

    def survey(self) -> Survey:
        """What the process holds now."""
        survey: Survey = self.ask("survey")
        return survey

    def begin(self, deadline: float, ref: str = REF, changed: bool = False) -> None:
        """Begin a load, whose outcome :meth:`end` awaits."""
        self._deadline = deadline
        self._over = time.monotonic() + deadline
        self._orders.send(("load", (deadline, ref, changed)))

    def past_deadline(self) -> None:
        """Return once the deadline of the load that was begun is over."""
        assert not self._orders.poll(max(0.0, self._over - time.monotonic()) + 0.01)

    def end(self) -> Outcome:
        """The outcome of the load, which has to be there by its deadline."""
        outcome: Outcome = self._answer("load", self._deadline + LATE)
        return outcome

    def load(self, deadline: float, ref: str = REF, changed: bool = False) -> Outcome:
        self.begin(deadline, ref, changed)
        return self.end()

    def halt_at(self, moment: str) -> None:
        """Have the process halt when it next comes to a moment."""
        self.ask("halt_at", moment)

    def halted(self, moment: str) -> None:
        """Wait until the process halts at the moment."""
        assert self._moments.poll(PROMPT), f"never came to {moment}"
        assert self._moments.recv() == moment

    def go_on(self) -> None:
        """Let the process go on from where it halts."""
        self._moments.send(None)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join(PROMPT)

    def stop(self) -> None:
        """SIGSTOP; returns when every thread of the process has stopped."""
        self.signal(signal.SIGSTOP)
        for _ in range(100_000):
            if self._stopped():
                return
            os.sched_yield()
        raise AssertionError("does not stop")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end_process(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._process.close()
        self._orders.close()
        self._moments.close()

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return all((t / "stat").read_text().rpartition(")")[2].split()[0] == "T" for t in tasks)

    def _answer(self, order: str, within: float) -> Any:
        assert self._orders.poll(within), f"{order}: no end after {within} s"
        return self._orders.recv()


class Scene:
    """An origin, a registry and workers, all of which end with the test."""

    def __init__(self, origin: Path, weights: str, registry: Valkey, folder: Path) -> None:
        self.origin = origin
        self.weights = weights
        self.registry = registry
        self.client = redis.Redis.from_url(registry.url)
        self._folder = folder
        self._workers: list[Worker] = []

    def worker(
        self,
        registry: str | None = None,
        origin: str | None = None,
        env: Mapping[str, str] | None = None,
        *,
        fresh: bool = False,
    ) -> Worker:
        """A worker that has loaded nothing; ``fresh`` if torch must see ``env`` when imported."""
        folder = self._folder / uuid4().hex
        folder.mkdir()
        worker = Worker(
            origin or self.origin.as_uri(),
            registry or self.registry.url,
            folder,
            env or {},
            fresh=fresh,
        )
        self._workers.append(worker)
        return worker

    def own_origin(self) -> Path:
        """From now on an origin that a test may damage."""
        self.origin = Path(shutil.copytree(self.origin, self._folder / "origin"))
        return self.origin

    def upload(self, url: str, env: Mapping[str, str]) -> None:
        """Copy the origin to another store."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            deadline = Deadline.after(PROMPT)
            store = open_store(url)
            for path in sorted(self.origin.rglob("*")):
                if path.is_file() and not path.relative_to(self.origin).parts[0].startswith("."):
                    data = path.read_bytes()
                    key = str(path.relative_to(self.origin))
                    store.upload(key, io.BytesIO(data), len(data), crc32c(data), deadline)
            store.close()

    def close(self) -> None:
        for worker in self._workers:
            worker.end_process()
        self.client.close()

    # What has to hold afterwards

    def right(self, outcome: Outcome, route: str) -> None:
        """A load has ended by this route, with the weights that were deployed."""
        assert (outcome.error, outcome.route) == ("", route), outcome
        assert outcome.weights == self.weights, outcome.tree

    def wrong(self, outcome: Outcome, *errors: str) -> str:
        """A load has ended with one of these errors, in one line, and left its model alone."""
        assert outcome.error in errors, outcome
        assert outcome.message
        assert "\n" not in outcome.message
        assert outcome.weights == "meta", "the model was touched"
        return outcome.message

    def nothing_left(self, worker: Worker, before: Survey) -> None:
        """A worker that is closed holds what it held before it loaded, and no file of its own."""
        worker.ask("close")
        after = worker.survey()
        assert after.threads == before.threads
        assert after.tasks == before.tasks
        assert after.files == before.files, sorted(set(after.files) ^ set(before.files))
        assert list(worker.folder.iterdir()) == []

    def memory_back(self, worker: Worker, before: Survey) -> None:
        """A worker whose load has failed holds no memory for its weights."""
        assert worker.survey().resident - before.resident < WEIGHTS / 2

    def registry_clean(self, living: Iterable[Worker] = ()) -> None:
        """No lease is held; what there is expires; only the living keep a presence."""
        names = {worker.name for worker in living}
        for key in map(bytes.decode, self.client.scan_iter("*", count=1000)):
            left = self.client.pttl(key)
            assert left == -2 or left >= 0, f"{key} never expires"
            assert not key.endswith(":lease"), key
            if ":sender:" in key and key.rpartition(":")[2] not in names:
                assert left <= 5000, f"{key} is renewed"
