"""Ranges of files through Xet, for as long as it makes progress.

hf_xet runs in a process of its own (:mod:`xet_child`). It is ended if it brings no byte for
``patience`` seconds, or for half of the time that is left. That, and every failure, turns Xet off
for the rest of the deploy, and what is missing is read over HTTPS. So does a hf_xet that is too
old to read ranges.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from warmcast.flows.errors import SourceError
from warmcast.flows.upstreams import xet_child
from warmcast.flows.upstreams.hub_api import XetAccess
from warmcast.flows.upstreams.locks import held
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError, one_line

log = logging.getLogger("warmcast")

_NAP = 0.5  # seconds between two looks at the deadline, which may be taken back
_PIPE = 1 << 20  # bytes that wait in a pipe; it is less where the system does not allow it
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|ACCESS_KEY", re.IGNORECASE)
_MARGIN = 60.0  # seconds that a token has to be good for
ON = ("1", "ON", "YES", "TRUE")
"""What huggingface_hub takes for yes in its variables, whatever the case."""


class Xet:
    """The child process, once it is needed. Safe between threads."""

    def __init__(
        self, name: str, access: Callable[[Deadline], XetAccess], *, patience: float
    ) -> None:
        """``access`` asks the Hub for a token; ``patience``: seconds without a byte."""
        self._name = name
        self._ask = access
        self.patience = patience
        self._lock = threading.Lock()
        self._access: XetAccess | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._moved = 0.0  # when bytes came last, on the monotonic clock
        self.failure = ""
        """Why it is off; empty while it is on."""

    @staticmethod
    def installed() -> bool:
        """Whether hf_xet is there, and ``HF_HUB_DISABLE_XET`` does not forbid it."""
        disabled = os.environ.get("HF_HUB_DISABLE_XET", "").upper() in ON
        return not disabled and importlib.util.find_spec("hf_xet") is not None

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        return self._child.pid if self._child is not None else None

    def read_into(
        self, xet_hash: str, size: int, offset: int, view: memoryview, deadline: Deadline
    ) -> int:
        """Fill ``view`` with a file's bytes from ``offset``, as far as it goes; how many came.

        Raises ``DeadlineExceeded`` and nothing else.
        """
        deadline.check(f"reading {self._name} through Xet")
        done = 0
        try:
            pipe = self._begin(xet_hash, size, offset, offset + len(view), deadline)
            if pipe is None:
                return 0
            try:
                while done < len(view):
                    length = self._frame(pipe, deadline)
                    if not 0 < length <= len(view) - done:
                        raise self._said(pipe, length, deadline)
                    self._fill(pipe, view[done : done + length], deadline)
                    done += length
            finally:
                os.close(pipe)
        except (SourceError, OSError) as cause:
            deadline.check(f"reading {self._name} through Xet")
            self._off(cause)
        return done

    def close(self) -> None:
        """End the child, and read nothing that way any more."""
        with self._lock:
            self.failure = self.failure or "it was closed"
            child, self._child = self._child, None
            control, self._control = self._control, None
        if control is not None:
            control.close()
        if child is not None:
            child.kill()  # it holds nothing, and may be stopped
            child.wait()

    def _begin(
        self, xet_hash: str, size: int, start: int, end: int, deadline: Deadline
    ) -> int | None:
        """Ask the child for a range; the pipe that it comes through, None if Xet is off."""
        with held(self._lock, deadline, f"reading {self._name} through Xet"):
            if self.failure:
                return None
            access = self._fresh(deadline)
            control = self._started()
            request = {
                "hash": xet_hash, "size": size, "start": start, "end": end,
                "endpoint": access.endpoint, "token": access.token, "expires": int(access.expires),
            }  # fmt: skip
            ours, childs = os.pipe2(os.O_CLOEXEC)
            try:
                socket.send_fds(control, [json.dumps(request).encode()], [childs])
            except BaseException:
                os.close(ours)
                raise
            finally:
                os.close(childs)
        os.set_blocking(ours, False)
        with suppress(PermissionError):
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _PIPE)
        return ours

    def _fresh(self, deadline: Deadline) -> XetAccess:
        if self._access is None or self._access.expires < time.time() + _MARGIN:
            try:
                self._access = self._ask(self._share(deadline))
            except WarmcastError as cause:
                raise SourceError(str(cause)) from cause
        return self._access

    def _started(self) -> socket.socket:
        if self._control is None:
            ours, childs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(self.patience)
            environment = {k: v for k, v in os.environ.items() if not _SECRET.search(k)}
            environment.setdefault("HF_XET_TELEMETRY_ENABLED", "false")
            with childs:
                try:
                    self._child = subprocess.Popen(
                        [sys.executable, "-P", xet_child.__file__, str(childs.fileno())],
                        pass_fds=[childs.fileno()],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,  # Ctrl-C is for us, who end it
                    )
                except BaseException:
                    ours.close()
                    raise
            self._control = ours
        return self._control

    def _frame(self, pipe: int, deadline: Deadline) -> int:
        head = bytearray(xet_child.FRAME.size)
        self._fill(pipe, memoryview(head), deadline)
        length: int = struct.unpack(xet_child.FRAME.format, head)[0]
        return length

    def _said(self, pipe: int, length: int, deadline: Deadline) -> SourceError:
        """What a frame means that brings no bytes, or too many."""
        if length >= 0:
            return SourceError("hf_xet", expected="the bytes asked for", found="others")
        text = bytearray(min(-length, 1000))
        self._fill(pipe, memoryview(text), deadline)
        return SourceError("hf_xet", found=text.decode(errors="replace"))

    def _fill(self, pipe: int, view: memoryview, deadline: Deadline) -> None:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while view:
            began, waiting = time.monotonic(), self._share(deadline)
            while not poll.poll(1000 * min(waiting.remaining(), _NAP)):
                deadline.check(f"reading {self._name} through Xet")
                # Another range that moves on may be what this one waits for.
                if waiting.expired and self._moved < began:
                    silent = time.monotonic() - began
                    raise SourceError("hf_xet", found=f"no byte for {silent:.1f} s")
                if waiting.expired:
                    began, waiting = time.monotonic(), self._share(deadline)
            count = os.readv(pipe, [view])
            if count == 0:
                raise SourceError("hf_xet", found="its process ended")
            self._moved = time.monotonic()
            view = view[count:]

    def _share(self, deadline: Deadline) -> Deadline:
        """The time that Xet may take, so that some remains for reading without it."""
        return deadline.share(0.5).within(self.patience)

    def _off(self, cause: Exception) -> None:
        with self._lock:
            first, self.failure = not self.failure, self.failure or one_line(cause)
        if first:
            log.warning("%s: Xet is off, reading over HTTPS: %s", self._name, self.failure)
        self.close()
