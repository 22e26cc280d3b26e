"""What a benchmark hands back: the machine it ran on, a table for people, the same as JSON.

A record is ``{"machine": {...}, "limits": {...}, "cases": [{...}, ...]}``. ``machine`` describes
hardware and versions and names no host; ``limits`` are what the hardware allows, measured in the
same run; rates are in GB/s, 1e9 bytes a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from warmcast.manifests.errors import UsageError

_WIDEST = 500


def machine() -> dict[str, Any]:
    """The hardware and its versions; of GPUs, those that torch sees."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
        facts["driver"] = _driver_version()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def check_destination(path: Path | None) -> None:
    """Raise :class:`UsageError` if a record could not be written there; asked before measuring."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UsageError(f"--json {path}", expected="a file in a folder", found="no folder")
    if path.is_dir():
        raise UsageError(f"--json {path}", expected="a file", found="a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--json {path}", expected="a file that can be written", found="no right")


def rounded(value: float) -> float:
    """``value`` to four digits, whatever its size: a rate of 0.004 GB/s keeps as many as 2,500."""
    return float(f"{value:.4g}")


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> None:
    """Print a table as wide as it is: a terminal may wrap it, but nothing is cut off.

    The first ``words`` columns are set to the left, the others, numbers, to the right.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < words else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    width = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
    Console(highlight=False, width=max(width, console.width)).print(table)
    sys.stdout.flush()


def _cpu_model() -> str:
    """The processor by its own name; its architecture where it has none (Arm)."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _driver_version() -> str | None:
    """The version of NVIDIA's driver, from NVML, which comes with it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    version = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return None
    failed = nvml.nvmlSystemGetDriverVersion(version, len(version))
    nvml.nvmlShutdown()
    return None if failed else version.value.decode()
