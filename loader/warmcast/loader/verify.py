"""Truth against the bytes on the device: the CRC32C of every byte, and the sampled hash.

Tensors are read row-major. On a CPU their memory is hashed where it lies; on a GPU by kernels that
run there (see :mod:`cuda_checks`). Where those cannot be had, the bytes come through a small ring
of pinned buffers and are hashed on the CPU while the next piece is copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from warmcast.loader import cuda_checks
from warmcast.loader.containers import flat_bytes, host_view
from warmcast.loader.errors import WeightVerificationError
from warmcast.loader.plan import Truth
from warmcast.manifests import sampling
from warmcast.manifests.checksum import crc32c_at, to_hex
from warmcast.manifests.deadline import Deadline

_PIECE = 32 << 20


@dataclass(frozen=True, slots=True)
class Verified:
    """How much was checked: tensors, their bytes, and the layers they make up."""

    tensors: int
    nbytes: int
    layers: int


def verify(pairs: Sequence[tuple[Truth, Tensor]], deadline: Deadline) -> Verified:
    """Check every tensor against its truth.

    Raises :class:`WeightVerificationError` naming the tensors that differ, and
    :class:`DeadlineExceeded`.
    """
    measured = measure(((truth.name, truth.dtype, tensor) for truth, tensor in pairs), deadline)
    wrong = []
    for (truth, tensor), found in zip(pairs, measured, strict=True):
        if tensor.numel() * tensor.element_size() != truth.nbytes:
            wrong.append(f"{truth.name} has {tensor.numel() * tensor.element_size()} bytes")
        elif found.crc32c != truth.crc32c:
            wrong.append(f"{truth.name} has CRC32C {found.crc32c}, not {truth.crc32c}")
        elif found.sample != truth.sample:
            wrong.append(f"{truth.name} has sampled hash {found.sample}, not {truth.sample}")
    if wrong:
        layers = {sampling.layer_of(line.split(" ", 1)[0]) for line in wrong}
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise WeightVerificationError(
            f"{len(wrong)} of {len(pairs)} tensors in {len(layers)} layers differ from the truth: "
            f"{'; '.join(wrong[:3])}{more}"
        )
    layers = {sampling.layer_of(truth.name) for truth, _ in pairs}
    return Verified(len(pairs), sum(truth.nbytes for truth, _ in pairs), len(layers))


def measure(rows: Iterable[tuple[str, str, Tensor]], deadline: Deadline) -> list[Truth]:
    """The truth of ``(name, safetensors dtype, tensor)`` rows, as their bytes are now.

    The sampled hash of a rank's slice, and of a tensor, is drawn under the stored tensor's name;
    ``name`` is that name.
    """
    listed = [(name, dtype, _row_major(tensor)) for name, dtype, tensor in rows]
    gpu = next((data.device for _, _, data in listed if data.is_cuda), None)
    if gpu is None:
        return _on_cpu(listed, deadline)
    if cuda_checks.available(gpu):
        return _on_gpu(listed, deadline)
    return _through_host(listed, deadline)


_Rows = Sequence[tuple[str, str, Tensor]]
"""Names, safetensors dtypes, and row-major tensors of one device."""


def _on_cpu(rows: _Rows, deadline: Deadline) -> list[Truth]:
    def one(row: tuple[str, str, Tensor]) -> Truth:
        deadline.check("verifying")
        name, dtype, data = row
        return _truth(name, dtype, data, crc32c_at(data.data_ptr(), data.nbytes))

    with ThreadPoolExecutor(_threads(), thread_name_prefix="warmcast-verify") as pool:
        return list(pool.map(one, rows))


def _on_gpu(rows: _Rows, deadline: Deadline) -> list[Truth]:
    deadline.check("verifying")
    device = rows[0][2].device
    widths = [sampling.element_nbytes(dtype) for _, dtype, _ in rows]
    with torch.cuda.device(device):
        ready = torch.cuda.current_stream().record_event()
        finish = cuda_checks.start_crc32cs([data for _, _, data in rows])
        # Samples are taken and hashed while the GPU works on the checksums.
        beside = torch.cuda.Stream(device)
        beside.wait_event(ready)
        with torch.cuda.stream(beside):
            sampled = cuda_checks.samples(
                [(r[0], w, r[2]) for r, w in zip(rows, widths, strict=True)]
            )
        hashes = [
            sampling.sampled_hash(name, dtype, data.nbytes // width, samples)
            for (name, dtype, data), width, samples in zip(rows, widths, sampled, strict=True)
        ]
        return [
            Truth(name, dtype, data.nbytes, to_hex(crc), sample)
            for (name, dtype, data), crc, sample in zip(rows, finish(), hashes, strict=True)
        ]


def _through_host(rows: _Rows, deadline: Deadline) -> list[Truth]:
    device = rows[0][2].device
    stream = torch.cuda.Stream(device)
    ring = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    truths = []
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), ThreadPoolExecutor(1, "warmcast-verify") as pool:
        for name, dtype, data in rows:
            crc = _crc32c_of(flat_bytes(data), ring, pool.submit, deadline)
            truths.append(_truth(name, dtype, data, crc))
    return truths


def _truth(name: str, dtype: str, data: Tensor, crc: int) -> Truth:
    """A truth from row-major elements on any device, of which only the samples are fetched."""
    width = sampling.element_nbytes(dtype)
    numel = data.nbytes // width
    index = torch.tensor(sampling.sample_indices(name, numel), dtype=torch.int64)
    chosen = flat_bytes(data).view(numel, width)[index.to(data.device)].cpu().contiguous()
    samples = bytes(host_view(chosen.view(-1)))
    return Truth(
        name, dtype, data.nbytes, to_hex(crc), sampling.sampled_hash(name, dtype, numel, samples)
    )


def _crc32c_of(
    data: Tensor, ring: Sequence[Tensor], submit: Callable[..., Future[int]], deadline: Deadline
) -> int:
    crc = 0
    pending: Future[int] | None = None
    for number, begin in enumerate(range(0, data.numel(), _PIECE)):
        deadline.check("verifying")
        length = min(_PIECE, data.numel() - begin)
        piece = ring[number % 2][:length]
        piece.copy_(data[begin : begin + length], non_blocking=True)
        torch.cuda.current_stream(data.device).synchronize()
        if pending is not None:
            crc = pending.result()
        pending = submit(crc32c_at, piece.data_ptr(), length, crc)
    return pending.result() if pending is not None else 0


def _row_major(tensor: Tensor) -> Tensor:
    """A tensor whose memory is its elements in row-major order: itself where that is so already."""
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def _threads() -> int:
    return min(8, os.cpu_count() or 1)
