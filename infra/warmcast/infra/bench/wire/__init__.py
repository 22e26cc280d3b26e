"""``warmcast bench wire``: loads from peers, beside what the wire between the GPUs allows.

For each model and each number of receivers, a sender and that many receivers are started, a GPU
each. The receivers are told to load at one moment, several times over. What is measured:

    load      from the moment to the last receiver's verified weights, discovery included
    transfer  from the first byte to the last receiver's last

The limits are measured before, and the naive ways beside them. While receivers load, the sender
works: its steps during transfers are compared with its steps when nobody asks.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from warmcast.flows.workfolder import WorkFolder
from warmcast.infra.bench import record
from warmcast.infra.bench.wire.models import Shape, deploy, shapes
from warmcast.infra.demo.channel import Child
from warmcast.infra.servers import valkey
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError, WarmcastError
from warmcast.manifests.origin import Origin

_FLAT = 8 << 30
_RECEIVERS = (1, 3, 7)
_LOADS = 5
"""Loads of which the first, with all that a process does once, is told apart from the others."""

_START = 60.0
GB = 1e9


class WrongRoute(WarmcastError):
    """A load went another way than the one that is measured."""


@dataclass(frozen=True, slots=True)
class Case:
    """One figure. ``sender_step_ratio``: the sender's step while it sends, by that while idle."""

    transport: str
    model: str
    receivers: int
    what: str
    bytes: int
    seconds: float
    GBps: float
    ratio_to_limit: float | None
    sender_step_ratio: float | None = None
    seconds_over_limit: float | None = None
    stages: Mapping[str, float] | None = None


@dataclass(slots=True)
class Result:
    """The figures of one run."""

    limits: dict[str, Any]
    cases: list[Case] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """As JSON; fields without a value are left out."""
        cases = [{k: v for k, v in asdict(case).items() if v is not None} for case in self.cases]
        return {"machine": record.machine(), "limits": self.limits, "cases": cases}

    def print(self) -> None:
        """A table for people."""
        limits = ", ".join(f"{name} {value}" for name, value in self.limits.items())
        print(f"The wire: {limits}")
        columns = ("transport", "model", "what", "receivers", "GB", "s", "GB/s", "of limit", "step")
        rows = [
            (
                case.transport,
                case.model,
                case.what,
                str(case.receivers),
                f"{case.bytes / GB:.2f}",
                f"{case.seconds:.4f}",
                f"{case.GBps:.1f}",
                "-" if case.ratio_to_limit is None else f"{case.ratio_to_limit:.3f}",
                "-" if case.sender_step_ratio is None else f"×{case.sender_step_ratio:.2f}",
            )
            for case in self.cases
        ]
        record.print_table(columns, rows, words=3)


