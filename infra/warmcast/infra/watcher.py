"""Runs one server for as long as the process that asked for it wants it or lives.

    python watcher.py FOLDER [LEFTOVER ...] -- COMMAND ...

The command runs in FOLDER, its output in FOLDER/log; its process id is the one line on standard
output. When standard input holds a byte, or ends because its other end has died, however it died,
the server is killed and the folder and the leftovers are removed. Until then the server's process
id stays its own, ended or not: nobody else collects it.

A process of its own, since a killed parent runs no cleanup; not PR_SET_PDEATHSIG, which fires when
the thread that started the server ends, and removes no folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Run the command until standard input says otherwise."""
    separator = arguments.index("--")
    folder = Path(arguments[0])
    server: subprocess.Popen[bytes] | None = None
    try:
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                arguments[separator + 1 :],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        print(server.pid, flush=True)
        sys.stdin.buffer.read(1)
    finally:
        if server is not None:
            server.kill()
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)
        for leftover in arguments[1:separator]:
            Path(leftover).unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
