"""NCCL's C interface, as much of it as a transfer needs, through the library that torch has loaded.

Bound by ctypes: torch's own wrapper cannot be told to give up (its watchdog can end the process
that serves), and the calls below have been stable since NCCL 2.18. Every call releases the GIL.
Communicators are nonblocking: a call may return *in progress*, and nothing but
``ncclCommGetAsyncError`` and ``ncclCommAbort`` may be called on the communicator until that says
success.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from functools import cache

from warmcast.loader.errors import TransferFailed

UNIQUE_ID_NBYTES = 128
SUCCESS = 0
IN_PROGRESS = 7
UINT8 = 1


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``: where the root of a communicator listens."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_NBYTES),)


class _Config(ctypes.Structure):
    """``ncclConfig_t`` up to the fields of NCCL 2.18; ``size`` tells later versions so."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


_UNDEFINED = -(2**31)
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21800

_BOOTSTRAP = 1  # the kind of NCCL's sockets that its ranks meet at
_NOBODYS_RANKS = 4096  # more than any communicator of ours has


@cache
def library() -> ctypes.CDLL | None:
    """The NCCL that torch has loaded; None if there is none."""
    import torch  # its import loads the library that the name below then finds

    if not torch.cuda.is_available():
        return None
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    comm, stream = ctypes.c_void_p, ctypes.c_void_p
    prototypes = {
        "ncclGetVersion": (ctypes.POINTER(ctypes.c_int),),
        "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
        "ncclCommInitRankConfig": (
            ctypes.POINTER(comm),
            ctypes.c_int,
            UniqueId,
            ctypes.c_int,
            ctypes.POINTER(_Config),
        ),
        "ncclCommGetAsyncError": (comm, ctypes.POINTER(ctypes.c_int)),
        "ncclCommFinalize": (comm,),
        "ncclCommDestroy": (comm,),
        "ncclCommAbort": (comm,),
        "ncclGroupStart": (),
        "ncclGroupEnd": (),
        "ncclBroadcast": (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            comm,
            stream,
        ),
    }
    for name, arguments in prototypes.items():
        function = getattr(nccl, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
    nccl.ncclGetErrorString.argtypes = (ctypes.c_int,)
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return nccl


def loaded() -> ctypes.CDLL:
    """The library, which a caller knows to be there."""
    nccl = library()
    if nccl is None:
        raise TransferFailed("nccl", expected="torch's libnccl", found="none")
    return nccl


def version() -> str:
    """NCCL's version code (``22809``); empty without NCCL."""
    nccl = library()
    if nccl is None:
        return ""
    code = ctypes.c_int()
    check(nccl.ncclGetVersion(ctypes.byref(code)), "ncclGetVersion")
    return str(code.value)


def check(result: int, call: str) -> None:
    """Raise :class:`TransferFailed` for a result that is neither success nor in progress."""
    if result not in (SUCCESS, IN_PROGRESS):
        text = loaded().ncclGetErrorString(result).decode(errors="replace")
        raise TransferFailed(f"nccl: {call}", expected="success", found=text)


@cache
def prepare() -> None:
    """Called before NCCL is first used.

    NCCL's RAS would join all processes that ever met in a communicator into one network, and keep
    a connection to each; workers that pass weights on are not one job. A user's own setting holds.
    """
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")


def unique_id() -> bytes:
    """A new id. It starts a thread that waits for both ranks; see :func:`release`."""
    prepare()
    value = UniqueId()
    check(loaded().ncclGetUniqueId(ctypes.byref(value)), "ncclGetUniqueId")
    return bytes(value)


def config(max_ctas: int | None) -> _Config:
    """The configuration of a nonblocking communicator of at most so many CTAs (thread blocks)."""
    return _Config(
        ctypes.sizeof(_Config),
        _MAGIC,
        _CONFIG_VERSION,
        0,
        _UNDEFINED,
        _UNDEFINED,
        _UNDEFINED if max_ctas is None else max_ctas,
        None,
        _UNDEFINED,
    )


def release(unique: bytes) -> None:
    """End the root thread of an id that not every rank has joined.

    The thread blocks in ``accept`` and knows no abort: without this it and its socket would stay
    for the life of the process. It ends when a rank tells another number of ranks than the one
    before, and closes what it has opened; where a connection merely breaks off, it does not.
    The id holds a magic number (8 bytes) and the socket address that the root listens on.
    """
    family = struct.unpack_from("<H", unique, 8)[0]
    port = struct.unpack_from(">H", unique, 10)[0]
    if family == socket.AF_INET:
        host = socket.inet_ntop(family, unique[12:16])
    elif family == socket.AF_INET6:
        host = socket.inet_ntop(family, unique[16:32])
    else:
        return
    # Where a rank had come, the first ends it. A root whose ranks have all come listens no more.
    for ranks in (_NOBODYS_RANKS, _NOBODYS_RANKS + 1):
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), timeout=1) as root,
        ):
            told = struct.pack("<4i", 0, ranks, 0, 1)  # rank, ranks, root, roots
            root.sendall(unique[:8] + struct.pack("<2i", _BOOTSTRAP, len(told)) + told)
            root.recv(1)  # it closes when it has read
