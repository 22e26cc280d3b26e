"""A worker in a process of its own: told what to do over a pipe, halted at exact moments.

A fault is as good as its moment. So this process reports over a second pipe that it has come to a
moment it was told to halt at, and waits there; what then happens to it (SIGKILL, SIGSTOP) or to
the registry is real. Only the waiting is ours: a few functions of the loader are wrapped here, and
nothing else of it is touched.

    sender      asked        a request is out of the mailbox, the answer is not yet given
                answered     the answer is given, the confirmation is awaited
                confirmed    the confirmation is there, the transfer has not begun
                addressed    the receiver can connect, the sender does not yet
                sending      one piece is sent, the next is not
    receiver    found        a sender is known, it is not yet asked
                begun        the confirmation is given, the transfer has not begun
                following    connected to the one before in a chain, nothing has come
                verifying    everything has come, nothing is verified
                agreed       the answer is there, the confirmation is not yet given
                receiving    one piece is received, the next is not
                waiting      about to wait for another's lease
                leased       the lease is taken
                reading      a thread is about to read a chunk from the origin; others go on
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

from warmcast.loader import Loader, filling, handshake
from warmcast.loader.change import Change
from warmcast.loader.registry import Registry, Watch
from warmcast.loader.routes import peer
from warmcast.loader.transports import ipc_giving, ipc_pull, ipc_relay
from warmcast.loader.transports.gloo import Gloo, _RegistryStore
from warmcast.loader.transports.ipc_channel import Address, Channel
from warmcast.loader.transports.ipc_memory import Opened
from warmcast.loader.transports.nccl_communicator import Communicator
from warmcast.manifests.errors import WarmcastError
from warmcast.manifests.stores.file_reader import FileReader

REF = "model@test"
LAYERS, WIDTH, HEIGHT = 3, 2048, 1792  # 14 MiB a layer, 42 MiB in all: three pieces of a transfer


def build() -> nn.Module:
    """The model that all workers of these tests load."""
    return nn.Sequential(*(nn.Linear(WIDTH, HEIGHT) for _ in range(LAYERS)))


def _halve(model: nn.Module) -> None:
    model.half()


HALVED = Change("half", "1", apply=_halve, prepare=_halve)


def fingerprint(model: nn.Module) -> str:
    """The SHA-256 of all weights, or ``meta`` for a skeleton that nothing was done to."""
    tensors = sorted(model.state_dict().items())
    if all(tensor.is_meta for _, tensor in tensors):
        return "meta"
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().numpy())
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a load ended: ``error`` is a class's name, empty if it ended well."""

    weights: str
    route: str = ""
    source: str = ""
    error: str = ""
    message: str = ""
    tree: str = ""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a process holds: Python's threads, all threads, open files, resident bytes, bytes of a
    GPU's memory, and blocks of other processes' GPU memory that are open. ``sockets`` tells of the
    TCP ones among the files where they lead.
    """

    threads: tuple[str, ...]
    tasks: int
    files: tuple[str, ...]
    resident: int
    gpu: int = 0
    opened: int = 0
    sockets: Mapping[str, str] = field(default_factory=dict)


class _Worker:
    def __init__(self, origin: str, registry: str | None, device: str) -> None:
        self._device = device
        self._origin = origin
        self._registry = registry
        self._loader = Loader(origin, registry)
        self._model = build()
        self._sender: Any = None

    def load(self, deadline: float, ref: str = REF, changed: bool = False) -> Outcome:
        with self._loader.skeleton():
            self._model = build()
        try:
            change = HALVED if changed else None
            report = self._loader.load(
                self._model, ref, self._device, deadline=deadline, change=change
            )
        except WarmcastError as cause:
            notes = "\n".join(getattr(cause, "__notes__", ()))
            name = type(cause).__name__
            return Outcome(fingerprint(self._model), error=name, message=str(cause), tree=notes)
        return Outcome(fingerprint(self._model), report.route, report.source, tree=str(report))

    def serve(self, max_receivers: int = 4) -> str:
        self._sender = self._loader.serve(self._model, max_receivers=max_receivers)
        return str(self._sender.name) if self._sender else ""

    def withdraw(self) -> None:
        """Stop serving; :meth:`serve` begins again."""
        self._sender.close()

    def served(self) -> int:
        """Receivers served, once no transfer is under way."""
        for thread in threading.enumerate():
            if thread.name == "warmcast-transfer":
                thread.join()
        return int(self._sender.served)

    def identity(self) -> str:
        return str(self._sender._offer.identity)

    def layout(self) -> str:
        return str(self._sender._offer.layout)

    def weights(self) -> str:
        """Work of the worker's own: something that takes the interpreter and the weights."""
        return fingerprint(self._model)

    def flip(self) -> str:
        """Flip one bit of the weights where they lie; the name of the tensor."""
        name, parameter = list(self._model.named_parameters())[2]
        parameter.data.view(torch.int32)[7, 7] ^= 1 << 20
        return name

    def serve_store(self) -> None:
        """Serve a store once: torch keeps what it then opens, one pipe, for the process."""
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def close(self) -> None:
        """Give everything back, and begin anew."""
        self._loader.close()
        self._sender = None
        self._loader = Loader(self._origin, self._registry)

    def survey(self) -> Survey:
        gc.collect()
        threads = tuple(sorted(t.name for t in threading.enumerate()))
        files = []
        for fd in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # the one that lists them
                files.append(str(fd.readlink()))
        tasks = len(list(Path("/proc/self/task").iterdir()))
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        gpu = 0
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            gpu = torch.cuda.memory_allocated()
        size = resident * os.sysconf("SC_PAGE_SIZE")
        listed = tuple(sorted(files))
        return Survey(threads, tasks, listed, size, gpu, sum(_opened.values()), _sockets())

    def refuse(self) -> None:
        """Have nobody listen where the next connection to a giver goes."""
        real = Channel.connect

        def refused(address: Address, peer: str) -> Channel:
            Channel.connect = real
            return real(Address(name="warmcast-nobody", token=address.token), peer)

        Channel.connect = refused


