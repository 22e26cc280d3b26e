"""Checks on the GPU at its memory's speed: CRC32C by a kernel of our own, samples in one launch.

The kernels (``crc32c.cu``) are compiled by NVRTC when a process first needs them, tried on a few
bytes, and kept for the process. :func:`available` tells whether that works here; where it does not,
the bytes are checked on the CPU (see :mod:`verify`).
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from operator import attrgetter

import torch
from torch import Tensor

from warmcast.loader.containers import host_view
from warmcast.loader.cuda_context import current
from warmcast.loader.cuda_kernels import Kernel, compiled, most_shared
from warmcast.manifests import sampling
from warmcast.manifests.checksum import crc32c, multiply, power_of_x

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

    listing: Kernel
    segments: Kernel
    buffers: Kernel
    gather: Kernel
    shared: int
    blocks: int
    constants: Tensor


def available(device: torch.device) -> bool:
    """Whether the kernels can be had for a GPU; says why not once, in the log."""
    return _kernels(device) is not None


def at_hand(device: torch.device) -> bool:
    """Whether the kernels for a GPU are there already: nobody waits for a compiler."""
    return _compiled.get(device) is not None


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
    return _start(_needed(data[0].device), data)


def _start(kernels: _Kernels, data: Sequence[Tensor]) -> Callable[[], list[int]]:
    device = data[0].device
    crcs = torch.empty(len(data), dtype=torch.int32, device=device)
    batches = list(_batches(len(data)))
    # Of each batch two counters, and two words a tensor; then the results.
    host = _pinned(8 * sum(2 + 2 * (end - begin) for begin, end in batches) + 4 * len(data))
    stream = torch.cuda.current_stream(device)
    used = 0
    for begin, end in batches:
        table = host[used : used + 8 * (2 + 2 * (end - begin))]
        _start_batch(kernels, stream.cuda_stream, data[begin:end], table, crcs[begin:end])
        used += len(table)
    result = host[used:]
    result.copy_(crcs.view(torch.uint8), non_blocking=True)
    done = stream.record_event()

    def wait() -> list[int]:
        done.synchronize()
        return host_view(result).cast("I").tolist()

    return wait


def _batches(count: int) -> Iterator[tuple[int, int]]:
    """Ranges, each twice as long as the one before: the GPU works while the host lists the next."""
    begin, length = 0, _FIRST_BATCH
    while begin < count:
        yield begin, min(begin + length, count)
        begin += length
        length *= 2


def _start_batch(
    kernels: _Kernels,
    stream: int,
    data: Sequence[Tensor],
    table: Tensor,
    crcs: Tensor,
) -> None:
    """The three kernels over some tensors, listed in ``table``; see ``crc32c.cu``."""
    count = len(data)
    lengths = array("Q", map(_NBYTES, data))
    words = host_view(table).cast("Q")
    words[0] = words[1] = 0
    words[2 : 2 + count] = array("Q", map(Tensor.data_ptr, data))
    words[2 + count :] = lengths
    # A segment for what is left over, and one more where an address is no multiple of 16.
    capacity = sum(lengths) // _SEGMENT + 2 * count
    batch = torch.empty(len(table) + 8 * 4 * capacity, dtype=torch.uint8, device=crcs.device)
    batch[: len(table)].copy_(table, non_blocking=True)
    about = (batch.data_ptr(), count, capacity)
    constants, found = kernels.constants.data_ptr(), crcs.data_ptr()
    kernels.listing.launch(count, 128, *about, found, stream=stream)
    blocks, shared = min(capacity, kernels.blocks), kernels.shared
    kernels.segments.launch(blocks, _LANES, *about, constants, shared=shared, stream=stream)
    blocks = -(-capacity * 32 // 256)
    kernels.buffers.launch(blocks, 256, *about, constants, found, stream=stream)


def samples(rows: Sequence[tuple[str, int, Tensor]]) -> list[bytes]:
    """The sampled elements of ``(name, width in bytes, contiguous tensor)``, in one launch."""
    device = rows[0][2].device
    kernels = _needed(device)
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
    stream = torch.cuda.current_stream(device)
    end = begin + table.itemsize * len(table)
    gathered = out.data_ptr()
    kernels.gather.launch(len(rows), 128, begin, end, gathered, stride, stream=stream.cuda_stream)
    host = _pinned(out.numel())
    host.copy_(out, non_blocking=True)
    stream.synchronize()
    whole = bytes(host_view(host))
    return [
        whole[begin : begin + nbytes]
        for begin, nbytes in zip(range(0, len(whole), stride), counts, strict=True)
    ]


_NBYTES = attrgetter("nbytes")


def _pinned(nbytes: int) -> Tensor:
    """Pinned memory, from the pool that torch keeps for the process."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _needed(device: torch.device) -> _Kernels:
    kernels = _kernels(device)
    if kernels is None:
        raise RuntimeError(f"no kernels for {device}: callers ask available() first")
    return kernels


