"""How fast memory is read: the limit of everything that has to see every byte.

On a GPU a kernel of 16-byte loads that does nothing else, compiled like the loader's; where that
cannot be had, and on a CPU, torch's largest element, which reads as fast as torch can.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from warmcast.loader import cuda_checks
from warmcast.loader.cuda_context import current
from warmcast.loader.cuda_kernels import compiled

REPEAT = 9
"""Times that a figure is measured, after a first time that does not count; their median stands."""

_READ = r"""
extern "C" __global__ void read(const uint4* data, unsigned long long groups, unsigned* out) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  unsigned sum = 0;
  for (; i + 3 * step < groups; i += 4 * step) {
    const uint4 a = data[i], b = data[i + step], c = data[i + 2 * step], d = data[i + 3 * step];
    sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
    sum ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < groups; i += step) sum ^= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  atomicXor(out, sum);
}
"""
_GRID = (8192, 1024)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """The median of the seconds that something takes, work on the device included."""
    taken = []
    for _ in range(1 + REPEAT):
        _wait(device)
        began = time.perf_counter()
        action()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def read_speed(memory: Tensor) -> tuple[float, str]:
    """Bytes a second at which a 1-D uint8 tensor is read, and by what."""
    words = memory[: len(memory) // 16 * 16].view(torch.int32)
    ways: dict[str, Callable[[], object]] = {"torch amax": words.amax}
    if memory.is_cuda and cuda_checks.available(memory.device):
        ways["a kernel of 16-byte loads"] = _kernel(words)
    speeds = {name: words.nbytes / seconds(action, memory.device) for name, action in ways.items()}
    best = max(speeds, key=lambda name: speeds[name])
    return speeds[best], best


def copy_speed(memory: Tensor) -> float:
    """Bytes read and written a second by a copy within a tensor; it changes the second half."""
    half = len(memory) // 2
    there, here = memory[half : 2 * half], memory[:half]
    return 2 * half / seconds(lambda: there.copy_(here), memory.device)


def _kernel(words: Tensor) -> Callable[[], None]:
    with current(words.device):
        (kernel,) = compiled(_READ, ["read"], words.device)
    stream = torch.cuda.current_stream(words.device).cuda_stream
    blocks, threads = _GRID
    out = torch.zeros(1, dtype=torch.int32, device=words.device)

    def read() -> None:
        groups = words.nbytes // 16
        kernel.launch(blocks, threads, words.data_ptr(), groups, out.data_ptr(), stream=stream)

    return read


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