def run(
    gigabytes: float | None, transports: Sequence[str], receivers: int | None, deadline: Deadline
) -> Result:
    """Measure on the GPUs that torch sees. ``gigabytes`` is the large model's size at most.

    Raises :class:`UsageError` where there are fewer than two GPUs, and :class:`WrongRoute`.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        raise UsageError("bench wire", expected="two GPUs or more", found=f"{count}")
    memory = torch.cuda.get_device_properties(0).total_memory
    models = shapes(int(gigabytes * GB) if gigabytes else memory // 3)
    most = count - 1 if receivers is None else min(receivers, count - 1)
    numbers = [number for number in _RECEIVERS if number <= most]
    devices = [f"cuda:{index}" for index in range(count)]
    with ExitStack() as stack:
        bench = _Bench(stack, devices, deadline)
        result = Result(bench.limits(models, numbers))
        result.cases += bench.naive(models)
        for transport in transports:
            for shape in models:
                for number in numbers:
                    result.cases += bench.measure(transport, shape, number, result.limits)
    return result


def run_small(transport: str, device: str, number: int, deadline: Deadline) -> Result:
    """The same loads with models of some kilobytes and one device for all workers: a trial."""
    with ExitStack() as stack:
        bench = _Bench(stack, [device] * (number + 1), deadline)
        result = Result({"none": "a trial"})
        for shape in shapes(1, scale=4096):
            result.cases += bench.measure(transport, shape, number, {}, steps=False)
    return result


class _Bench:
    """The processes, the origin and the registry of one run."""

    def __init__(self, stack: ExitStack, devices: Sequence[str], deadline: Deadline) -> None:
        self._folder = stack.enter_context(WorkFolder(_roomy()))
        registry = os.environ.get("WARMCAST_REGISTRY")
        if not registry:
            registry = stack.enter_context(valkey(deadline.within(_START))).url
        self._origin = (self._folder.part() / "origin").as_uri()
        kept = {n: v for n, v in os.environ.items() if not n.startswith("WARMCAST_")}
        self._env = {
            **kept,
            "WARMCAST_ORIGIN": self._origin,
            "WARMCAST_REGISTRY": registry,
            "WARMCAST_DEADLINE": "120",
        }
        self._devices = devices
        self._deadline = deadline
        self._deployed: set[str] = set()
        self._naive: dict[tuple[str, int], dict[str, float]] = {}

    def limits(self, models: Sequence[Shape], numbers: Sequence[int]) -> dict[str, Any]:
        """The peer copy, and the broadcast of one flat buffer to each number of receivers."""
        with self._child("limits", "limits", "copy", str(_FLAT)) as child:
            seconds = child.answer(self._deadline)["seconds"]
        limits = {"peer_copy_GBps": round(_FLAT / seconds / GB, 1)}
        for number in numbers:
            for shape in models:
                self._naive[shape.name, number] = self._broadcasts(shape, number)
            flat = min(self._naive[shape.name, number]["flat"] for shape in models)
            name = "flat_broadcast_GBps" + ("" if number == 1 else f"_to_{number}")
            limits[name] = round(_FLAT / flat / GB, 1)
        return limits

    def naive(self, models: Sequence[Shape]) -> Iterator[Case]:
        """What a broadcast a tensor gives."""
        for shape in models:
            for (name, number), taken in self._naive.items():
                if name != shape.name:
                    continue
                for way in ("torch", "raw"):
                    rate = shape.nbytes / taken[way] / GB
                    flat = _FLAT / taken["flat"] / GB
                    yield Case(
                        f"{way} broadcast a tensor", shape.name, number, "transfer", shape.nbytes,
                        round(taken[way], 6), round(rate, 1), round(rate / flat, 3),
                    )  # fmt: skip

    def measure(
        self,
        transport: str,
        shape: Shape,
        number: int,
        limits: Mapping[str, Any],
        *,
        steps: bool = True,
    ) -> Iterator[Case]:
        """Loads of one model by so many receivers."""
        self._deploy(shape)
        env = {"WARMCAST_TRANSPORTS": transport}
        model = json.dumps(asdict(shape))
        with ExitStack() as stack:
            workers = [
                stack.enter_context(
                    self._child(f"worker-{place}", "worker", model, device, env=env)
                )
                for place, device in enumerate(self._devices[: number + 1])
            ]
            for worker in workers:
                worker.answer(self._deadline)
            sender, receivers = workers[0], workers[1:]
            self._told(sender, "load")
            self._told(sender, "serve")
            rounds = [self._round(receivers, transport) for _ in range(_LOADS)]
            limit = limits.get(_limit_of(transport, number))
            loads = [_seconds(r, "began", "ended") for r in rounds]
            yield _case(transport, shape, number, "first load", loads[0], limit, rounds[0])
            middle = sorted(range(1, _LOADS), key=lambda i: loads[i])[(_LOADS - 1) // 2]
            yield _case(transport, shape, number, "load", loads[middle], limit, rounds[middle])
            moved = statistics.median(_span(_moves(r)) for r in rounds[1:])
            ratios = {}
            if steps and number == 1:
                for kind in ("memory", "compute"):
                    ratios[kind] = self._step_ratio(sender, receivers, transport, kind)
            yield _case(
                transport, shape, number, "transfer", moved, limit, None, ratios.get("memory")
            )
            if "compute" in ratios:
                yield _case(
                    transport, shape, number, "transfer beside compute-bound steps", moved, limit,
                    None, ratios["compute"],
                )  # fmt: skip
            for worker in workers:
                worker.end()

    def _step_ratio(
        self, sender: Child, receivers: Sequence[Child], transport: str, kind: str
    ) -> float:
        """The sender's median step while bytes leave it, by its median step when none do."""
        self._told(sender, kind)
        spans = []
        for _ in range(_LOADS):
            spans += _moves(self._round(receivers, transport))
        steps = self._told(sender, "rest")["steps"]
        during = [
            took
            for ended, took in steps
            if any(begin <= ended - took and ended <= end for begin, end in spans)
        ]
        first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
        idle = [took for ended, took in steps if not first <= ended <= last] or [
            took
            for ended, took in steps
            if not any(begin <= ended and ended - took <= end for begin, end in spans)
        ]
        if not during or not idle:
            raise WarmcastError(
                f"{kind} steps", expected="some during transfers", found=f"{len(during)}"
            )
        return float(statistics.median(during) / statistics.median(idle))

    def _round(self, receivers: Sequence[Child], transport: str) -> list[dict[str, Any]]:
        """All receivers load at one moment; what each tells."""
        for receiver in receivers:
            receiver.tell("load")
        answers = [receiver.answer(self._deadline) for receiver in receivers]
        for answer in answers:
            report = answer["report"]
            if (report["route"], report["transport"]) != ("peer", transport):
                reasons = [s["reason"] for s in report["stages"] if s["outcome"] == "no"]
                raise WrongRoute(
                    "a load",
                    expected=f"from a peer, over {transport}",
                    found=f"{report['route']}, over {report['transport']}: {'; '.join(reasons)}",
                )
        return answers

    def _broadcasts(self, shape: Shape, number: int) -> dict[str, float]:
        store = self._folder.part() / "store"
        model = json.dumps(asdict(shape))
        with ExitStack() as stack:
            ranks = []
            for rank in range(number + 1):
                words = ("broadcast", str(rank), str(number + 1), str(store), str(_FLAT), model)
                child = self._child(f"rank-{rank}", "limits", *words)
                ranks.append(stack.enter_context(child))
            answers: list[dict[str, float]] = [rank.answer(self._deadline) for rank in ranks]
        return answers[0]

    def _deploy(self, shape: Shape) -> None:
        if shape.name not in self._deployed:
            with Origin.open(self._origin) as origin:
                deploy(origin, shape, self._deadline)
            self._deployed.add(shape.name)

    def _told(self, child: Child, word: str) -> dict[str, Any]:
        child.tell(word)
        return child.answer(self._deadline)

    @contextmanager
    def _child(
        self, name: str, module: str, *words: str, env: Mapping[str, str] | None = None
    ) -> Iterator[Child]:
        module = f"warmcast.infra.bench.wire.{module}"
        with Child(name, module, words, {**self._env, **(env or {})}, self._folder.part()) as child:
            yield child


