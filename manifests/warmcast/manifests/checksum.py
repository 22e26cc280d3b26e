"""CRC32C (Castagnoli) of any buffer, its combination, and its base64 form.

A checksum is an ``int`` below 2**32 in code, 8 lower-case hex digits in a manifest and the base64
of its 4 big-endian bytes at GCS (``crc32c``) and S3 (``ChecksumCRC32C``).

The arithmetic is google-crc32c's, which takes ``bytes`` only; its wheel links the C library
google/crc32c, whose ``crc32c_extend(crc, pointer, length)`` takes any memory. We call that through
ctypes: no copy, and the GIL is released. Where the symbol cannot be found (a build of the wheel
without its C library), bytes are copied in pieces instead; :data:`ZERO_COPY` tells which.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import importlib
import re
from collections.abc import Callable
from functools import lru_cache

import google_crc32c

from warmcast.manifests.errors import InvalidData

_POLYNOMIAL = 0x82F63B78
_COPY = 1 << 20
_HEX = re.compile("[0-9a-f]{8}")


def _find_extend() -> Callable[[int, int, int], int] | None:
    try:
        # dlsym looks through the libraries that the extension links, so the C library's file
        # name, which carries a hash in wheels, need not be known.
        extension = importlib.import_module("google_crc32c._crc32c")
        function = ctypes.CDLL(str(extension.__file__)).crc32c_extend
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint32
    # A symbol of the right name with another meaning must not pass.
    probe = ctypes.create_string_buffer(b"123456789", 9)
    if function(0, ctypes.addressof(probe), 9) != 0xE3069283:
        return None
    return function


_extend = _find_extend()

ZERO_COPY = _extend is not None
"""Whether checksums are taken in place; False means that every buffer is copied once."""


class _Buffer(ctypes.Structure):
    """CPython's ``Py_buffer``: the only way to a read-only buffer's address without NumPy."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """The CRC32C of a contiguous buffer's bytes, going on from ``value``.

    Raises ``BufferError`` if the buffer is not C-contiguous.
    """
    buffer = _Buffer()
    # A memoryview refuses a strided buffer with BufferError, whatever its exporter would raise.
    _get_buffer(memoryview(data), ctypes.byref(buffer), 0)
    try:
        return crc32c_at(buffer.buf or 0, buffer.len, value)
    finally:
        _release_buffer(ctypes.byref(buffer))


def crc32c_at(address: int, nbytes: int, value: int = 0) -> int:
    """The CRC32C of ``nbytes`` of this process's memory at ``address``, going on from ``value``.

    For tensors, whose memory is known by pointer. The caller keeps the memory alive.
    """
    if nbytes < 0:
        raise ValueError(f"expected a length in bytes, found {nbytes}")
    if _extend is not None:
        return _extend(value, address, nbytes)
    for start in range(0, nbytes, _COPY):
        piece = ctypes.string_at(address + start, min(_COPY, nbytes - start))
        value = google_crc32c.extend(value, piece)
    return value


def multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2) modulo the CRC's, bits reflected.

    Neither may be 0. ``1 << 31`` is the polynomial 1, ``1 << 30`` is x.
    """
    product = 0
    mask = 1 << 31
    while True:
        if a & mask:
            product ^= b
            if not a & (mask - 1):
                return product
        mask >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1


def _squares() -> tuple[int, ...]:
    power = 1 << 30  # x, reflected
    powers = [power]
    for _ in range(66):
        power = multiply(power, power)
        powers.append(power)
    return tuple(powers)


_X_TO_THE_2_TO_THE = _squares()


def combine(first: int, second: int, second_nbytes: int) -> int:
    """The CRC32C of A followed by B, from the CRC32C of A, that of B and B's length in bytes.

    The algebra is zlib's ``crc32_combine``: A's checksum is advanced by B's length, a product
    with x**(8 * length) modulo the polynomial, in O(log length).
    """
    return multiply(power_of_x(8 * second_nbytes), first) ^ second if first else second


@lru_cache(maxsize=4096)  # the chunks of a file are of one length
def power_of_x(exponent: int) -> int:
    """x**exponent modulo the polynomial: advancing a register by ``exponent`` zero bits."""
    power = 1 << 31  # x**0, reflected
    for square in _X_TO_THE_2_TO_THE:
        if exponent & 1:
            power = multiply(square, power)
        exponent >>= 1
        if not exponent:
            break
    return power


def to_hex(value: int) -> str:
    """8 lower-case hex digits, as manifests write a checksum."""
    return f"{value:08x}"


def from_hex(text: str) -> int:
    """The checksum that :func:`to_hex` wrote; :class:`InvalidData` if it is none."""
    if not _HEX.fullmatch(text):
        raise InvalidData("CRC32C", expected="8 lower-case hex digits", found=repr(text))
    return int(text, 16)


def to_base64(value: int) -> str:
    """The base64 of the 4 big-endian bytes, as GCS and S3 write a checksum."""
    return base64.b64encode(value.to_bytes(4, "big")).decode("ascii")


def from_base64(text: str) -> int:
    """The checksum that GCS or S3 wrote; :class:`InvalidData` if it is none."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 4:
        raise InvalidData("CRC32C", expected="base64 of 4 bytes", found=repr(text))
    return int.from_bytes(raw, "big")
