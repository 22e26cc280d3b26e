"""Credentials: from Secret blocks into the environment of a run, never through parameters.

A flow's parameter names blocks, ``{"HF_TOKEN": "hf-token"}``; their values are in the environment
while the flow runs. A URL that carries a credential is refused, because Prefect would keep it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast
from urllib.parse import parse_qsl, urlsplit

from prefect.blocks.system import Secret

from warmcast.manifests.errors import UsageError

_CARRIERS = ("token", "secret", "password", "signature", "credential", "sig", "key")


def check_plain(url: str, what: str) -> None:
    """Raise :class:`UsageError` for a URL that carries a credential; it is not repeated."""
    parts = urlsplit(url) if "://" in url else None
    names = [] if parts is None else [n.lower() for n, _ in parse_qsl(parts.query)]
    carried = [n for n in names if n in _CARRIERS or n.endswith(_CARRIERS[:5])]
    if parts is not None and (parts.password or parts.username):
        carried.append("a user or password")
    if carried:
        raise UsageError(
            what,
            expected="a URL without credentials, which Prefect would keep",
            found=carried[0],
            do="give them by the environment, or by a Secret block that secrets= names",
        )


@contextmanager
def in_environment(blocks: Mapping[str, str]) -> Iterator[None]:
    """Hold the values of Secret blocks in the environment, each under its variable's name."""
    values = {}
    for variable, block in blocks.items():
        try:
            values[variable] = str(cast("Secret[str]", Secret.load(block)).get())
        except ValueError:
            raise UsageError(
                f"secrets: {variable}",
                expected=f"a Secret block {block!r}",
                found="none",
                do="make it in Prefect, of the type Secret",
            ) from None
    before = {variable: os.environ.get(variable) for variable in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
