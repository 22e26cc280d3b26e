"""Checks on the GPU at its memory's speed: CRC32C by a kernel of our own, samples in one launch.

The kernels (``crc32c.cu``) are compiled by NVRTC when a process first needs them, through
cuda-core, and kept for the process. :func:`available` tells whether that works here; where it does
not, the bytes are checked on the CPU (see :mod:`verify`).
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
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

_ALIGNMENT = 16


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


def crc32cs(data: Sequence[Tensor]) -> list[int]:
    """The CRC32C of each of some 1-D uint8 tensors of one GPU, in two launches.

    Runs on the current stream and waits for it. Tensors whose address is not a multiple of 16
    are copied first.
    """
    device = data[0].device
    kernels = _kernels(device)
    assert kernels is not None  # noqa: S101  (callers ask available() first)
    data = [d if d.data_ptr() % _ALIGNMENT == 0 else d.clone() for d in data]
    address = torch.tensor([d.data_ptr() for d in data])
    nbytes = torch.tensor([d.numel() for d in data])
    counts = (nbytes + _SEGMENT - 1) // _SEGMENT
    buffer = torch.repeat_interleave(torch.arange(len(data)), counts)
    count = len(buffer)
    crcs = torch.zeros(len(data) + 1, dtype=torch.int32, device=device)
    if count == 0:
        return [0] * len(data)
    begin = (torch.arange(count) - (counts.cumsum(0) - counts)[buffer]) * _SEGMENT
    after = nbytes[buffer] - begin
    length = after.clamp(max=_SEGMENT)
    # One copy to the device: the segments' table, then the places' table.
    table = torch.cat(
        [
            torch.stack([address[buffer] + begin, length], 1).flatten(),
            torch.stack([buffer, after, length, (begin == 0).long()], 1).flatten(),
        ]
    ).to(device)
    raw = torch.empty(count, dtype=torch.int32, device=device)
    _launch(
        kernels.segments,
        min(count, kernels.blocks),
        _LANES,
        kernels.shared,
        (table, count, kernels.tables, kernels.lane_powers, raw, crcs[len(data) :]),
    )
    _launch(
        kernels.buffers,
        -(-count * 32 // 256),
        256,
        0,
        (table[2 * count :], count, raw, kernels.squares, crcs),
    )
    return [crc & 0xFFFFFFFF for crc in crcs[: len(data)].tolist()]


def samples(rows: Sequence[tuple[str, int, Tensor]]) -> list[bytes]:
    """The sampled elements of ``(name, width in bytes, 1-D uint8 tensor)``, in one launch."""
    device = rows[0][2].device
    kernels = _kernels(device)
    assert kernels is not None  # noqa: S101
    counts, packed = [], []
    for name, width, data in rows:
        count, indices = _indices(name, data.numel() // width)
        counts.append(count)
        packed.append(indices)
    repeats = torch.tensor(counts)
    widths = torch.repeat_interleave(torch.tensor([width for _, width, _ in rows]), repeats)
    if not len(widths):
        return [b""] * len(rows)
    index = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.int64)
    base = torch.tensor([data.data_ptr() for _, _, data in rows])
    addresses = torch.repeat_interleave(base, repeats) + index * widths
    places = widths.cumsum(0) - widths
    table = torch.cat([addresses, places]).to(device)
    out = torch.empty(int(widths.sum()), dtype=torch.uint8, device=device)
    count = len(widths)
    narrow = widths.to(torch.uint8).to(device)
    _launch(kernels.gather, -(-count // 256), 256, 0, (table, table[count:], count, narrow, out))
    host = out.cpu()
    whole = ctypes.string_at(host.data_ptr(), host.numel())
    found, begin = [], 0
    for count, (_, width, _) in zip(counts, rows, strict=True):
        found.append(whole[begin : begin + count * width])
        begin += count * width
    return found


@lru_cache(maxsize=1 << 16)
def _indices(name: str, numel: int) -> tuple[int, bytes]:
    """How many elements of a tensor are sampled, and their positions as packed 64-bit integers."""
    indices = sampling.sample_indices(name, numel)
    return len(indices), struct.pack(f"<{len(indices)}q", *indices)


def _launch(kernel: Any, blocks: int, threads: int, shared: int, arguments: Sequence[Any]) -> None:
    from cuda.core import LaunchConfig, launch

    values = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    config = LaunchConfig(grid=blocks, block=threads, shmem_size=shared)
    launch(_Stream(torch.cuda.current_stream().cuda_stream), config, kernel, *values)


@dataclass(frozen=True, slots=True)
class _Stream:
    """A torch stream as cuda-core takes it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


@cache
def _kernels(device: torch.device) -> _Kernels | None:
    try:
        return _compile(device)
    except Exception as cause:  # noqa: BLE001  (NVRTC, driver and packaging each have their own)
        log.warning("checks on the GPU are not to be had, the CPU makes them: %s", cause)
        return None


def _compile(device: torch.device) -> _Kernels:
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
            define_macro=[("COPIES", str(copies))],
        )
        names = ("crc32c_segments", "crc32c_buffers", "gather")
        code = Program(source, code_type="c++", options=options).compile("cubin")
        segments, buffers, gather = (code.get_kernel(name) for name in names)
        shared = 4096 * copies
        segments.attributes.max_dynamic_shared_size_bytes = shared
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
