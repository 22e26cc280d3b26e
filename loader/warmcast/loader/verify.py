"""Truth against the bytes on the device: the CRC32C of every byte, and the sampled hash.

Tensors are read row-major. On a CPU their memory is hashed where it lies; on a GPU by kernels that
run there (see :mod:`cuda_checks`). Where those cannot be had, the bytes come through a small ring
of pinned buffers and are hashed on the CPU while the next piece is copied.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import torch
from torch import Tensor

from warmcast.loader import cuda_checks
from warmcast.loader.containers import flat_bytes, host_view
from warmcast.loader.errors import WeightVerificationError
from warmcast.loader.normalise import normalised
from warmcast.loader.plan import Truth
from warmcast.manifests import sampling
from warmcast.manifests.checksum import crc32c_at, to_hex
from warmcast.manifests.deadline import Deadline

_PIECE = 32 << 20
_PORTION = 4 << 20


@dataclass(frozen=True, slots=True)
class Verified:
    """How much was checked: tensors, their bytes, and the layers they make up."""

    tensors: int
    nbytes: int
    layers: int


def verify(
    pairs: Sequence[tuple[Truth, Tensor]],
    deadline: Deadline,
    crc32cs: Mapping[int, int] = MappingProxyType({}),
) -> Verified:
    """Check every tensor against its truth.

    ``crc32cs`` has those that are known of the bytes as they are now, by the pair's number. Raises
    :class:`WeightVerificationError` naming the tensors that differ, and :class:`DeadlineExceeded`.
    """
    rows = ((truth.name, truth.dtype, tensor) for truth, tensor in pairs)
    measured = measure(rows, deadline, crc32cs)
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


def measure(
    rows: Iterable[tuple[str, str, Tensor]],
    deadline: Deadline,
    crc32cs: Mapping[int, int] = MappingProxyType({}),
) -> list[Truth]:
    """The truth of ``(name, safetensors dtype, tensor)`` rows, as their bytes are now.

    The sampled hash of a rank's slice, and of a tensor, is drawn under the stored tensor's name;
    ``name`` is that name. ``crc32cs`` has those that are known, by the row's number.
    """
    listed = [(name, dtype, _row_major(tensor)) for name, dtype, tensor in rows]
    places: dict[int, list[int]] = defaultdict(list)  # by GPU; -1 is the CPU
    for place, (_, _, data) in enumerate(listed):
        places[data.get_device()].append(place)
    truths: dict[int, Truth] = {}
    for mine in places.values():
        together = [listed[place] for place in mine]
        known = [crc32cs.get(place) for place in mine]
        truths.update(zip(mine, _measure(together, known, deadline), strict=True))
    return [truths[place] for place in range(len(listed))]


def crc32cs(data: Sequence[Tensor], deadline: Deadline) -> list[int]:
    """The CRC32C of each of some contiguous tensors of one device."""
    if _fast(data[0]):
        with torch.cuda.device(data[0].device):
            return cuda_checks.crc32cs(data)
    return _through_host(data, deadline) if data[0].is_cuda else _on_cpu(data, deadline)


def sampled_hashes(rows: Sequence[tuple[str, str, Tensor]], deadline: Deadline) -> list[str]:
    """The sampled hash of each ``(name, safetensors dtype, contiguous tensor)`` of one device."""
    if _fast(rows[0][2]):
        with torch.cuda.device(rows[0][2].device):
            sampled = cuda_checks.samples(
                [(name, sampling.element_nbytes(dtype), data) for name, dtype, data in rows]
            )
    else:
        sampled = [_samples(*row, deadline) for row in rows]
    dtypes = [dtype for _, dtype, _ in rows]
    return [
        sampling.hash_normalised(name, dtype, data.nbytes // sampling.element_nbytes(dtype), raw)
        for (name, dtype, data), raw in zip(rows, normalised(dtypes, sampled), strict=True)
    ]


_Rows = Sequence[tuple[str, str, Tensor]]
"""Names, safetensors dtypes, and contiguous tensors of one device."""


def _measure(rows: _Rows, known: Sequence[int | None], deadline: Deadline) -> list[Truth]:
    """``known`` has the CRC32C of each row for which it needs not be computed."""
    deadline.check("verifying")
    first = rows[0][2]
    data = [data for (_, _, data), crc in zip(rows, known, strict=True) if crc is None]
    if not data:
        computed: list[int] = []
        hashes = sampled_hashes(rows, deadline)
    elif _fast(first):
        with torch.cuda.device(first.device):
            # Samples are taken and hashed while the GPU works on the checksums.
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            finish = cuda_checks.start_crc32cs(data)
            with torch.cuda.stream(beside):
                hashes = sampled_hashes(rows, deadline)
            computed = finish()
    else:
        computed = crc32cs(data, deadline)
        hashes = sampled_hashes(rows, deadline)
    rest = iter(computed)
    crcs = (next(rest) if crc is None else crc for crc in known)
    return [
        Truth(name, dtype, piece.nbytes, to_hex(crc), sample)
        for (name, dtype, piece), crc, sample in zip(rows, crcs, hashes, strict=True)
    ]


def _fast(data: Tensor) -> bool:
    return data.is_cuda and cuda_checks.available(data.device)


def _on_cpu(data: Sequence[Tensor], deadline: Deadline) -> list[int]:
    def some(pieces: Sequence[Tensor]) -> list[int]:
        deadline.check("verifying")
        return [crc32c_at(piece.data_ptr(), piece.nbytes) for piece in pieces]

    with ThreadPoolExecutor(_threads(), thread_name_prefix="warmcast-verify") as pool:
        return list(chain.from_iterable(pool.map(some, _portions(data))))


def _portions(data: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Runs of tensors, each worth a thread's while."""
    begin, nbytes = 0, 0
    for end, piece in enumerate(data, 1):
        nbytes += piece.nbytes
        if nbytes >= _PORTION or end == len(data):
            yield data[begin:end]
            begin, nbytes = end, 0


def _through_host(data: Sequence[Tensor], deadline: Deadline) -> list[int]:
    device = data[0].device
    stream = torch.cuda.Stream(device)
    ring = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), ThreadPoolExecutor(1, "warmcast-verify") as pool:
        return [_crc32c_of(flat_bytes(piece), ring, pool.submit, deadline) for piece in data]


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


def _samples(name: str, dtype: str, data: Tensor, deadline: Deadline) -> bytes:
    """A tensor's sampled elements, on any device: no others are fetched."""
    deadline.check("verifying")
    width = sampling.element_nbytes(dtype)
    numel = data.nbytes // width
    index = torch.tensor(sampling.sample_indices(name, numel), dtype=torch.int64)
    chosen = flat_bytes(data).view(numel, width)[index.to(data.device)].cpu()
    return bytes(host_view(chosen.view(-1)))


def _row_major(tensor: Tensor) -> Tensor:
    """A tensor whose memory is its elements in row-major order: itself where that is so already."""
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def _threads() -> int:
    return min(8, os.cpu_count() or 1)
