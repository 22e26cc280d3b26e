"""What loading from an object store costs the loader's processor: S3 from a local SeaweedFS.

    python tests/bench/object_read.py [--json PATH] [--mib 512] [--repeat 3]

Seconds of this processor time a GB (1e9 bytes) of weights, for a whole ``Loader.load`` into
CPU tensors, checks included, and for the bare ranges alone. The server shares the machine's cores,
so the GB/s beside them say little of a network.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from warmcast.infra.bench import record
from warmcast.infra.bench.wire.models import Shape, deploy
from warmcast.infra.servers import seaweed
from warmcast.loader import Loader
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.origin import Origin

MIB = 1 << 20
RANGE = 16 * MIB


def measured(action: Callable[[], object], nbytes: int, repeat: int) -> dict[str, float]:
    """Medians over the repeats, after one that does not count."""
    wall, cpu = [], []
    for _ in range(1 + repeat):
        began, used = time.perf_counter(), time.process_time()
        action()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    return {
        "GBps": round(nbytes / statistics.median(wall[1:]) / 1e9, 3),
        "cpu_seconds_per_GB": round(statistics.median(cpu[1:]) / nbytes * 1e9, 3),
    }


def main() -> None:
    """Measure, print, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    deadline = Deadline.after(600)
    shape = Shape("objects", {"weight": (options.mib * MIB // 2,)}, 1)
    with seaweed(deadline) as server, tempfile.TemporaryDirectory():
        os.environ.update(server.env)
        url = f"{server.make_bucket('bench')}/models"
        with Origin.open(url) as origin:
            manifest = deploy(origin, shape, deadline)
            file = manifest.files[0]
            reader = origin.open_blob(file.sha256, deadline)
            buffers = [bytearray(RANGE) for _ in range(4)]

            def ranges() -> None:
                def one(lane: int) -> None:
                    for begin in range(lane * RANGE, file.size - RANGE, 4 * RANGE):
                        reader.read_into(begin, memoryview(buffers[lane]), deadline)

                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(one, range(4)))

            bare = measured(ranges, file.size, options.repeat)
        with Loader(url) as loader:
            with loader.skeleton():
                model = shape.build()
            whole = measured(lambda: loader.load(model, shape.ref), shape.nbytes, options.repeat)
    result = {
        "benchmark": "loading from S3 (SeaweedFS on the same machine) into CPU tensors",
        "machine": record.machine(),
        "bytes": shape.nbytes,
        "cases": [{"what": "ranges alone", **bare}, {"what": "Loader.load", **whole}],
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
