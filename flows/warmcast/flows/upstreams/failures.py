"""What the failures of servers mean to whoever deploys from them.

What can pass is tried again: a bounded number of times, under the deadline, and not before the
server said. Everything else is an error of the source.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TypeVar

from urllib3 import BaseHTTPResponse

from warmcast.flows.errors import (
    SourceChanged,
    SourceError,
    SourceNotFound,
    SourceRefused,
    SourceUnreachable,
)
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    CredentialsMissing,
    CredentialsRefused,
    NotFound,
    PreconditionFailed,
    StoreError,
    StoreUnreachable,
    WarmcastError,
)
from warmcast.manifests.stores.http import Attempts, Transient

T = TypeVar("T")

LONGEST_WAIT = 600.0
"""Seconds that a server may ask to be left alone; longer ends the deploy instead."""

_WINDOW = re.compile(r"\bt=(\d+)")  # of RateLimit: "api";r=0;t=55
_AGAIN = "deploy it again"


def persist(where: str, deadline: Deadline, work: Callable[[], T]) -> T:
    """What ``work`` returns, once it raises no :class:`Transient`; a bounded number of times."""
    attempts = Attempts(where, deadline)
    while True:
        try:
            return work()
        except Transient as failure:
            attempts.wait(failure)


def answer_error(where: str, response: BaseHTTPResponse, *, do: str) -> WarmcastError:
    """The error that an answer without what was asked for means; ``do`` is for a refusal."""
    status = response.status
    if status in (408, 425, 429) or status >= 500:
        seconds = retry_after(response.headers)
        if seconds is not None and seconds > LONGEST_WAIT:
            return SourceUnreachable(
                where,
                expected="an answer",
                found=f"{status}, and none for {seconds:.0f} s",
                do="deploy it again later, or with credentials that may ask more often",
            )
        return Transient(where, str(status), seconds)
    if status in (401, 403, 407):
        return SourceRefused(where, expected="permission", found=status, do=do)
    if status in (404, 410):
        return NotFound(where, expected="to be there", found=status)
    if status == 412:
        return PreconditionFailed(where, expected="the version that was listed", found="another")
    return SourceError(where, expected="success", found=status)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that a server asks to be left alone; None if it does not say."""
    text = headers.get("Retry-After", "")
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):  # it is not there, or no date
        window = _WINDOW.search(headers.get("RateLimit", ""))
        return float(window[1]) if window else None


@contextmanager
def explained(*, listed: bool) -> Iterator[None]:
    """Turn the errors of stores into errors of the source.

    ``listed``: it is about a file that was there when the upstream was listed.
    """
    try:
        yield
    except PreconditionFailed as cause:
        raise SourceChanged(str(cause), do=_AGAIN) from cause
    except NotFound as cause:
        if listed:
            raise SourceChanged(str(cause), do=_AGAIN) from cause
        raise SourceNotFound(str(cause)) from cause
    except (CredentialsMissing, CredentialsRefused) as cause:
        raise SourceRefused(str(cause)) from cause
    except StoreUnreachable as cause:
        raise SourceUnreachable(str(cause)) from cause
    except StoreError as cause:
        raise SourceError(str(cause)) from cause
