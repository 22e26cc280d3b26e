"""Options at the end of an upstream's URL: ``s3://bucket/prefix?endpoint=…&profile=…``.

What is secret does not stand there: options name the variable, profile or file that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from urllib.parse import parse_qsl, urlsplit

from warmcast.manifests.errors import UsageError

_TRUE = {"": True, "1": True, "yes": True, "true": True, "0": False, "no": False, "false": False}


def parse_options(where: str, text: str, known: Collection[str]) -> dict[str, str]:
    """The options in ``text``, the part after ``?``.

    Raises :class:`UsageError` for one that is not ``known``, or is there twice.
    """
    options: dict[str, str] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        if name not in known:
            raise UsageError(where, expected=f"options {', '.join(known)}", found=repr(name))
        if name in options:
            raise UsageError(where, expected=f"{name!r} once", found="it twice")
        options[name] = value
    return options


def flag(where: str, options: Mapping[str, str], name: str, default: bool = False) -> bool:
    """Whether an option is on: ``yes`` or ``no``; an option without a value is."""
    if name not in options:
        return default
    value = _TRUE.get(options[name].lower())
    if value is None:
        raise UsageError(f"{where}: {name}", expected="yes or no", found=repr(options[name]))
    return value


def seconds(where: str, options: Mapping[str, str], name: str, default: float) -> float:
    """An option's seconds, more than 0."""
    try:
        value = float(options.get(name, default))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{where}: {name}", expected="seconds, over 0", found=options[name])
    return value


def endpoint(where: str, text: str) -> str:
    """An endpoint's URL without a ``/`` at its end; :class:`UsageError` unless it is one."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.username is not None or parts.query or parts.fragment:
        # Not quoted: it may hold a password.
        raise UsageError(f"{where}: endpoint", expected="http(s)://host[:port]", found="another")
    return text.rstrip("/")
