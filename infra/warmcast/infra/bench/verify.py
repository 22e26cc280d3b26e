"""``warmcast bench verify``: the checks that end every load, beside the speed of the memory.

Two models of random bfloat16 weights lie in one piece of memory: 100 large tensors, and 3,000
small ones in about a sixth of it. Measured with the host's work, as a load meets it: the CRC32C of
every byte, the sampled hashes of 1,000 tensors, and the whole of ``verify()``, which makes both
checks. What is measured must also be right: results are compared, on a sample of the tensors, with
google-crc32c's and with the sampled hash's definition, and a flipped bit has to be found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from torch import Tensor

from warmcast.infra.bench import record
from warmcast.infra.bench.memory import copy_speed, read_speed, seconds
from warmcast.loader import cuda_checks
from warmcast.loader.containers import host_view
from warmcast.loader.errors import WeightVerificationError
from warmcast.loader.plan import Truth
from warmcast.loader.verify import crc32cs, measure, sampled_hashes, verify
from warmcast.manifests.checksum import to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError, WarmcastError
from warmcast.manifests.sampling import sampled_hash_of

GIGABYTES = {"cuda": 16.0, "cpu": 1.6}
"""Of the large model, by kind of device, where memory has room for it."""

LEAST_GIGABYTES = 0.001
"""Small tensors have then some tens of elements."""

_SMALL_SHARE = 0.1625
_LARGE_TENSORS, _SMALL_TENSORS, _SAMPLED_TENSORS = 100, 3000, 1000
_ROOM = 0.7
_PATTERN = 64_000_038  # bytes; no multiple of a tensor's, so that tensors differ
_COMPARED = 20
_DTYPE = "BF16"


class WrongResult(WarmcastError):
    """A check's result is not what google-crc32c, or the hash's definition, says."""


@dataclass(frozen=True, slots=True)
class Case:
    """One check over one model; ``nbytes`` of the tensors checked, seconds with the host's work."""

    check: str
    tensors: int
    nbytes: int
    seconds: float

    @property
    def speed(self) -> float:
        """GB/s."""
        return self.nbytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one run; ``limits`` are in GB/s."""

    machine: Mapping[str, Any]
    limits: Mapping[str, Any]
    compile_seconds: float | None
    cases: Sequence[Case]

    def record(self) -> dict[str, Any]:
        """The result as JSON; ``ratio_to_limit`` is GB/s over ``memory_read_GBps``."""
        limit = self.limits["memory_read_GBps"]
        return {
            "machine": dict(self.machine),
            "limits": dict(self.limits),
            "compile_seconds": self.compile_seconds,
            "cases": [
                {
                    "check": case.check,
                    "bytes": case.nbytes,
                    "tensors": case.tensors,
                    "seconds": record.rounded(case.seconds),
                    "GBps": record.rounded(case.speed),
                    "ratio_to_limit": record.rounded(case.speed / limit),
                }
                for case in self.cases
            ],
        }

    def print(self) -> None:
        """Print the table."""
        limit = self.limits["memory_read_GBps"]
        print(
            f"{self.machine['device']}: memory is read at {limit:,.1f} GB/s "
            f"(by {self.limits['memory_read_by']})."
        )
        rows = [
            (
                case.check,
                f"{case.tensors:,}",
                f"{case.nbytes:,}",
                f"{case.seconds:.6f}",
                f"{case.speed:,.3f}" if case.speed < 10 else f"{case.speed:,.1f}",
                f"{case.speed / limit:.1%}",
            )
            for case in self.cases
        ]
        if self.compile_seconds is not None:
            print(f"The checks' kernels were compiled in {self.compile_seconds:.3f} s.")
        record.print_table(("check", "tensors", "bytes", "seconds", "GB/s", "of the limit"), rows)


def pick_device(name: str | None) -> torch.device:
    """The device that is asked for; a GPU, if there is one, where none is.

    Raises :class:`UsageError` for one that is not there.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ["cpu", *(f"cuda:{index}" for index in range(count))]
    wanted = "cuda:0" if name == "cuda" else name
    if wanted not in here:
        raise UsageError("--device", expected=f"one of {', '.join(here)}", found=repr(name))
    return torch.device(wanted)


def run(device: torch.device, gigabytes: float | None, deadline: Deadline) -> Result:
    """Measure; ``gigabytes`` is the size of the large model.

    Raises :class:`WrongResult`, :class:`UsageError` where memory has no room for the size that was
    asked for, and :class:`DeadlineExceeded`.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _run(device, gigabytes, deadline)


def _run(device: torch.device, gigabytes: float | None, deadline: Deadline) -> Result:
    compiled = _compile(device)
    memory = _memory(device, gigabytes)
    _fill(memory)
    deadline.check("filling the memory")
    speed, way = read_speed(memory)
    limits = {
        "memory_read_GBps": record.rounded(speed / 1e9),
        "memory_read_by": way,
        "memory_copy_GBps": record.rounded(copy_speed(memory) / 1e9),
    }
    deadline.check("measuring the memory")
    _fill(memory)
    large = _cut(memory, _LARGE_TENSORS)
    small = _cut(memory[: int(len(memory) * _SMALL_SHARE)], _SMALL_TENSORS)
    cases = [
        *(_crc32c(data, deadline) for data in (large, small)),
        _sampled(small[:_SAMPLED_TENSORS], deadline),
        *(_verify(data, deadline) for data in (large, small)),
    ]
    machine = {**record.machine(), "device": _name(device)}
    return Result(machine, limits, compiled, cases)


def _compile(device: torch.device) -> float | None:
    """Seconds until the GPU's kernels can be used; None where there are none."""
    if device.type != "cuda":
        return None
    torch.zeros(1, device=device)  # CUDA itself is not what is measured
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    return round(time.perf_counter() - began, 3) if cuda_checks.available(device) else None


