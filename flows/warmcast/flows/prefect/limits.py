"""How many files are read at once from one upstream, over all flows: a global concurrency limit.

It is named after the upstream's kind and host, ``warmcast-hf-huggingface.co``,
``warmcast-s3-bucket``. One that does not exist limits nothing; an operator makes it with
``prefect gcl create warmcast-hf-huggingface.co --limit 8``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded

_HUB = "https://huggingface.co"


def limit_name(source: str) -> str | None:
    """The limit's name for an upstream; None for a folder."""
    url = urlsplit(source)
    if "://" not in source or url.scheme == "file":
        return None
    host = url.hostname
    if url.scheme == "hf":
        asked = dict(parse_qsl(url.query)).get("endpoint")
        host = urlsplit(asked or os.environ.get("HF_ENDPOINT") or _HUB).hostname
    return re.sub(r"[^a-z0-9.-]+", "-", f"warmcast-{url.scheme}-{host}".lower())


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of one upstream, or none; a slot is waited for until the deadline."""

    name: str | None
    deadline: Deadline

    @classmethod
    def of(cls, source: str, deadline: Deadline) -> Limit:
        """The limit that the server has for an upstream."""
        name = limit_name(source)
        if name is not None:
            with get_client(sync_client=True) as client:
                try:
                    client.read_global_concurrency_limit_by_name(name)
                except ObjectNotFound:
                    name = None
        return cls(name, deadline)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a slot. Raises :class:`DeadlineExceeded`."""
        if self.name is None:
            yield
            return
        remaining = self.deadline.remaining()
        held = concurrency(
            self.name, occupy=1, timeout_seconds=None if remaining == float("inf") else remaining
        )
        try:
            held.__enter__()
        except TimeoutError as cause:
            raise DeadlineExceeded(
                f"no slot of the concurrency limit {self.name!r} in time",
                do="raise the limit, or give the job a longer deadline",
            ) from cause
        try:
            yield
        finally:
            held.__exit__(None, None, None)
