"""Checks on the GPU at its memory's speed: CRC32C by a kernel of our own, samples in one launch.

The kernels (``crc32c.cu``) are compiled by NVRTC when a process first needs them, through
cuda-core, and kept for the process. :func:`available` tells whether that works here; where it does
not, the bytes are checked on the CPU (see :mod:`verify`).
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from warmcast.loader.containers import host_view
from warmcast.manifests import sampling
from warmcast.manifests.checksum import multiply, power_of_x

log = logging.getLogger("warmcast")

_LANES = 1024
_ROW = 16 * _LANES
_SEGMENT = 2 << 20
"""Bytes of a segment: enough rows to amortise its end, enough segments to share out evenly."""

_FIRST_BATCH = 256
"""Tensors of the first batch: soon listed, and enough to keep the GPU busy meanwhile."""


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The compiled kernels of one GPU, and the constants that they read, on that GPU."""

    listing: Any
    segments: Any
    buffers: Any
    gather: Any
    shared: int
    blocks: int
    constants: Tensor


def available(device: torch.device) -> bool:
    """Whether the kernels can be had for a GPU; says why not once, in the log."""
    return _kernels(device) is not None


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Compile the kernels of a GPU beside what the context does: it takes most of a second.

    Nothing happens for other devices.
    """
    if device.type != "cuda":
        yield
        return
    thread = threading.Thread(target=_kernels, args=(device,), name="warmcast-compile")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def crc32cs(data: Sequence[Tensor]) -> list[int]:
    """The CRC32C of each of some contiguous tensors of one GPU."""
    return start_crc32cs(data)()


def start_crc32cs(data: Sequence[Tensor]) -> Callable[[], list[int]]:
    """Let the current stream compute the CRC32C of contiguous tensors; call the result to have it.

    The tensors have to be left alone until then. They may begin at any address.
    """
    device = data[0].device
    kernels = _kernels(device)
    assert kernels is not None  # noqa: S101  (callers ask available() first)
    crcs = torch.empty(len(data), dtype=torch.int32, device=device)
    # The GPU works on the first while the host lists the rest.
    begin, length = 0, _FIRST_BATCH
    while begin < len(data):
        _start_batch(kernels, data[begin : begin + length], crcs[begin:])
        begin += length
        length *= 2
    host = _pinned(4 * len(data))
    host.copy_(crcs.view(torch.uint8), non_blocking=True)
    done = torch.cuda.current_stream(device).record_event()

    def wait() -> list[int]:
        done.synchronize()
        return host_view(host).cast("I").tolist()

    return wait


def _start_batch(kernels: _Kernels, data: Sequence[Tensor], crcs: Tensor) -> None:
    """The three kernels over some tensors; ``crcs`` begins with theirs. See ``crc32c.cu``."""
    count = len(data)
    lengths = array("Q", map(_NBYTES, data))
    # A segment for what is left over, and one more where an address is no multiple of 16.
    capacity = sum(lengths) // _SEGMENT + 2 * count
    given = 2 + 2 * count
    table = _pinned(8 * given)
    words = host_view(table).cast("Q")
    words[0] = words[1] = 0
    words[2 : 2 + count] = array("Q", map(Tensor.data_ptr, data))
    words[2 + count :] = lengths
    batch = torch.empty(8 * (given + 4 * capacity), dtype=torch.uint8, device=crcs.device)
    batch[: 8 * given].copy_(table, non_blocking=True)
    about = (batch.data_ptr(), count, capacity)
    launch = _launcher()
    launch(kernels.listing, (count, 128, 0), *about, crcs.data_ptr())
    launch(
        kernels.segments,
        (min(capacity, kernels.blocks), _LANES, kernels.shared),
        *about,
        kernels.constants.data_ptr(),
    )
    launch(
        kernels.buffers,
        (-(-capacity * 32 // 256), 256, 0),
        *about,
        kernels.constants.data_ptr(),
        crcs.data_ptr(),
    )


def samples(rows: Sequence[tuple[str, int, Tensor]]) -> list[bytes]:
    """The sampled elements of ``(name, width in bytes, contiguous tensor)``, in one launch."""
    device = rows[0][2].device
    kernels = _kernels(device)
    assert kernels is not None  # noqa: S101
    table = array("Q")
    counts: list[int] = []
    draws: list[bytes] = []
    for name, width, data in rows:
        numel = data.nbytes // width
        table.extend((data.data_ptr(), width, numel, len(draws) * sampling.SAMPLES))
        counts.append(min(numel, sampling.SAMPLES) * width)
        if numel > sampling.SAMPLES:
            draws.append(sampling.draws(name))
    stride = max(counts)
    if not stride:
        return [b""] * len(rows)
    packed = b"".join([table.tobytes(), *draws])
    given = _pinned(len(packed))
    host_view(given)[:] = packed
    on_device = given.to(device, non_blocking=True)
    out = torch.empty(len(rows) * stride, dtype=torch.uint8, device=device)
    begin = on_device.data_ptr()
    _launcher()(
        kernels.gather,
        (len(rows), 128, 0),
        begin,
        begin + table.itemsize * len(table),
        out.data_ptr(),
        stride,
    )
    host = _pinned(out.numel())
    host.copy_(out, non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    whole = bytes(host_view(host))
    return [
        whole[begin : begin + nbytes]
        for begin, nbytes in zip(range(0, len(whole), stride), counts, strict=True)
    ]


_NBYTES = attrgetter("nbytes")


def _pinned(nbytes: int) -> Tensor:
    """Pinned memory, from the pool that torch keeps for the process."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _launcher() -> Callable[..., None]:
    """What launches a kernel on the current stream: kernel, shape, arguments of 64 bits.

    A shape is blocks, threads a block and bytes of dynamic shared memory.
    """
    from cuda.core import Stream, launch

    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)

    def start(kernel: Any, shape: tuple[int, int, int], *arguments: int) -> None:
        launch(stream, _config(shape), kernel, *arguments)

    return start


