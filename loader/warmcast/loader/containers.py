"""Containers: a model's tensors, found where they sit, laid out in an arena, put in their place.

A container is one tensor of a model's state (a parameter or a persistent buffer), with every name
and place that it has there. The loader never writes into a model that it has not finished: it
allocates *targets* beside the model, fills and checks them, and only then installs them, all at
once. A load that fails leaves the model as it was.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from warmcast.loader.dtypes import torch_name
from warmcast.manifests.errors import UsageError
from warmcast.manifests.identity import state_key

ALIGNMENT = 256
"""Bytes to which a tensor's place in an arena is aligned; what CUDA's own allocator keeps to."""

SEGMENT = 4 << 30
"""Bytes of an arena's segment, unless one tensor needs more."""


@dataclass(frozen=True, slots=True)
class Site:
    """One place in a module where a tensor is registered."""

    module: nn.Module
    name: str
    buffer: bool

    def get(self) -> Tensor | None:
        """The tensor that stands there now."""
        return (self.module._buffers if self.buffer else self.module._parameters).get(self.name)

    def put(self, tensor: Tensor | None) -> None:
        """Register a tensor there, past ``__setattr__`` and its hooks."""
        if self.buffer:
            self.module._buffers[self.name] = tensor
        else:
            self.module._parameters[self.name] = cast("nn.Parameter | None", tensor)


