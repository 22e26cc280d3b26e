"""What the answers of Google Cloud Storage mean as errors of ours.

The JSON API answers with ``{"error": {"code", "message", "errors": [{"reason", …}]}}``; where
media is read, the message may stand there alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from warmcast.manifests.errors import (
    CredentialsRefused,
    IntegrityError,
    NotFound,
    PreconditionFailed,
    StoreError,
    StoreFull,
    WarmcastError,
)
from warmcast.manifests.stores.http import Transient

_BUSY = {"rateLimitExceeded", "userRateLimitExceeded", "backendError", "internalError"}
_CHECKSUM = re.compile("crc32c|checksum", re.IGNORECASE)
_FULL = {"quotaExceeded", "dailyLimitExceeded"}


@dataclass(frozen=True, slots=True)
class _Said:
    """What an answer that is no success says of itself; empty where it says nothing."""

    reason: str
    message: str


def error_of(where: str, status: int, body: bytes, retry_after: str | None = None) -> WarmcastError:
    """The error that an answer's HTTP status and body mean."""
    said = _said(body)
    found = f"{status} {said.message}".strip()
    if status == 401:
        return CredentialsRefused(
            where,
            expected="a token that is good",
            found=found,
            do="check GOOGLE_APPLICATION_CREDENTIALS, or the service account of this machine",
        )
    if status == 507 or said.reason in _FULL:
        return StoreFull(where, found=found, do="raise the quota")
    if status in (408, 429) or status >= 500 or said.reason in _BUSY:
        seconds = retry_after if retry_after and retry_after.isdigit() else None
        return Transient(where, found, float(seconds) if seconds else None)
    if status == 403:
        return CredentialsRefused(
            where,
            expected="permission",
            found=found,
            do="grant the account storage.objects.get, list, create and delete on the bucket",
        )
    if status == 404:
        no_bucket = "bucket does not exist" in said.message
        return NotFound(
            where, expected="an object", found="no such bucket" if no_bucket else "none"
        )
    # Google answers 400; its testbench 412, as if a condition had not held.
    if status in (400, 412) and _CHECKSUM.search(said.message):
        return IntegrityError(
            where, expected="the bytes promised", found=found, do="send them again"
        )
    if status == 412:
        return PreconditionFailed(where, expected="the version named", found="another")
    return StoreError(where, expected="success", found=found)


def _said(body: bytes) -> _Said:
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        details = error.get("errors") or [{}]
        return _Said(str(details[0].get("reason", "")), str(error.get("message", "")))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return _Said("", text)
