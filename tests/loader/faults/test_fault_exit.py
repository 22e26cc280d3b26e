"""Workers that end: presence and lease are gone when the process is, and it ends as it would."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import redis

from tests.loader.faults.scene import PROMPT, Scene

ENDS = {
    "return": (False, 0),
    "sys.exit": (False, 3),
    "exception": (False, 1),
    "progressive": (False, 4),
    "lease": (True, -signal.SIGTERM),
    "default": (True, -signal.SIGTERM),
    "handler before": (True, 7),
    "handler after": (True, 7),
}
"""How a worker ends: whether by SIGTERM, and its exit code."""


@contextmanager
def _ending(scene: Scene, end: str, url: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.loader.faults.exits", scene.origin.as_uri(), url, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def _held(url: str) -> list[str]:
    with redis.Redis.from_url(url) as client:
        keys = map(bytes.decode, client.scan_iter("*", count=1000))
        return [key for key in keys if key.endswith(":lease") or ":sender:" in key]


def test_ends(scene: Scene):
    """All at once, since most of it is starting Python; each in a database of its own."""
    with ExitStack() as stack:
        url = scene.registry.url.removesuffix("0")
        started = [
            (end, f"{url}{number}", stack.enter_context(_ending(scene, end, f"{url}{number}")))
            for number, end in enumerate(ENDS)
        ]
        for end, database, process in started:
            _ready(process)
            assert len(_held(database)) == 1, end
            by_signal, code = ENDS[end]
            if by_signal:
                process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(None if by_signal else "\n", timeout=PROMPT)
            assert _held(database) == [], end
            assert process.returncode == code, errors
            assert ("handled" in output) == end.startswith("handler"), end
            assert ("Traceback" in errors) == (end == "exception"), errors


def test_sigterm_ignored(scene: Scene):
    """A worker that ignores SIGTERM goes on, and its own end is as any other's."""
    with _ending(scene, "ignored", scene.registry.url) as process:
        _ready(process)
        process.send_signal(signal.SIGTERM)
        process.communicate("\n", timeout=PROMPT)
        assert process.returncode == 0
        assert _held(scene.registry.url) == []


@pytest.mark.parametrize(
    ("end", "moment"), [("return", "receiving"), ("return", "begun"), ("default", "receiving")]
)
def test_in_the_middle_of_a_transfer(scene: Scene, end: str, moment: str):
    """The process ends as it would, not by what its threads were doing; the receiver falls back."""
    with _ending(scene, end, scene.registry.url) as process:
        _ready(process)
        receiver = scene.worker()
        before = receiver.survey()
        receiver.halt_at(moment)
        receiver.begin(20)
        receiver.halted(moment)
        if end == "default":
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(None if end == "default" else "\n", timeout=PROMPT)
        assert process.returncode == ENDS[end][1], errors
        receiver.go_on()
        scene.right(receiver.end(), "origin")
        scene.nothing_left(receiver, before)


def test_registry_gone(scene: Scene):
    """Leaving takes its time at most, and the exit code stays."""
    with _ending(scene, "default", scene.registry.url) as process:
        _ready(process)
        scene.registry.pause()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PROMPT)
        assert process.returncode == -signal.SIGTERM
