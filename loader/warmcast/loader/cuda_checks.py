"""Checks on the GPU at its memory's speed: CRC32C by a kernel of our own, samples in one launch.

The kernels (``crc32c.cu``) are compiled by NVRTC when a process first needs them, through
cuda-core, and kept for the process. :func:`available` tells whether that works here; where it does
not, the bytes are checked on the CPU (see :mod:`verify`).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise, repeat
from typing import Any

import torch
from torch import Tensor

from warmcast.manifests import sampling
from warmcast.manifests.checksum import multiply, power_of_x

log = logging.getLogger("warmcast")

_LANES = 1024
_ROW = 16 * _LANES
_SEGMENT = 2 << 20
"""Bytes of a segment: enough rows to amortise its end, enough segments to share out evenly."""

_BATCH = 1024
"""Segments a launch, at least: enough for the GPU to be busy while the next are listed."""

_ALIGNMENT = 16
_FIRST = 1 << 63


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The compiled kernels of one GPU, and the constants that they read, on that GPU."""

    segments: Any
    buffers: Any
    gather: Any
    shared: int
    blocks: int
    tables: Tensor
    lane_powers: Tensor
    squares: Tensor


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
    """The CRC32C of each of some 1-D uint8 tensors of one GPU, in few launches.

    Runs on the current stream and waits for it. Tensors whose address is not a multiple of 16
    are copied first.
    """
    device = data[0].device
    kernels = _kernels(device)
    assert kernels is not None  # noqa: S101  (callers ask available() first)
    copies = []  # kept until the kernels have run
    # One place more than results: the counter from which blocks take their next segment.
    crcs = torch.zeros(len(data) + 1, dtype=torch.int32, device=device)
    addresses, to_end, buffers = array("q"), array("q"), array("Q")
    for number, tensor in enumerate(data):
        address, nbytes = tensor.data_ptr(), tensor.numel()
        if address % _ALIGNMENT:
            copies.append(tensor.clone())
            address = copies[-1].data_ptr()
        if not nbytes:
            continue
        buffers.append(_FIRST | number)
        if nbytes <= _SEGMENT:
            addresses.append(address)
            to_end.append(nbytes)
        else:
            addresses.extend(range(address, address + nbytes, _SEGMENT))
            to_end.extend(range(nbytes, 0, -_SEGMENT))
            buffers.extend(repeat(number, len(to_end) - len(buffers)))
        if len(to_end) >= _BATCH:
            # The GPU works on these while the rest is listed.
            _run_segments(kernels, (addresses, to_end, buffers), crcs)
            addresses, to_end, buffers = array("q"), array("q"), array("Q")
    if to_end:
        _run_segments(kernels, (addresses, to_end, buffers), crcs)
    return [crc & 0xFFFFFFFF for crc in crcs[: len(data)].tolist()]


def _run_segments(kernels: _Kernels, columns: Sequence[array[int]], crcs: Tensor) -> None:
    """Add some segments, given by address, bytes to their buffer's end and buffer, to ``crcs``."""
    count = len(columns[0])
    table = torch.frombuffer(
        bytearray(b"".join([column.tobytes() for column in columns])), dtype=torch.int64
    ).to(crcs.device)
    raw = torch.empty(count, dtype=torch.int32, device=crcs.device)
    lengths, owners, counter = table[count:], table[2 * count :], crcs[-1:]
    constants = (kernels.tables, kernels.lane_powers)
    blocks = min(count, kernels.blocks)
    _launch(
        kernels.segments,
        (blocks, _LANES, kernels.shared),
        (table, lengths, count, *constants, raw, counter.zero_()),
    )
    _launch(
        kernels.buffers,
        (-(-count * 32 // 256), 256, 0),
        (lengths, owners, count, raw, kernels.squares, crcs),
    )


def samples(rows: Sequence[tuple[str, int, Tensor]]) -> list[bytes]:
    """The sampled elements of ``(name, width in bytes, 1-D uint8 tensor)``, in one launch."""
    device = rows[0][2].device
    kernels = _kernels(device)
    assert kernels is not None  # noqa: S101
    table, packed, ends = array("q"), [], [0]
    places = 0
    for name, width, data in rows:
        count, indices = _indices(name, data.numel() // width)
        table.extend((data.data_ptr(), width, count, places, ends[-1]))
        packed.append(indices)
        places += count
        ends.append(ends[-1] + count * width)
    if not places:
        return [b""] * len(rows)
    constants = torch.frombuffer(
        bytearray(b"".join([table.tobytes(), *packed])), dtype=torch.int64
    ).to(device)
    out = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    _launch(kernels.gather, (len(rows), 128, 0), (constants, constants[len(table) :], out))
    host = out.cpu()
    whole = ctypes.string_at(host.data_ptr(), host.numel())
    return [whole[begin:end] for begin, end in pairwise(ends)]


@lru_cache(maxsize=1 << 16)
def _indices(name: str, numel: int) -> tuple[int, bytes]:
    """How many elements of a tensor are sampled, and their positions as packed 64-bit integers."""
    indices = sampling.sample_indices(name, numel)
    return len(indices), array("q", indices).tobytes()


def _launch(kernel: Any, shape: tuple[int, int, int], arguments: Sequence[Any]) -> None:
    """Launch on the current stream: blocks, threads a block, bytes of dynamic shared memory."""
    from cuda.core import LaunchConfig, Stream, launch

    values = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    blocks, threads, shared = shape
    config = LaunchConfig(grid=blocks, block=threads, shmem_size=shared)
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    launch(stream, config, kernel, *values)


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
            define_macro=[("COPIES", str(copies)), ("SEGMENT", str(_SEGMENT))],
        )
        names = ("crc32c_segments", "crc32c_buffers", "gather")
        code = Program(source, code_type="c++", options=options).compile("cubin")
        segments, buffers, gather = (code.get_kernel(name) for name in names)
        shared = 4096 * copies
        # More than 48 KiB has to be asked for, and cuda-core (1.2) only reads this attribute.
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuKernelSetAttribute(attribute, shared, segments.handle, device.index)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{shared} bytes of shared memory: {error!r}")
        return _Kernels(
            segments,
            buffers,
            gather,
            shared,
            properties.multi_processor_count,
            _constants(_tables(), device),
            _constants([power_of_x(128 * (_LANES - 1 - lane)) for lane in range(_LANES)], device),
            _constants([power_of_x(1 << i) for i in range(31)], device),
        )


def _tables() -> list[int]:
    """The product with x**(8 * ROW) of every byte of a 32-bit state, lowest byte first."""
    row = power_of_x(8 * _ROW)
    return [multiply(row, byte << shift) for shift in (0, 8, 16, 24) for byte in range(256)]


def _constants(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32).to(device)