@lru_cache(maxsize=1024)
def _config(shape: tuple[int, int, int]) -> Any:
    from cuda.core import LaunchConfig

    blocks, threads, shared = shape
    return LaunchConfig(grid=blocks, block=threads, shmem_size=shared)


def _kernels(device: torch.device) -> _Kernels | None:
    with _one_at_a_time:
        return _compiled(device)


_one_at_a_time = threading.Lock()


@cache
def _compiled(device: torch.device) -> _Kernels | None:
    try:
        return _compile(device)
    except Exception as cause:  # noqa: BLE001  (NVRTC, driver and packaging each have their own)
        log.warning("checks on the GPU are not to be had, the CPU makes them: %s", cause)
        return None


def _compile(device: torch.device) -> _Kernels:
    from cuda.bindings import driver
    from cuda.core import Device, Program, ProgramOptions

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes torch's context the current one
        gpu = Device(device.index)
        gpu.set_current()
        properties = torch.cuda.get_device_properties(device)
        room = gpu.properties.max_shared_memory_per_block_optin
        copies = next(n for n in (32, 16, 8) if 4096 * n + 1024 <= room)
        source = files("warmcast.loader").joinpath("crc32c.cu").read_text(encoding="utf-8")
        options = ProgramOptions(
            std="c++17",
            arch=f"sm_{properties.major}{properties.minor}",
            define_macro=[
                ("COPIES", str(copies)),
                ("SEGMENT", str(_SEGMENT)),
                ("SAMPLES", str(sampling.SAMPLES)),
            ],
        )
        names = ("crc32c_list", "crc32c_segments", "crc32c_buffers", "gather")
        code = Program(source, code_type="c++", options=options).compile("cubin")
        listing, segments, buffers, gather = (code.get_kernel(name) for name in names)
        shared = 4096 * copies
        # More than 48 KiB has to be asked for, and cuda-core (1.2) only reads this attribute.
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuKernelSetAttribute(attribute, shared, segments.handle, device.index)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{shared} bytes of shared memory: {error!r}")
        constants = torch.tensor(_constants(), dtype=torch.int64).to(torch.int32)
        return _Kernels(
            listing,
            segments,
            buffers,
            gather,
            shared,
            properties.multi_processor_count,
            constants.to(device),
        )


def _constants() -> list[int]:
    """What the kernels read: look-up tables, the lanes' powers of x, x**(2**i)."""
    row, group = power_of_x(8 * _ROW), power_of_x(128)
    # The product with x**(8 * ROW) of every byte of a 32-bit state, lowest byte first.
    tables = [multiply(row, byte << shift) for shift in (0, 8, 16, 24) for byte in range(256)]
    lanes = [power_of_x(0)]
    for _ in range(_LANES - 1):
        lanes.append(multiply(group, lanes[-1]))
    return [*tables, *reversed(lanes), *(power_of_x(1 << i) for i in range(31))]
