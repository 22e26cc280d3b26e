"""A deploy that is killed before any of its changes to the origin: readers and the next deploy.

The origin is a folder, and a change is whatever the interpreter is about to do to a name in it: its
audit events tell. One process imports all there is to import; each deploy is a fork of it, killed
by SIGKILL before its n-th change, for every n.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = """
import json, os, shutil, signal, sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.flows import elsewhere
from tests.flows.elsewhere import Elsewhere
from warmcast.flows import upstreams
from warmcast.flows.run import deploy
from warmcast.flows.steps import abandoned
from warmcast.flows.steps.collect import collect
from warmcast.flows.steps.journal import Pace
from warmcast.flows.steps.verify import verify
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.origin import Origin

place, kind = Path(sys.argv[1]), sys.argv[2]
pace = Pace(chunk_nbytes=64 << 10, connections=2, lanes=2, silent=0.02)
CHANGES = {"os.link", "os.rename", "os.remove", "os.mkdir", "os.truncate"}
abandoned.UNFINISHED = 0
torch.set_num_threads(1)  # no pool of threads before a fork


def checkpoint(value):
    folder = place / "source"
    folder.mkdir(exist_ok=True)
    save_file({"w": torch.full((250, 200), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"value": value}))
    upstreams._UPSTREAMS["elsewhere"] = "tests.flows.elsewhere:reopen"
    elsewhere.CURRENT = Elsewhere(folder, kind)
    return str(folder) if kind == "folder" else "elsewhere://"


def run(url, before=None):
    source = checkpoint(2.0)
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event, arguments):
            nonlocal seen
            made = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
            if (event in CHANGES or made) and "origin" in str(arguments[0]):
                seen += 1
                if seen == before:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            deploy(source, url, "m@a", pace=pace)
        except BaseException as error:
            print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return -signal.SIGKILL if status == -9 else status


def seen(url):
    with Origin.open(url) as origin:
        manifest = origin.resolve("m@a", Deadline.after(30))
        assert verify(origin, manifest, Deadline.after(30)) == [], manifest
        left = [info.key for info in origin.store.list("transfers/", Deadline.after(30))]
        left += [item.token for item in origin.store.begun_parts(Deadline.after(30))]
        return manifest.config["value"], len(left)


base = place / "origin"
deploy(checkpoint(1.0), str(base), "m@a", pace=pace)
shutil.copytree(base, place / "base")
number = 0
while True:
    number += 1
    shutil.rmtree(base)
    shutil.copytree(place / "base", base)
    killed = run(str(base), number) == -signal.SIGKILL
    between = seen(str(base))
    assert run(str(base)) == 0
    with Origin.open(str(base)) as origin:  # what nobody goes on with is all that is left
        collect(origin, 0, 5, Deadline.after(30), dry_run=False)
    after = seen(str(base))
    print(json.dumps([killed, between, after]), flush=True)
    if not killed:
        break
"""


@pytest.mark.parametrize("kind", ["version", "folder"])
def test_killed_before_every_change(kind):
    memory = Path("/dev/shm")  # where a sync takes no time: there are thousands
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, place, kind],
            capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = [json.loads(line) for line in ended.stdout.splitlines()]
    killed = [step[0] for step in steps]
    assert killed == [True] * (len(steps) - 1) + [False]
    assert len(steps) > 10
    # The old or the new, whole; then the new, and nothing of what was begun.
    assert {between[0] for _, between, _ in steps} == {1.0, 2.0}
    assert {tuple(after) for _, _, after in steps} == {(2.0, 0)}