class _Moments:
    """Halts at the moments that it was told of, once each, until it is told to go on."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._wanted: set[str] = set()

    def halt_at(self, moment: str) -> None:
        self._wanted.add(moment)

    def reach(self, moment: str) -> None:
        if moment in self._wanted:
            self._wanted.discard(moment)
            self._pipe.send(moment)
            self._pipe.recv()

    def before(self, owner: Any, name: str, moment: str, when: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if when(*args):
                self.reach(moment)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    def after(self, owner: Any, name: str, moment: str, when: Callable[[Any], bool]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if when(result):
                self.reach(moment)
            return result

        setattr(owner, name, wrapped)

    def midway(self, owner: Any, name: str, moment: str) -> None:
        """A transport looks for the peer's signs of life before each piece."""
        original = getattr(owner, name)

        def wrapped(transport: Any, transfer: Any, *rest: Any) -> Any:
            count = itertools.count()

            def alive() -> None:
                transfer.alive()
                # Not while the two look for each other, which takes as long as it takes.
                if sys._getframe(1).f_code.co_name == "_run" and next(count) == 1:
                    self.reach(moment)

            return original(transport, replace(transfer, alive=alive), *rest)

        setattr(owner, name, wrapped)


def _sockets() -> dict[str, str]:
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, here, there, state, *rest = line.split()
            ports = [int(address.rpartition(":")[2], 16) for address in (here, there)]
            found[f"socket:[{rest[5]}]"] = f"{table} {ports[0]} to {ports[1]}, state {state}"
    return found


_opened: dict[int, int] = {}  # by address, how often another's block is open there


def _count_opened() -> None:
    """Keep account of what :class:`Opened` opens, apart from its own."""
    for name in ("_open", "_map"):
        _counted(name)
    close = Opened.close

    def closed(opened: Opened) -> None:
        mine = [*opened._handles, *(address for address, _, _ in opened._mapped)]
        close(opened)
        for address in mine:
            if _opened.get(address):  # not one whose opening failed
                _opened[address] -= 1

    Opened.close = closed


def _counted(name: str) -> None:
    original = getattr(Opened, name)

    def counted(*args: Any) -> int:
        address = int(original(*args))
        _opened[address] = _opened.get(address, 0) + 1
        return address

    setattr(Opened, name, counted)


def _on_a_gpu(halts: _Moments, device: str) -> None:
    """Moments of the transports between GPUs, and chunks so short that there are many: of those
    under way at a time all may have come at the first look.
    """
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    ipc_pull.CHUNK = 1 << 20
    _count_opened()
    halts.before(ipc_pull.Pull, "run", "creating", lambda *args: True)
    for module in (ipc_giving, ipc_relay):
        halts.before(module, "give", "creating", lambda *args: True)
    halts.after(ipc_pull.Pull, "_settle", "receiving", lambda moved: moved)
    halts.after(ipc_pull.Pull, "_neighbour", "following", lambda giver: giver is not None)
    halts.after(ipc_giving.Giving, "_next", "sending", lambda message: message.kind == "have")
    halts.before(Communicator, "create", "creating", lambda *args: True)
    for moment in ("receiving", "sending"):  # a process does one of them
        halts.after(Communicator, "broadcast", moment, lambda _: True)


def main(
    orders: Connection,
    moments: Connection,
    origin: str,
    registry: str | None,
    folder: str,
    env: Mapping[str, str],
) -> None:
    """Do what comes over ``orders``, each a method's name and its arguments, until it ends."""
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # else torch's own pool would come and go in what is counted
    tempfile.tempdir = folder
    halts = _Moments(moments)
    halts.after(handshake, "next_ask", "asked", lambda ask: ask is not None)
    halts.before(Registry, "pop", "answered", lambda _, box, *rest: box.endswith(":confirm"))
    halts.after(handshake, "accept", "confirmed", lambda ticket: True)
    halts.after(_RegistryStore, "set", "addressed", lambda _: True)
    halts.midway(Gloo, "sending", "sending")
    halts.before(peer, "ask", "found", lambda *args: True)
    halts.after(peer, "ask", "agreed", lambda agreement: True)
    halts.midway(Gloo, "receiving", "receiving")
    halts.before(Watch, "wait", "waiting", lambda *args: True)
    halts.after(Registry, "acquire", "leased", lambda lease: lease is not None)
    halts.before(FileReader, "read_into", "reading", lambda *args: True)
    halts.after(peer, "confirm", "begun", lambda _: True)
    halts.before(filling, "verify", "verifying", lambda *args: True)
    device = os.environ.get("TEST_DEVICE", "cpu")
    if device != "cpu":
        _on_a_gpu(halts, device)
    worker = _Worker(origin, registry, device)
    orders.send(None)
    with suppress(EOFError):
        while True:
            name, arguments = orders.recv()
            owner = halts if name == "halt_at" else worker
            orders.send(getattr(owner, name)(*arguments))
