"""Copies from pinned memory to a GPU, begun at the least cost: the driver, called by ctypes.

A thread that streams begins a copy every few tens of microseconds. Torch's ``copy_`` gives up the
interpreter's lock for each, and with many threads most of their time goes into getting it back;
these calls return at once, so they keep it.

Source: CUDA driver API (``cuMemcpyHtoDAsync``, ``cuMemcpy2DAsync``, events).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from warmcast.manifests.errors import WarmcastError

_NOT_READY = 600
_DISABLE_TIMING = 2
_HOST, _DEVICE = 1, 2  # CUmemorytype

_Handle = ctypes.c_void_p
_U64 = ctypes.c_uint64


class _Rows(ctypes.Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_int),
        ("src_host", ctypes.c_void_p),
        ("src_device", _U64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_int),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", _U64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@cache
def _library(keep_lock: bool) -> Any:
    library = (ctypes.PyDLL if keep_lock else ctypes.CDLL)("libcuda.so.1")
    prototypes = {
        "cuMemcpyHtoDAsync_v2": (_U64, ctypes.c_void_p, ctypes.c_size_t, _Handle),
        "cuMemcpy2DAsync_v2": (ctypes.POINTER(_Rows), _Handle),
        "cuEventCreate": (ctypes.POINTER(_Handle), ctypes.c_uint),
        "cuEventRecord": (_Handle, _Handle),
        "cuEventQuery": (_Handle,),
        "cuEventSynchronize": (_Handle,),
        "cuEventDestroy_v2": (_Handle,),
    }
    for name, arguments in prototypes.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return library


def copier() -> Callable[[int, int, int, int], int]:
    """``cuMemcpyHtoDAsync``: (to, pinned source, bytes, stream) -> an error, 0 if there is none.

    As bare as this because a thread that streams spends its time here.
    """
    function: Callable[[int, int, int, int], int] = _library(True).cuMemcpyHtoDAsync_v2
    return function


def copy_rows(to: int, source: int, width: int, pitch: int, rows: int, stream: int) -> None:
    """Begin to copy ``rows`` pieces of ``width`` bytes, each ``pitch`` after the last, packed."""
    request = _Rows(
        src_type=_HOST,
        src_host=source,
        src_pitch=pitch,
        dst_type=_DEVICE,
        dst_device=to,
        dst_pitch=width,
        width=width,
        height=rows,
    )
    check("cuMemcpy2DAsync", _library(True).cuMemcpy2DAsync_v2(ctypes.byref(request), stream))


class Mark:
    """A place in a stream that can be waited for; an event of the current context."""

    def __init__(self) -> None:
        self._event = _Handle()
        created = _library(True).cuEventCreate(ctypes.byref(self._event), _DISABLE_TIMING)
        check("cuEventCreate", created)
        self._record = _library(True).cuEventRecord
        self._query = _library(True).cuEventQuery

    def set(self, stream: int) -> None:
        """Move the mark behind what was begun on the stream."""
        if error := self._record(self._event, stream):
            check("cuEventRecord", error)

    def wait(self) -> None:
        """Return when what stands before the mark is done."""
        state = self._query(self._event)
        if state == _NOT_READY:
            state = _library(False).cuEventSynchronize(self._event)
        if state:
            check("cuEventSynchronize", state)

    def free(self) -> None:
        """Give the event back."""
        _library(True).cuEventDestroy_v2(self._event)


def check(call: str, result: int) -> None:
    """Raise :class:`WarmcastError` for a call that gave an error."""
    if result:
        raise WarmcastError(f"CUDA: {call}", expected="success", found=f"error {result}")
