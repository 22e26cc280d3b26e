"""How fast the checks on the GPU are, beside the memory's speed: ``bench_checks.py FILE``."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from warmcast.loader import cuda_checks
from warmcast.manifests import sampling

GB = 1e9


def seconds(action: Callable[[], object], repeat: int = 7) -> float:
    action()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def on_the_gpu(action: Callable[[], object]) -> float:
    """Seconds that the GPU works on the checksum's kernels, without what the host does."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        action()
        torch.cuda.synchronize()
    ours = [e for e in profile.events() if "crc32c" in e.name]
    return sum(e.device_time for e in ours) / 1e6


def main() -> None:
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    began = time.perf_counter()
    assert cuda_checks.available(device)
    compiling = time.perf_counter() - began
    large = [
        torch.randint(0, 256, (160_000_000,), dtype=torch.uint8, device=device) for _ in range(100)
    ]
    small = [
        torch.randint(0, 256, (866_816,), dtype=torch.uint8, device=device) for _ in range(3000)
    ]
    copy = torch.empty_like(large[0])

    def d2d() -> None:
        for tensor in large[:20]:
            copy.copy_(tensor)

    moved = 20 * 2 * 160_000_000
    cases = []

    def case(check: str, data: list[torch.Tensor], action: Callable[[], object]) -> None:
        nbytes = sum(d.numel() for d in data)
        took = seconds(action)
        cases.append(
            {
                "check": check,
                "bytes": nbytes,
                "tensors": len(data),
                "seconds": round(took, 6),
                "GBps": round(nbytes / took / GB, 1),
                "kernel_seconds": round(on_the_gpu(action), 6),
            }
        )

    case("crc32c", large, lambda: cuda_checks.crc32cs(large))
    case("crc32c", small, lambda: cuda_checks.crc32cs(small))
    weights = [
        torch.randn(433_408, device=device).to(torch.bfloat16).view(torch.uint8)
        for _ in range(1000)
    ]
    rows = [(f"layers.{i}.weight", 2, data) for i, data in enumerate(weights)]

    def sampled() -> None:
        cuda_checks._indices.cache_clear()
        for (name, _, data), raw in zip(rows, cuda_checks.samples(rows), strict=True):
            sampling.sampled_hash(name, "BF16", data.numel() // 2, raw)

    case("sampled hash", small[:1000], sampled)
    result = {
        "machine": {"gpu": properties.name, "torch": torch.__version__},
        "limits": {"memory_copy_GBps": round(moved / seconds(d2d) / GB, 1)},
        "compile_seconds": round(compiling, 3),
        "cases": cases,
    }
    text = json.dumps(result, indent=2)
    print(text)
    Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
