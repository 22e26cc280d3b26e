"""NCCL's connections from other processes, to be cut where NCCL waits for one that stands still.

NCCL (2.28) ends a communicator only when every process that was connected to it has closed its
connection, even if it is aborted. A process that dies closes it; one that is stopped does not, and
as long as it is, a thread, sockets and memory would stay. NCCL takes a connection that breaks for a
process that died, and nothing but the connection tells it.

NCCL does not say which sockets are its own. They are told by what they are: TCP, accepted at a port
where something began to listen while the communicator was made, and inherited by children, as
NCCL's are and hardly anybody else's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterable, Iterator

Port = int


def listening() -> frozenset[Port]:
    """The TCP ports at which this process listens by sockets that children would inherit."""
    return frozenset(port for _, port, listens in _sockets() if listens)


def cut(ports: Iterable[Port]) -> int:
    """Shut down the connections that were accepted at ``ports``; how many there were."""
    wanted, count = frozenset(ports), 0
    for connection, port, listens in _sockets():
        if port in wanted and not listens:
            with contextlib.suppress(OSError):  # it was not connected any more
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _sockets() -> Iterator[tuple[socket.socket, Port, bool]]:
    """This process's TCP sockets that children would inherit, their ports, whether they listen."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # closed meanwhile, or not what it was
            number = int(name)
            inherited = not fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            if not inherited or not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            # A duplicate stays what it is, whoever closes the original.
            with socket.socket(fileno=os.dup(number)) as found:
                internet = found.family in (socket.AF_INET, socket.AF_INET6)
                if internet and found.type == socket.SOCK_STREAM:
                    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
                    yield found, found.getsockname()[1], listens
