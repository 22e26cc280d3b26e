"""SHA-256 whose state can be put down and taken up again, by another process or machine.

A state is 64 hex digits, the eight words between two blocks of 64 bytes; whoever keeps it keeps the
number of bytes too, a multiple of 64.

``hashlib`` keeps its state to itself, so OpenSSL's own functions are called, in the library that
the interpreter's ``_hashlib`` links; they release the GIL. They are tried against ``hashlib`` when
first used. Where they cannot be reached (an interpreter that has OpenSSL inside), ``hashlib`` does
the work, and :meth:`Sha256.state` is None.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
from collections.abc import Callable
from functools import lru_cache

from warmcast.manifests.errors import InvalidData

BLOCK = 64
"""Bytes: states are taken at multiples of it."""

_WORDS = 8


class _Context(ctypes.Structure):
    """OpenSSL's ``SHA256_CTX``."""

    _fields_ = (
        ("h", ctypes.c_uint32 * _WORDS),
        ("nl", ctypes.c_uint32),
        ("nh", ctypes.c_uint32),
        ("data", ctypes.c_uint32 * 16),
        ("num", ctypes.c_uint),
        ("md_len", ctypes.c_uint),
    )


_Functions = tuple[Callable[..., int], Callable[..., int], Callable[..., int]]


@lru_cache(maxsize=1)
def _functions() -> _Functions | None:
    """``SHA256_Init``, ``SHA256_Update`` and ``SHA256_Final``; None if they are not to be had."""
    try:
        # dlsym looks through the libraries that the extension links.
        library = ctypes.CDLL(str(importlib.import_module("_hashlib").__file__))
        init, update, final = library.SHA256_Init, library.SHA256_Update, library.SHA256_Final
    except (ImportError, OSError, AttributeError):
        return None
    init.argtypes = (ctypes.POINTER(_Context),)
    update.argtypes = (ctypes.POINTER(_Context), ctypes.c_void_p, ctypes.c_size_t)
    final.argtypes = (ctypes.c_char_p, ctypes.POINTER(_Context))
    functions = (init, update, final)
    # Symbols of the right names with another meaning, or another struct, must not pass.
    probe = bytes(range(256)) * 3
    first = _Native(functions, _begin(functions))
    first.update(memoryview(probe)[:BLOCK])
    second = _Native(functions, _resume(first.words(), BLOCK))
    second.update(memoryview(probe)[BLOCK:])
    return functions if second.hexdigest() == hashlib.sha256(probe).hexdigest() else None


class _Native:
    def __init__(self, functions: _Functions, context: _Context) -> None:
        _, self._update, self._final = functions
        self._context = context

    def update(self, data: memoryview) -> None:
        if not data:
            return
        if data.readonly:
            # An immutable buffer has an address only as bytes; those are small, or tests'.
            held = bytes(data)
            self._update(self._context, held, len(held))
        else:
            first = ctypes.c_char.from_buffer(data)  # holds the buffer where it is
            self._update(self._context, ctypes.addressof(first), len(data))

    def hexdigest(self) -> str:
        copy = _Context.from_buffer_copy(self._context)
        out = ctypes.create_string_buffer(32)
        self._final(out, copy)
        return out.raw.hex()

    def words(self) -> tuple[int, ...]:
        return tuple(self._context.h)


def _begin(functions: _Functions) -> _Context:
    context = _Context()
    functions[0](context)
    return context


def _resume(words: tuple[int, ...], nbytes: int) -> _Context:
    nbits = 8 * nbytes
    return _Context(
        h=(ctypes.c_uint32 * _WORDS)(*words),
        nl=nbits & 0xFFFFFFFF,
        nh=nbits >> 32 & 0xFFFFFFFF,
        md_len=32,
    )


class Sha256:
    """The SHA-256 of what it is updated with. Not safe between threads."""

    def __init__(self) -> None:
        functions = _functions()
        self._native = _Native(functions, _begin(functions)) if functions else None
        self._plain = hashlib.sha256()
        self._nbytes = 0

    @classmethod
    def resume(cls, state: str, nbytes: int) -> Sha256 | None:
        """Go on from a state after ``nbytes`` bytes; None where that cannot be done.

        Raises :class:`InvalidData` for what is no state.
        """
        if len(state) != 8 * _WORDS or nbytes % BLOCK:
            raise InvalidData("SHA-256 state", expected="64 hex digits", found=repr(state))
        try:
            raw = bytes.fromhex(state)
        except ValueError as cause:
            raise InvalidData("SHA-256 state", expected="64 hex digits", found=cause) from None
        functions = _functions()
        if functions is None:
            return None
        words = tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(0, len(raw), 4))
        found = cls()
        found._native = _Native(functions, _resume(words, nbytes))
        found._nbytes = nbytes
        return found

    def update(self, data: memoryview) -> None:
        """Take the next bytes: of one contiguous buffer, of single bytes."""
        if self._native is None:
            self._plain.update(data)
        else:
            self._native.update(data)
        self._nbytes += len(data)

    def hexdigest(self) -> str:
        """64 hex digits, of all bytes until now."""
        return (self._native or self._plain).hexdigest()

    def state(self) -> str | None:
        """The state after a multiple of 64 bytes; None where it cannot be known."""
        if self._native is None or self._nbytes % BLOCK:
            return None
        return "".join(f"{word:08x}" for word in self._native.words())
