"""What is called when the process ends."""

from __future__ import annotations

import subprocess
import sys

LETS_GO = """
import atexit
import threading

from warmcast.loader import goodbye


class Leaver:
    def leave(self):
        left.set()

    def __del__(self):
        print("freed by", threading.current_thread().name, flush=True)


def let_go():
    left.wait()
    owned.clear()
    gone.set()


left, gone = threading.Event(), threading.Event()
owned = [Leaver()]
atexit.register(gone.wait, 10)  # called last
goodbye.on_exit(owned[0])
threading.Thread(target=let_go, name="another", daemon=True).start()
"""


def test_what_leaves_is_not_freed_by_another_thread():
    """It may own tensors, and to free them is a call of torch, by which a thread may be unwound."""
    ended = subprocess.run(
        [sys.executable, "-c", LETS_GO], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout in ("", "freed by MainThread\n")
    assert not ended.stderr