def _case(
    transport: str,
    shape: Shape,
    number: int,
    what: str,
    seconds: float,
    limit: float | None,
    answers: Sequence[Mapping[str, Any]] | None,
    step_ratio: float | None = None,
) -> Case:
    rate = shape.nbytes / seconds / GB
    over = stages = None
    if answers is not None:
        over = round(seconds - shape.nbytes / GB / limit, 4) if limit else None
        last = max(answers, key=lambda a: a["ended"])["report"]["stages"]
        stages = {stage["name"]: round(stage["seconds"], 4) for stage in last}
    return Case(
        transport,
        shape.name,
        number,
        what,
        shape.nbytes,
        round(seconds, 6),
        round(rate, 1),
        round(rate / limit, 3) if limit else None,
        round(step_ratio, 3) if step_ratio is not None else None,
        over,
        stages,
    )


def _limit_of(transport: str, number: int) -> str:
    if transport == "ipc":
        return "peer_copy_GBps"
    return "flat_broadcast_GBps" + ("" if number == 1 else f"_to_{number}")


def _moves(answers: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """When bytes moved to each receiver."""
    stages = [stage for a in answers for stage in a["report"]["stages"]]
    return [tuple(stage["moved"]) for stage in stages if stage["moved"]]


def _span(spans: Sequence[tuple[float, float]]) -> float:
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def _seconds(answers: Sequence[Mapping[str, Any]], began: str, ended: str) -> float:
    return _span([(answer[began], answer[ended]) for answer in answers])


def _roomy() -> Path | None:
    """Memory for the origin, where there is any: no disk is to be measured here."""
    memory = Path("/dev/shm")  # noqa: S108
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else None
