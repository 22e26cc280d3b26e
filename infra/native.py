"""Builds the loader's C library when Warmcast is installed; without a compiler it does without.

Source: Hatch's custom build hooks. ``python infra/native.py`` builds it in place.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # built in place, with nothing installed
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "loader/warmcast/loader/pump.c"
LIBRARY = SOURCE.with_name("_pump.so")


def compiler() -> list[str]:
    """The command that compiles C here."""
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def build() -> str | None:
    """Build the library; why that could not be done, None if it was."""
    LIBRARY.unlink(missing_ok=True)  # who has it loaded goes on with it
    command = compiler()
    options = ["-O2", "-std=c11", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread", "-Wl,-z,defs"]
    new = LIBRARY.with_suffix(".new")  # whole or not at all
    try:
        made = subprocess.run(
            [*command, *options, "-o", str(new), str(SOURCE)],
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if made.returncode:
            return f"{command[0]}: {made.stderr.strip() or f'exit {made.returncode}'}"
        new.replace(LIBRARY)
    except (OSError, subprocess.TimeoutExpired) as cause:
        return f"{command[0]}: {cause}"
    finally:
        new.unlink(missing_ok=True)
    return None


class NativeHook(BuildHookInterface):
    """What Hatch calls before it packs a wheel, or installs in place."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        """Build; a wheel with the library in it is for this platform only."""
        if why := build():
            self.app.display_warning(f"Without the C library, which could not be built: {why}")
            return
        build_data["artifacts"] = [str(LIBRARY.relative_to(ROOT))]
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"


if __name__ == "__main__":
    sys.exit(build())
