"""What converting a checkpoint costs, beside a plain copy of the same bytes on the same disk.

    python tests/bench/convert.py [--json PATH] [--folder DIR] [--mib 4096] [--repeat 3]

Copies (``cp``) and conversions take turns; neither waits for the disk to have it, but for what the
one before left to be written. Other work on the machine (``load_average``) slows both, and
conversion more, which takes more of the processor. Conversion is that of a deploy, its process
included, and the import of torch (some 0.9 s) where it is needed: for whatever is not copied as it
lies. Memory is the child's anonymous memory at its highest, above what it held when its bound was
set, so torch counts where it is imported: files are read in pieces or mapped for reading, and their
pages are the page cache's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from warmcast.flows.convert import process
from warmcast.flows.convert.child import Format
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.local import LocalFile
from warmcast.infra.bench import record
from warmcast.manifests.deadline import Deadline

MIB = 1 << 20
ROWS, COLUMNS = 8192, 4096
"""A bfloat16 tensor of 64 MiB, as of a model of 8 billion parameters."""


class Spent:
    """Processor time that this process and its ended children take from now on."""

    def __init__(self) -> None:
        self._began = os.times()

    def seconds(self) -> float:
        """User and system together."""
        return sum(os.times()[:4]) - sum(self._began[:4])


class Peak:
    """The highest anonymous memory of this process's child, above what it was first bounded at."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.nbytes = 0

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        begun = None
        while not self._ended.wait(0.005):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for child in children:
                try:
                    lines = Path(f"/proc/{child}/status").read_text().splitlines()
                    bounded = (
                        "Max data size             unlimited"
                        not in Path(f"/proc/{child}/limits").read_text()
                    )
                except (FileNotFoundError, ProcessLookupError):
                    continue
                found = next((int(x.split()[1]) for x in lines if x.startswith("RssAnon")), 0)
                if bounded:
                    begun = found * 1024 if begun is None else begun
                    self.nbytes = max(self.nbytes, found * 1024 - begun)


def state(mib: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Layers of a tensor each; random bits, so that no disk or file system finds them alike."""
    count = max(1, mib * MIB // (ROWS * COLUMNS * dtype.itemsize))
    return {
        f"model.layers.{n}.weight": torch.randint(-99, 99, (ROWS, COLUMNS), dtype=torch.int8).to(
            dtype
        )
        for n in range(count)
    }


def pickled(folder: Path, mib: int) -> list[Path]:
    torch.save(state(mib), folder / "pytorch_model.bin")
    return [folder / "pytorch_model.bin"]


def strided(folder: Path, mib: int) -> list[Path]:
    torch.save({name: tensor.t() for name, tensor in state(mib).items()}, folder / "x.bin")
    return [folder / "x.bin"]


def distributed(folder: Path, mib: int) -> list[Path]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(mib), checkpoint_id=folder / "dcp", no_dist=True)
    return sorted((folder / "dcp").iterdir())


def blocks(folder: Path, mib: int) -> list[Path]:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
    generator = np.random.default_rng(1)
    for n in range(max(1, mib // 64)):
        raw = generator.integers(0, 128, (ROWS, 64 * MIB // ROWS // 144 * 144), dtype=np.uint8)
        writer.add_tensor(f"blk.{n}.w", raw, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [folder / "x.gguf"]


def case(
    what: str,
    format_: Format,
    build: Callable[[Path, int], list[Path]],
    options: ConvertOptions,
    folder: Path,
    mib: int,
    repeat: int,
) -> dict[str, object]:
    """One case: medians over the repeats, after one of each that does not count."""
    source = folder / "source"
    source.mkdir()
    paths = build(source, mib)
    nbytes = sum(path.stat().st_size for path in paths)
    copies, conversions, peaks = [], [], []
    cpu: dict[str, list[float]] = {"copy": [], "convert": []}
    for _ in range(1 + repeat):
        copy, out = folder / "copy", folder / "out"
        os.sync()
        spent = Spent()
        began = time.perf_counter()
        subprocess.run([shutil.which("cp") or "cp", "-r", source, copy], check=True)
        copies.append(time.perf_counter() - began)
        cpu["copy"].append(spent.seconds())
        shutil.rmtree(copy)
        out.mkdir()
        files = [LocalFile.of(path.name, path) for path in paths]
        os.sync()
        spent = Spent()
        began = time.perf_counter()
        with Peak() as peak:
            process.convert(
                format_, files, out, options, deadline=Deadline.never(), tick=lambda _: None
            )
        conversions.append(time.perf_counter() - began)
        cpu["convert"].append(spent.seconds())
        peaks.append(peak.nbytes)
        shutil.rmtree(out)
    shutil.rmtree(source)
    ratios = [a / b for a, b in zip(copies[1:], conversions[1:], strict=True)]
    copied, converted = statistics.median(copies[1:]), statistics.median(conversions[1:])
    return {
        "what": what,
        "bytes": nbytes,
        "load_average": round(os.getloadavg()[0], 1),
        "convert_GBps": round(nbytes / converted / 1e9, 3),
        "copy_GBps": round(nbytes / copied / 1e9, 3),
        "of_a_copy": round(copied / converted, 3),
        "of_a_copy_each": [round(ratio, 3) for ratio in ratios],
        "convert_cpu_seconds": round(statistics.median(cpu["convert"][1:]), 2),
        "copy_cpu_seconds": round(statistics.median(cpu["copy"][1:]), 2),
        "child_peak_MiB": round(max(peaks) / MIB),
    }


def main() -> None:
    """Measure, print, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    small = given.mib // 4
    plain, shards = ConvertOptions(), ConvertOptions(max_shard_nbytes=10**9)
    cases = [
        ("pickle, one file", "pickle", pickled, ConvertOptions(max_shard_nbytes=10**12), given.mib),
        ("pickle, files of 1 GB", "pickle", pickled, shards, given.mib),
        ("pickle, float32 on request", "pickle", pickled, ConvertOptions(dtype="float32"), small),
        ("pickle, transposed tensors", "pickle", strided, plain, small),
        ("distributed checkpoint", "dcp", distributed, plain, given.mib),
        ("GGUF Q4_K, as it is", "gguf", blocks, plain, small),
        ("GGUF Q4_K, dequantised", "gguf", blocks, ConvertOptions(dequantise=True), small // 4),
    ]
    results = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for what, format_, build, options, mib in cases:
            results.append(
                case(what, format_, build, options, Path(folder), mib, given.repeat)  # type: ignore[arg-type]
            )
            print(json.dumps(results[-1]), flush=True)
    result = {
        "benchmark": "conversion to safetensors, and a plain copy of the source",
        "machine": record.machine(),
        "cases": results,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
