"""How fast CRC32C of a buffer is, in place and by way of copies.

    python tests/bench/checksum.py [--json PATH] [--mib 256] [--repeat 7]

GB/s (1e9 bytes a second) of one thread, the best of the repeats, with the buffer's pages in
memory. ``in place`` is :func:`warmcast.manifests.checksum.crc32c`; ``copy whole`` is google-crc32c
over ``bytes(buffer)``; ``copy pieces`` copies 1 MiB at a time, as the fallback does. For ``bytes``
google-crc32c needs no copy, and ``copy whole`` measures it without one.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import google_crc32c

from warmcast.manifests.checksum import ZERO_COPY, crc32c

MIB = 1 << 20


def copy_whole(data: memoryview) -> int:
    """The checksum as google-crc32c's own interface takes it: of one ``bytes``."""
    return google_crc32c.value(bytes(data))


def copy_pieces(data: memoryview) -> int:
    """The checksum of 1 MiB copies."""
    value = 0
    view = memoryview(data)
    for start in range(0, len(view), MIB):
        value = google_crc32c.extend(value, bytes(view[start : start + MIB]))
    return value


WAYS: dict[str, Callable[[memoryview], int]] = {
    "in place": crc32c,
    "copy whole": copy_whole,
    "copy pieces": copy_pieces,
}


def best(function: Callable[[], int], nbytes: int, repeat: int) -> float:
    """The best of the repeats, in GB/s."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return nbytes / min(seconds) / 1e9


def machine() -> dict[str, object]:
    """The hardware, by its own description."""
    facts = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return {
        "cpu": facts["model name"],
        "family": int(facts["cpu family"]),
        "model": int(facts["model"]),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "google_crc32c": version("google-crc32c"),
    }


def measure(mib: int, repeat: int) -> list[dict[str, object]]:
    """A row a kind of buffer: GB/s each way."""
    nbytes = mib * MIB
    content = os.urandom(nbytes)
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        with mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(content)
            buffers = {
                "bytes": content,
                "memoryview, 1 byte off": view[1:],
                "bytearray": bytearray(content),
                "mmap, cached": mapped,
            }
            rows = []
            for kind, buffer in buffers.items():
                results = {way: function(buffer) for way, function in WAYS.items()}
                if len(set(results.values())) != 1:
                    raise SystemExit(f"{kind}: the ways disagree: {results}")
                row: dict[str, object] = {"buffer": kind}
                for way, function in WAYS.items():
                    speed = best(lambda f=function, b=buffer: f(b), len(buffer), repeat)
                    row[way] = round(speed, 2)
                rows.append(row)
            del buffers, buffer, function
        return rows


def main() -> None:
    """Measure, print a table, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    rows = measure(options.mib, options.repeat)
    print(f"CRC32C of {options.mib} MiB, GB/s of one thread, best of {options.repeat}")
    print("".join(f"{name:>24}" for name in ("buffer", *WAYS)))
    for row in rows:
        print("".join(f"{value!s:>24}" for value in row.values()))
    if options.json:
        record = {
            "benchmark": "CRC32C of a buffer in memory",
            "unit": "GB/s, one thread, best of the repeats",
            "machine": machine(),
            "zero_copy": ZERO_COPY,
            "nbytes": options.mib * MIB,
            "repeat": options.repeat,
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
