"""A model that runs while its weights arrive.

Each tensor waits for its own bytes, and nothing else. A module that is called first waits for what
it holds itself, by a hook; and whoever uses a tensor otherwise (a parent that multiplies by its
child's weight) is made to wait too: until its bytes are there, a tensor's class is one that looks
at every use of it. Both cost nothing once all is there: hooks are removed, classes put back.

The bytes are verified when all have come. Until then no output leaves the model: the hook behind
its forward waits for the verdict, and raises if a byte was wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, WarmcastError

_LATE = 1.0
"""Seconds after the load's deadline at which one who waits for it gives up on hearing."""


class Gate:
    """Which of a load's tensors are there. Opened by those who stream, waited at by the model.

    ``sizes`` are the tensors' lengths in bytes; ``arrived`` counts those of tensors that are there.
    """

    def __init__(self, sizes: Sequence[int], deadline: Deadline) -> None:
        self.arrived = 0
        self._sizes = sizes
        self._deadline = deadline
        self._there = [False] * len(sizes)
        self._changed = threading.Condition()
        self._over = False
        self._error: WarmcastError | None = None

    @property
    def over(self) -> bool:
        """Whether the load is over."""
        return self._over

    def arrive(self, number: int) -> None:
        """The bytes of a tensor are there."""
        with self._changed:
            self._there[number] = True
            self.arrived += self._sizes[number]
            self._changed.notify_all()

    def fail(self, error: WarmcastError) -> None:
        """The load has failed: who comes from now on is told; who waits is by :meth:`close`."""
        self._error = error

    def close(self) -> None:
        """The load is over: all was verified, or it failed and has been cleared away."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait(self, numbers: Iterable[int]) -> None:
        """Return when these tensors are there; raises what ended the load before."""
        for number in numbers:
            if self._error is not None or not self._there[number]:
                self._wait(partial(self._there.__getitem__, number))

    def wait_for_verdict(self) -> None:
        """Return when everything is there and verified; raises what ended the load before."""
        self._wait(lambda: self._over)

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            left = self._deadline.remaining() + _LATE
            came = self._changed.wait_for(lambda: self._over or done(), min(left, 1e9))
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error
        if not came:
            raise DeadlineExceeded("no time left while waiting for weights to arrive")


class _Waiting:
    """What a tensor's class is mixed with until its bytes are there."""

    _warmcast_wait: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _described():
            for each in _flat((args, kwargs)):
                if isinstance(each, _Waiting):
                    each._warmcast_wait()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _flat(values: Any) -> Iterable[Any]:
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from _flat(value)
    elif isinstance(values, dict):
        yield from _flat(tuple(values.values()))
    else:
        yield values


@cache
def _described() -> frozenset[Any]:
    """What can be asked of a tensor without its bytes."""
    names = ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_meta", "requires_grad")
    getters = [getattr(Tensor, name).__get__ for name in names]
    methods = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.element_size)
    return frozenset([*getters, *methods, Tensor.is_floating_point, Tensor.is_contiguous])


@cache
def _waiting(kind: type) -> type:
    return type(f"Waiting{kind.__name__}", (_Waiting, kind), {})


class Guard:
    """Makes a model wait for its weights, each for its own, until it is lifted.

    ``places`` are the modules that hold tensors, the names there, and the tensors' numbers at the
    gate. ``order`` collects the numbers in the order in which the model first came to them;
    ``through`` tells that it came to its end.
    """

    def __init__(
        self,
        model: nn.Module,
        roots: Sequence[nn.Module],
        places: Iterable[tuple[nn.Module, Tensor, int]],
        gate: Gate,
    ) -> None:
        self.order: list[int] = []
        self.through = False
        self._gate = gate
        self._tensors: list[tuple[Tensor, type]] = []
        self._hooks: list[Any] = []
        self._came: set[int] = set()
        own: dict[nn.Module, list[int]] = {}
        for module, tensor, number in places:
            own.setdefault(module, []).append(number)
            self._make_wait(tensor, number)
        for module, numbers in own.items():
            self._hooks.append(module.register_forward_pre_hook(self._before(tuple(numbers))))
        # An output that leaves the model, or a part of it that alone was loaded.
        for root in (model, *roots):
            self._hooks.append(root.register_forward_hook(self._behind))

    def lift(self) -> None:
        """Take the hooks away, and give the tensors their classes back."""
        for hook in self._hooks:
            hook.remove()
        for tensor, kind in self._tensors:
            tensor.__class__ = kind
            tensor.__dict__.pop("_warmcast_wait", None)
        self._hooks.clear()
        self._tensors.clear()

    def _make_wait(self, tensor: Tensor, number: int) -> None:
        if isinstance(tensor, _Waiting):  # tied: known from another place
            return

        def wait() -> None:
            self._come((number,))
            self._gate.wait((number,))

        kind = type(tensor)
        tensor.__dict__["_warmcast_wait"] = wait
        tensor.__class__ = _waiting(kind)
        self._tensors.append((tensor, kind))

    def _before(self, numbers: tuple[int, ...]) -> Callable[[nn.Module, Any], None]:
        def wait(_module: nn.Module, _inputs: Any) -> None:
            self._come(numbers)
            self._gate.wait(numbers)

        return wait

    def _behind(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.through = True
        self._gate.wait_for_verdict()

    def _come(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number not in self._came:
                self._came.add(number)
                self.order.append(number)
