"""Canonical JSON, and the digests taken over it.

One value has one spelling: keys sorted by code point, no spaces, UTF-8 without escapes for
non-ASCII, integers of up to 64 bits, floats finite and in their shortest decimal form (Python's
``repr``; ``1.0`` is not ``1``), no repeated keys, no lone surrogates, at most 100 levels. Two
machines that mean the same thing therefore compute the same digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from warmcast.manifests.errors import InvalidData

_MAX_DEPTH = 100
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def canonical_json(value: Any) -> bytes:
    """The canonical UTF-8 spelling of a JSON value.

    Raises :class:`InvalidData`, naming the place, for what has no such spelling: keys that are no
    strings, NaN, infinities, lone surrogates, integers over 64 bits, other types.
    """
    try:
        plain = _plain(value, _MAX_DEPTH)
    except _Refused as refused:
        where = "value" + "".join(reversed(refused.where))
        raise InvalidData(where, expected=refused.expected, found=refused.found) from None
    return json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode("utf-8")


def digest(value: Any) -> str:
    """The SHA-256 (64 hex digits) of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def parse_json(data: bytes | memoryview, what: str, error: type[InvalidData] = InvalidData) -> Any:
    """Parse JSON that came from outside, raising ``error`` for whatever is not plain JSON.

    A key that stands twice is an error, not a lost value; so are NaN, infinities, numbers too
    large for a float and lone surrogates, which Python's parser lets pass.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise error(what, expected="unique keys", found=f"the key {twice!r} twice")
        return result

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise error(what, expected="finite numbers", found=text)
        return number

    try:
        text = bytes(data).decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite
        )
        if _ESCAPED_SURROGATE.search(text):
            _refuse_surrogates(value, what, error)
    except RecursionError:
        raise error(what, expected="JSON of sane depth", found="JSON nested too deeply") from None
    except (UnicodeDecodeError, ValueError) as cause:
        if isinstance(cause, error):
            raise
        raise error(what, expected="JSON in UTF-8", found=str(cause)) from None
    return value


def _refuse_surrogates(value: Any, what: str, error: type[InvalidData]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key, what, error)
            _refuse_surrogates(item, what, error)
    elif isinstance(value, list):
        for item in value:
            _refuse_surrogates(item, what, error)
    elif isinstance(value, str) and _SURROGATE.search(value):
        raise error(what, expected="Unicode text", found=f"a lone surrogate in {value!r}")


class _Refused(Exception):
    """A value without a canonical spelling: what was expected and found, and where, from inside."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__()
        self.expected = expected
        self.found = found
        self.where: list[str] = []


def _plain(value: Any, depth: int) -> Any:
    """``value`` in the types that :mod:`json` writes, each checked; raises :class:`_Refused`."""
    if isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            raise _Refused("Unicode text", f"a surrogate in {value!r}")
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise _Refused("an integer of up to 64 bits", hex(value))
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (list, tuple)):
        return _plain_list(value, depth)
    if isinstance(value, Mapping):
        return _plain_object(value, depth)
    raise _Refused("a JSON value", repr(value))


def _plain_list(value: Sequence[Any], depth: int) -> list[Any]:
    _check_depth(depth)
    plain: list[Any] = []
    try:
        for item in value:
            plain.append(_plain(item, depth - 1))
    except _Refused as refused:
        refused.where.append(f"[{len(plain)}]")
        raise
    return plain


def _plain_object(value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    _check_depth(depth)
    plain: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise _Refused("string keys", repr(key))
        _plain(key, depth)
        try:
            plain[key] = _plain(item, depth - 1)
        except _Refused as refused:
            refused.where.append(f".{key}")
            raise
    return plain


def _check_depth(depth: int) -> None:
    if depth == 0:
        raise _Refused(f"at most {_MAX_DEPTH} levels", "more")
