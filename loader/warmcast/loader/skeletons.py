"""Skeletons: models that are built without their weights.

Inside :func:`skeleton` a parameter made of uninitialised memory (``torch.empty``, filled or not by
random numbers) goes to the meta device as it is registered: nothing is allocated, nothing is read.
What a module *fills itself* is not wiped: a parameter built from existing data stays as it is, and
one that real data is copied into (``load_state_dict`` in a constructor) is real again when the
context ends. Buffers are never touched: those that are computed at construction (rotary tables,
position ids) are in no checkpoint.

The rule exists because of an incident: a loader that emptied every parameter of a pipeline also
wiped the decoder that had loaded itself in its constructor, and the model went on to produce
plausible grey.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from warmcast.loader.collector import quiet
from warmcast.loader.containers import parameter_like

_FILLED = "_warmcast_filled"
_patching = threading.Lock()

# In-place ops that leave uninitialised memory as good as uninitialised: random numbers are no
# weights. Everything else that writes makes content.
_RANDOM = frozenset(
    ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_")
)


def filled_itself(tensor: Tensor) -> bool:
    """Whether a parameter was filled with real data by its module, inside :func:`skeleton`."""
    return bool(getattr(tensor, _FILLED, False))


@contextmanager
def skeleton() -> Iterator[None]:
    """Build modules whose unfilled parameters are on the meta device.

    Applies to modules built by this thread while the context is open; one context at a time in a
    process, because ``nn.Module.register_parameter`` is replaced meanwhile.
    """
    with quiet(), _patching:
        builder = _Builder()
        original = nn.Module.register_parameter

        def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
            original(self, name, param)
            if threading.get_ident() == builder.thread:
                builder.registered(self, name)

        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        try:
            with builder, warnings.catch_warnings():
                # Torch warns that copying into a meta parameter is lost; here it is not.
                warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
                yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]
        builder.restore()


class _Filling:
    """A meta parameter, where it is registered, and the real data copied into it so far."""

    __slots__ = ("copied", "parameter", "real", "sites")

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.sites: list[tuple[nn.Module, str]] = []
        self.real: Tensor | None = None
        self.copied = 0


class _Builder(TorchDispatchMode):
    """Watches what is written where, so that uninitialised memory can be told from data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.thread = threading.get_ident()
        # Storages that hold nothing worth keeping. They are held, untouched and therefore without
        # pages, because the address of one that was freed could come back holding data.
        self._blank: dict[int, torch.UntypedStorage] = {}
        self._meta: dict[int, _Filling] = {}  # by the meta parameter's storage
        self._moved: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the real one's filling

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would import its compiler, a second and more at boot, only to tell it to look away.
        return False

    def registered(self, module: nn.Module, name: str) -> None:
        """Send a parameter that was just registered to meta, unless it holds data."""
        parameter = module._parameters[name]
        if parameter is None:
            return
        if parameter.is_meta:
            filling = self._meta.get(_storage(parameter))
        elif parameter in self._moved:  # one parameter, registered at a second place
            filling = self._moved[parameter]
        elif _storage(parameter) in self._blank:
            filling = self._to_meta(parameter)
        else:
            filling = None
        if filling is not None:
            module._parameters[name] = filling.parameter
            filling.sites.append((module, name))

    def _to_meta(self, parameter: nn.Parameter) -> _Filling:
        meta = parameter_like(
            parameter,
            torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
            ),
        )
        filling = _Filling(meta)
        self._meta[_storage(meta)] = filling
        self._moved[parameter] = filling
        del self._blank[_storage(parameter)]
        return filling

    def restore(self) -> None:
        """Put real parameters where modules copied real data over all of a meta one."""
        for filling in self._meta.values():
            if filling.real is None or filling.copied < filling.parameter.numel():
                continue
            real = parameter_like(filling.parameter, filling.real)
            setattr(real, _FILLED, True)
            for module, name in filling.sites:
                if module._parameters.get(name) is filling.parameter:
                    module._parameters[name] = real

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for output, declared in zip(outputs, func._schema.returns, strict=False):
            if not isinstance(output, Tensor) or output.is_meta:
                continue
            alias = declared.alias_info
            if alias is not None and not alias.is_write:
                continue  # a view says nothing about what the memory holds
            if alias is None and name in ("empty", "empty_like", "empty_strided", "new_empty"):
                self._blank[_storage(output)] = output.untyped_storage()
            elif not (alias is not None and name in _RANDOM):
                self._blank.pop(_storage(output), None)
        return result

    def _copied(self, target: Tensor, source: Tensor) -> None:
        filling = self._meta.get(_storage(target)) if target.is_meta else None
        if filling is None or source.is_meta:
            return
        if filling.real is None:
            filling.real = torch.empty_like(filling.parameter, device="cpu", requires_grad=False)
        view = filling.real.as_strided(target.shape, target.stride(), target.storage_offset())
        view.copy_(source)
        filling.copied += target.numel()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
