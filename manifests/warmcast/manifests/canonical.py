"""Canonical JSON, and the digests taken over it.

One value has one spelling: keys sorted by code point, no spaces, UTF-8 without escapes for
non-ASCII, floats finite and in their shortest decimal form (Python's ``repr``), no repeated keys.
Two machines that mean the same thing therefore compute the same digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from warmcast.manifests.errors import InvalidData


def canonical_json(value: Any) -> bytes:
    """The canonical UTF-8 spelling of a JSON value.

    Raises :class:`InvalidData` for what JSON does not know: keys that are no strings, NaN,
    infinities, other types.
    """
    _check(value, "value")
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode("utf-8")


def digest(value: Any) -> str:
    """The SHA-256 (64 hex digits) of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def parse_json(data: bytes | memoryview, what: str, error: type[InvalidData] = InvalidData) -> Any:
    """Parse JSON that came from outside; a key that stands twice is an error, not a lost value."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise error(what, expected="unique keys", found=f"the key {twice!r} twice")
        return result

    try:
        return json.loads(bytes(data).decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise error(what, expected="JSON of sane depth", found="JSON nested too deeply") from None
    except (UnicodeDecodeError, ValueError) as cause:
        if isinstance(cause, error):
            raise
        raise error(what, expected="JSON in UTF-8", found=str(cause)) from None


def _check(value: Any, where: str) -> None:
    if value is None or isinstance(value, (bool, int, str)):
        return
    if isinstance(value, float) and math.isfinite(value):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidData(where, expected="string keys", found=repr(key))
            _check(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    else:
        raise InvalidData(where, expected="a JSON value", found=repr(value)[:40])