@dataclass(frozen=True, slots=True)
class Container:
    """One tensor of a model's state: all its names, sorted, and all its places."""

    names: tuple[str, ...]
    sites: tuple[Site, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        """The first of its names, the same on every worker."""
        return self.names[0]

    @property
    def span(self) -> int:
        """Bytes from its first element to its last, as its strides lay them."""
        tensor = self.tensor
        if tensor.numel() == 0:
            return 0
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return (last + 1) * tensor.element_size()


@dataclass(frozen=True)
class State:
    """A model's containers, and the buffers that it computes and does not save."""

    containers: tuple[Container, ...]
    computed: tuple[Container, ...]

    @cached_property
    def key(self) -> str:
        """The state key: every name with its dtype, shape and strides."""
        return state_key(
            (name, torch_name(c.tensor.dtype), tuple(c.tensor.shape), tuple(c.tensor.stride()))
            for c in self.containers
            for name in c.names
        )


def collect(model: nn.Module, modules: Sequence[str] = ()) -> State:
    """Find the containers of a model, or of the submodules named (``("encoder",)``).

    Names are the state dict's, counted from ``model`` in both cases. Raises :class:`UsageError`
    if the model has no such submodule, or a submodule is inside another that is named too.
    """
    roots = _roots(model, modules)
    saved: _Found = {}
    computed: _Found = {}
    for prefix, root in roots:
        for path, module in _modules(prefix, root):
            for name, tensor, buffer in _own(module):
                full = f"{path}.{name}" if path else name
                unsaved = buffer and name in module._non_persistent_buffers_set
                found = computed if unsaved else saved
                names, sites, _ = found.setdefault(_memory(tensor), ([], [], tensor))
                names.append(full)
                sites.append(Site(module, name, buffer))
    return State(_containers(saved), _containers(computed))


def _modules(path: str, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``named_modules`` has them, the same module twice too, at a third of its cost."""
    left = [(path, root)]
    while left:
        path, module = left.pop()
        yield path, module
        begin = f"{path}." if path else ""
        inner = [(begin + n, m) for n, m in module._modules.items() if m is not None]
        left.extend(reversed(inner))


_Found = dict[tuple[object, ...], tuple[list[str], list[Site], Tensor]]


def _containers(found: _Found) -> tuple[Container, ...]:
    return tuple(Container(tuple(sorted(n)), tuple(s), t) for n, s, t in found.values())


def _roots(model: nn.Module, modules: Sequence[str]) -> list[tuple[str, nn.Module]]:
    if not modules:
        return [("", model)]
    roots = []
    for name in modules:
        try:
            roots.append((name, model.get_submodule(name)))
        except AttributeError:
            known = ", ".join(n for n, _ in model.named_children()) or "none"
            raise UsageError(
                "modules", expected=f"a submodule ({known}, or one inside)", found=repr(name)
            ) from None
        if any(name != other and f"{name}.".startswith(f"{other}.") for other in modules):
            raise UsageError("modules", expected="modules apart", found=f"{name!r} inside another")
    return roots


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter, False
    for name, tensor in module._buffers.items():
        if tensor is not None:
            yield name, tensor, True


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """What two names of one tensor have in common. Empty tensors have no memory to share."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


@dataclass(frozen=True, slots=True)
class Arena:
    """A few large buffers that tensors are views of, and each tensor's place: (segment, offset).

    Equal containers in equal order give an equal layout, so a state crosses to a peer as a handful
    of large copies however small its tensors are.
    """

    segments: tuple[Tensor, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def allocate(cls, nbytes: Sequence[int], device: torch.device) -> Arena:
        """Allocate room on ``device`` for tensors of these lengths in bytes."""
        sizes, places = lay_out(nbytes)
        segments = tuple(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
        if device.type == "cpu":
            for segment in segments:
                _ask_for_huge_pages(segment)
        return cls(segments, tuple(places))

    def view(
        self, index: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
    ) -> Tensor:
        """The tensor at a place, as the given type, shape and strides (in elements)."""
        segment, offset = self.places[index]
        whole = self.segments[segment]
        # Not a view in autograd's sense, whose base would keep the memory when it is given up.
        tensor = torch.empty(0, dtype=dtype, device=whole.device)
        # The offset is aligned to more than any element.
        start = offset // dtype.itemsize
        return tensor.set_(whole.untyped_storage(), start, tuple(shape), tuple(stride))


_HUGE_PAGE = 2 << 20


def _ask_for_huge_pages(memory: Tensor) -> None:
    """Have the kernel map memory by pages of 2 MiB, where it likes to.

    Filling new memory costs twice the time that reading a cached file does, nearly all of it in
    faults of 4 KiB.
    """
    first = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    length = memory.data_ptr() + memory.numel() - first
    if length >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        madvise(first, length // _HUGE_PAGE * _HUGE_PAGE, mmap.MADV_HUGEPAGE)  # a wish: no errors


def lay_out(nbytes: Iterable[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The lengths in bytes of an arena's segments, and each tensor's (segment, offset) in them."""
    sizes: list[int] = [0]
    places = []
    for length in nbytes:
        room = -(-length // ALIGNMENT) * ALIGNMENT
        if sizes[-1] and sizes[-1] + room > SEGMENT:
            sizes.append(0)
        places.append((len(sizes) - 1, sizes[-1]))
        sizes[-1] += room
    return sizes, places


def flat_bytes(tensor: Tensor) -> Tensor:
    """A dense tensor's memory as a 1-D uint8 view, in the order in which it lies.

    Raises :class:`UsageError` for a tensor with holes or repeats between its elements.
    """
    strides = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    expected = 1
    for stride, length in strides:
        if stride != expected and tensor.numel():
            raise UsageError(
                "container", expected="dense memory", found=f"strides {tensor.stride()}"
            )
        expected *= length
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)


def host_view(data: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU, which the view keeps alive; no NumPy."""
    buffer = (ctypes.c_char * data.numel()).from_address(data.data_ptr())
    buffer.tensor = data  # type: ignore[attr-defined]  # the view holds the buffer
    return memoryview(buffer).cast("B")


def install(targets: Iterable[tuple[Container, Tensor]]) -> None:
    """Put tensors into the model, at every place of their containers."""
    for container, tensor in targets:
        parameter: nn.Parameter | None = None
        for site in container.sites:
            if site.buffer:
                site.put(tensor)
                continue
            if parameter is None:
                old = site.get()
                parameter = parameter_like(container.tensor if old is None else old, tensor)
            site.put(parameter)


def restorer(model: nn.Module) -> Callable[[], None]:
    """The undoing of whatever is registered or taken out anywhere in a model from now on.

    It restores parameters, buffers and submodules as objects, and what memory they are over; not
    what is written into that memory, nor other attributes.
    """
    registries = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    before = [
        (registered, registered.copy())
        for module in model.modules()
        for registered in (getattr(module, name) for name in registries)
    ]
    data = [(t, t.data) for t in (*model.parameters(), *model.buffers())]

    def restore() -> None:
        for registered, content in before:
            registered.clear()
            registered.update(content)
        for tensor, memory in data:
            if _memory(tensor) != _memory(memory):
                tensor.data = memory

    return restore


def on_device(
    containers: Iterable[Container], device: torch.device
) -> list[tuple[Container, Tensor]]:
    """What is not loaded but has to follow the model to its device, as :func:`install` takes it."""
    return [
        (container, container.tensor.detach().to(device))
        for container in containers
        if container.tensor.device != device
    ]


Marks = frozenset[tuple[str, int, int]]
"""Each container's name, address and version, which every write in place raises."""


def marks(state: State) -> Marks:
    """What tells whether a model's containers are still the same memory, unwritten."""
    return frozenset(
        (
            container.name,
            container.tensor.data_ptr(),
            0 if container.tensor.is_inference() else container.tensor._version,
        )
        for container in state.containers
    )


def parameter_like(old: Tensor, tensor: Tensor) -> nn.Parameter:
    """A parameter over ``tensor`` with the old one's class, flags and attributes.

    Engines hang what they need on parameters (weight loaders, quantisation tags).
    """
    new = nn.Parameter(tensor, requires_grad=old.requires_grad)
    if isinstance(old, nn.Parameter) and type(old) is not nn.Parameter:
        new.__class__ = type(old)
    new.__dict__.update(old.__dict__)
    return new