def _kernels(device: torch.device) -> _Kernels | None:
    with _one_at_a_time:
        if device not in _compiled:
            _compiled[device] = _compile_if_possible(device)
        return _compiled[device]


_compiled: dict[torch.device, _Kernels | None] = {}
_one_at_a_time = threading.Lock()


def _compile_if_possible(device: torch.device) -> _Kernels | None:
    try:
        return _compile(device)
    except Exception as cause:  # noqa: BLE001  (NVRTC, driver and packaging each have their own)
        log.warning("checks on the GPU are not to be had, the CPU makes them: %s", cause)
        return None


def _compile(device: torch.device) -> _Kernels:
    with current(device):
        room = most_shared(device)
        copies = next(n for n in (32, 16, 8) if 4096 * n + 1024 <= room)
        source = files("warmcast.loader").joinpath("crc32c.cu").read_text(encoding="utf-8")
        names = ("crc32c_list", "crc32c_segments", "crc32c_buffers", "gather")
        macros = {"COPIES": copies, "SEGMENT": _SEGMENT, "SAMPLES": sampling.SAMPLES}
        listing, segments, buffers, gather = compiled(source, names, device, macros)
        shared = 4096 * copies
        segments.allow_shared(shared)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        constants = torch.tensor(_constants(), dtype=torch.int64).to(torch.int32)
        kernels = _Kernels(
            listing,
            segments,
            buffers,
            gather,
            shared,
            # One is left for the samples, which would have to wait for the others to be free.
            max(1, processors - 1),
            constants.to(device),
        )
        _try(kernels, constants)
        return kernels


def _try(kernels: _Kernels, numbers: Tensor) -> None:
    """Raise unless the kernels find what the CPU finds: no load trusts them untried.

    None of torch's kernels is used, which it would have to load first.
    """
    begin = numbers.view(torch.uint8)
    data = begin.repeat(_SEGMENT // len(begin) + 1)  # of two segments
    there = data.to(kernels.constants.device)
    found = _start(kernels, [there, there[3:-7]])()
    for piece, crc in zip((data, data[3:-7]), found, strict=True):
        expected = crc32c(host_view(piece))
        if crc != expected:
            raise RuntimeError(f"expected CRC32C {expected:08x}, found {crc:08x}")


def _constants() -> list[int]:
    """What the kernels read: look-up tables, the lanes' powers of x, x**(2**i)."""
    group = _products(power_of_x(128))
    lanes = [power_of_x(0)]
    for _ in range(_LANES - 1):
        power = lanes[-1]
        lanes.append(
            group[power & 0xFF]
            ^ group[0x100 + (power >> 8 & 0xFF)]
            ^ group[0x200 + (power >> 16 & 0xFF)]
            ^ group[0x300 + (power >> 24)]
        )
    tables = _products(power_of_x(8 * _ROW))
    return [*tables, *reversed(lanes), *(power_of_x(1 << i) for i in range(31))]


def _products(factor: int) -> list[int]:
    """The products with a factor of every byte of a 32-bit state, lowest byte first."""
    products = []
    for shift in (0, 8, 16, 24):
        row = [0]
        for bit in range(shift, shift + 8):
            product = multiply(factor, 1 << bit)
            row += [product ^ other for other in row]  # sums of what is there
        products += row
    return products