def _memory(device: torch.device, gigabytes: float | None) -> Tensor:
    room = int(_free(device) * _ROOM)
    if gigabytes is None:
        return torch.empty(
            min(int(GIGABYTES[device.type] * 1e9), room), dtype=torch.uint8, device=device
        )
    if not LEAST_GIGABYTES <= gigabytes <= room / 1e9:
        raise UsageError(
            "--gb",
            expected=f"{LEAST_GIGABYTES} to {room / 1e9:.1f}, for which memory has room",
            found=gigabytes,
        )
    return torch.empty(int(gigabytes * 1e9), dtype=torch.uint8, device=device)


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise WarmcastError("/proc/meminfo", expected="a line MemAvailable", found="none")


def _fill(memory: Tensor) -> None:
    """Weights as models have them, about 0 and finite; no two tensors alike."""
    generator = torch.Generator(memory.device).manual_seed(1)
    count = min(_PATTERN, len(memory) + 1) // 2
    pattern = torch.randn(count, generator=generator, device=memory.device)
    data = pattern.to(torch.bfloat16).view(torch.uint8)
    for begin in range(0, len(memory), len(data)):
        piece = memory[begin : begin + len(data)]
        piece.copy_(data[: len(piece)])


def _cut(memory: Tensor, count: int) -> list[Tensor]:
    """Tensors of one length, on multiples of 256 bytes where they are long, as in an arena."""
    length = len(memory) // count
    length -= length % 256 if length >= 256 else length % 2
    return [
        memory[begin : begin + length].view(torch.bfloat16)
        for begin in range(0, count * length, length)
    ]


def _crc32c(data: Sequence[Tensor], deadline: Deadline) -> Case:
    found = crc32cs(data, deadline)
    _same("CRC32C", data, [to_hex(crc) for crc in found], _google)
    return _case("crc32c", data, lambda: crc32cs(data, deadline))


def _sampled(data: Sequence[Tensor], deadline: Deadline) -> Case:
    rows = _rows(data)

    def defined(place: int, content: bytes) -> str:
        return sampled_hash_of(rows[place][0], _DTYPE, content)

    _same("sampled hash", data, sampled_hashes(rows, deadline), defined)
    return _case("sampled hash", data, lambda: sampled_hashes(rows, deadline))


def _verify(data: Sequence[Tensor], deadline: Deadline) -> Case:
    rows = _rows(data)
    truths = measure(rows, deadline)
    _same("CRC32C", data, [truth.crc32c for truth in truths], _google)
    pairs = list(zip(truths, data, strict=True))
    _flip_and_find(pairs, deadline)
    return _case("verify", data, lambda: verify(pairs, deadline))


def _case(check: str, data: Sequence[Tensor], action: Callable[[], object]) -> Case:
    taken = seconds(action, data[0].device)
    return Case(check, len(data), sum(tensor.nbytes for tensor in data), taken)


def _rows(data: Sequence[Tensor]) -> list[tuple[str, str, Tensor]]:
    return [(f"model.layers.{i}.mlp.weight", _DTYPE, tensor) for i, tensor in enumerate(data)]


def _google(_: int, content: bytes) -> str:
    return to_hex(google_crc32c.value(content))


def _same(
    what: str,
    data: Sequence[Tensor],
    found: Sequence[str],
    defined: Callable[[int, bytes], str],
) -> None:
    """Raise unless results are as defined, for the last tensor, the first, and some between."""
    nbytes = 0
    for place in (len(data) - 1, *range(0, len(data), len(data) // _COMPARED)):
        content = bytes(host_view(data[place].cpu().view(torch.uint8)))
        expected = defined(place, content)
        if found[place] != expected:
            raise WrongResult(
                f"{what} of tensor {place} of {len(data)}", expected=expected, found=found[place]
            )
        nbytes += len(content)
        if nbytes > 1e9:  # a copy to the host is slow, and three tensors say enough
            break


def _flip_and_find(pairs: Sequence[tuple[Truth, Tensor]], deadline: Deadline) -> None:
    truth, tensor = pairs[len(pairs) // 2]
    bits = tensor.view(torch.int16)
    bits[len(bits) // 3] ^= 1
    try:
        verify(pairs, deadline)
    except WeightVerificationError as found:
        if truth.name in str(found):
            return
        raise
    finally:
        bits[len(bits) // 3] ^= 1
    raise WrongResult(f"one flipped bit of {truth.name}", expected="found", found="not found")


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return str(device)
