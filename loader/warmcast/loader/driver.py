"""The CUDA driver's C interface, as much of it as the loader calls, by ctypes.

Calls that return at once may keep the interpreter's lock: a thread that gives it up beside many
others spends most of its time getting it back. Calls that wait must not keep it.

Source: CUDA driver API; its functions have been stable since CUDA 11.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from warmcast.manifests.errors import WarmcastError

HOST, DEVICE = 1, 2  # CUmemorytype
Handle = ctypes.c_void_p
U64 = ctypes.c_uint64


class Rows(ctypes.Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_int),
        ("src_host", ctypes.c_void_p),
        ("src_device", U64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_int),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", U64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


_PROTOTYPES = {
    "cuMemcpyHtoDAsync_v2": (U64, ctypes.c_void_p, ctypes.c_size_t, Handle),
    "cuMemcpy2DAsync_v2": (ctypes.POINTER(Rows), Handle),
    "cuEventCreate": (ctypes.POINTER(Handle), ctypes.c_uint),
    "cuEventRecord": (Handle, Handle),
    "cuEventQuery": (Handle,),
    "cuEventSynchronize": (Handle,),
    "cuEventDestroy_v2": (Handle,),
    "cuStreamSynchronize": (Handle,),
    "cuCtxSetCurrent": (Handle,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(Handle), ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuModuleLoadData": (ctypes.POINTER(Handle), ctypes.c_char_p),
    "cuModuleGetFunction": (ctypes.POINTER(Handle), Handle, ctypes.c_char_p),
    "cuFuncSetAttribute": (Handle, ctypes.c_int, ctypes.c_int),
    "cuLaunchKernel": (
        Handle,
        *[ctypes.c_uint] * 7,  # blocks and threads in three dimensions each, shared memory
        Handle,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_void_p,
    ),
}


@cache
def prompt() -> Any:
    """The driver, for calls that return at once: they keep the interpreter's lock."""
    return _declared(ctypes.PyDLL("libcuda.so.1"))


@cache
def waiting() -> Any:
    """The driver, for calls that may wait: they give the interpreter's lock up."""
    return _declared(ctypes.CDLL("libcuda.so.1"))


def _declared(library: Any) -> Any:
    for name, arguments in _PROTOTYPES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
    return library


def check(call: str, result: int) -> None:
    """Raise :class:`WarmcastError` for a call that gave an error."""
    if result:
        raise WarmcastError(f"CUDA: {call}", expected="success", found=f"error {result}")
